//! The bytes of a tokenizer's tokens: their encoding for worker processes, and their conversion for llguidance.
//!
//! Not here: grammars.

use super::GrammarError;
use crate::model::text::Text;
use std::sync::Arc;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// The token vocabulary of a model.
pub(super) struct Vocabulary {
    /// The number of the model's tokens. Tokens that the tokenizer does not know have no text and are never allowed.
    pub(super) rows: u32,
    /// The tokens that end an output.
    pub(super) eos_ids: Vec<u32>,
    /// The bytes of each token, by id.
    words: Vec<Vec<u8>>,
}

impl Vocabulary {
    /// Creates the vocabulary of a model with `rows` tokens.
    pub(super) fn of(text: &Text, rows: u32, eos_ids: &[u32]) -> Result<Vocabulary, GrammarError> {
        let bytes = text.token_bytes().ok_or(GrammarError::Tokenizer)?;
        let mut words: Vec<Vec<u8>> = bytes.into_iter().take(rows as usize).collect();
        words.resize(rows as usize, Vec::new());
        Ok(Vocabulary { rows, eos_ids: eos_ids.to_vec(), words })
    }

    /// Appends the vocabulary to a frame. Numbers are little-endian u32; each token's bytes follow their length.
    pub(super) fn write(&self, to: &mut Vec<u8>) {
        let mut number = |value: usize| to.extend((value as u32).to_le_bytes());
        number(self.rows as usize);
        number(self.eos_ids.len());
        self.eos_ids.iter().for_each(|id| number(*id as usize));
        for word in &self.words {
            to.extend((word.len() as u32).to_le_bytes());
            to.extend(word);
        }
    }

    /// Parses what [`Vocabulary::write`] wrote. Returns `None` if it is truncated.
    pub(super) fn read(mut from: &[u8]) -> Option<Vocabulary> {
        let rows = number(&mut from)?;
        let ends = number(&mut from)?;
        let eos_ids = (0..ends).map(|_| number(&mut from)).collect::<Option<Vec<u32>>>()?;
        let word = |from: &mut &[u8]| {
            let length = number(from)? as usize;
            let (word, rest) = from.split_at_checked(length)?;
            *from = rest;
            Some(word.to_vec())
        };
        let words = (0..rows).map(|_| word(&mut from)).collect::<Option<Vec<Vec<u8>>>>()?;
        Some(Vocabulary { rows, eos_ids, words })
    }

    /// Creates the vocabulary for llguidance. `tokenize` returns the model's own tokens for a text, or `None` if it
    /// cannot, in which case the text is tokenized greedily.
    pub(super) fn environment(&self, tokenize: impl Fn(&str) -> Option<Vec<u32>> + Send + Sync + 'static) -> TokEnv {
        let eos = self.eos_ids.first().copied().unwrap_or(u32::MAX);
        let trie = TokTrie::from(&TokRxInfo::new(self.rows, eos), &self.words);
        let inside = self.eos_ids.iter().all(|id| *id < self.rows);
        let trie = if inside && !self.eos_ids.is_empty() { trie.with_eos_tokens(&self.eos_ids) } else { trie };
        Arc::new(Environment { trie, tokenize: Box::new(tokenize) })
    }
}

fn number(from: &mut &[u8]) -> Option<u32> {
    let (value, rest) = from.split_first_chunk::<4>()?;
    *from = rest;
    Some(u32::from_le_bytes(*value))
}

/// Converts text to token ids; `None` if the tokenizer is not available for it.
type Tokenize = dyn Fn(&str) -> Option<Vec<u32>> + Send + Sync;

struct Environment {
    trie: TokTrie,
    tokenize: Box<Tokenize>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            (self.tokenize)(text).unwrap_or_else(|| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }
}
