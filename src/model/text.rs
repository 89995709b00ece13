//! Tokenizer, chat template, and the way from token ids to text. Skeleton.

/// Tokenizer and chat template of a checkpoint.
#[derive(Debug)]
pub struct Text {}
