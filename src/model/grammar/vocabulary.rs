//! A tokenizer's tokens as bytes: as they are sent to worker processes, and as llguidance takes them there.
//! Deliberately absent: grammars.

use super::GrammarError;
use crate::model::text::Text;
use std::sync::Arc;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// The tokens of a model.
pub(super) struct Vocabulary {
    /// Of the model; rows that the tokenizer does not know are no text and never allowed.
    pub(super) rows: u32,
    /// Tokens that end an output.
    pub(super) eos_ids: Vec<u32>,
    /// Each token's bytes.
    words: Vec<Vec<u8>>,
}

impl Vocabulary {
    /// Of a model of `rows` rows.
    pub(super) fn of(text: &Text, rows: u32, eos_ids: &[u32]) -> Result<Vocabulary, GrammarError> {
        let bytes = text.token_bytes().ok_or(GrammarError::Tokenizer)?;
        let mut words: Vec<Vec<u8>> = bytes.into_iter().take(rows as usize).collect();
        words.resize(rows as usize, Vec::new());
        Ok(Vocabulary { rows, eos_ids: eos_ids.to_vec(), words })
    }

    /// Adds it to a frame: numbers of four bytes, words behind their length.
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

    /// From what [`Vocabulary::write`] has written; `None` where it is cut.
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

    /// For llguidance. `tokenize` gives the tokens that the tokenizer makes of a text, if it can.
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

/// Text to token ids; `None` if the tokenizer cannot be asked.
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
