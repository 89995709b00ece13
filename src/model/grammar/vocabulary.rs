//! A tokenizer's tokens as bytes, for llguidance. Deliberately absent: grammars.

use super::GrammarError;
use crate::model::text::Text;
use std::sync::Arc;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

struct Environment {
    trie: TokTrie,
    text: Text,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            self.text.encode(text, false).unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }
}

/// The tokens of a model of `vocabulary` rows. Rows that the tokenizer does not know are no text and never allowed.
pub(super) fn environment(text: &Text, vocabulary: u32, eos_ids: &[u32]) -> Result<TokEnv, GrammarError> {
    let bytes = text.token_bytes().ok_or(GrammarError::Tokenizer)?;
    let mut words: Vec<Vec<u8>> = bytes.into_iter().take(vocabulary as usize).collect();
    words.resize(vocabulary as usize, Vec::new());
    let eos = eos_ids.first().copied().unwrap_or(u32::MAX);
    let trie = TokTrie::from(&TokRxInfo::new(vocabulary, eos), &words);
    let inside = eos_ids.iter().all(|id| *id < vocabulary);
    let trie = if inside && !eos_ids.is_empty() { trie.with_eos_tokens(eos_ids) } else { trie };
    Ok(Arc::new(Environment { trie, text: text.clone() }))
}
