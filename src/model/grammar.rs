//! Structured output: what an output may look like (a JSON Schema, a regular expression, a grammar, one of several
//! texts), and from there, token after token, which tokens may be drawn next. The parsing is llguidance's.
//! Deliberately absent: who draws, and when.

mod ebnf;
mod kept;
mod structural;
mod vocabulary;

pub use kept::Uses;
pub use structural::structural_tag;

use crate::kernels::sampling::mask_words;
use crate::model::text::Text;
use kept::Kept;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;
use toktrie::InferenceCapabilities;

/// Bytes of a schema, expression or grammar, or of all choices together.
pub const MOST_BYTES: usize = 256 << 10;
/// Choices of one constraint.
pub const MOST_CHOICES: usize = 1024;
/// Symbols of a compiled grammar.
const MOST_SYMBOLS: usize = 200_000;
/// States of a request's lexer, of one to two kilobytes each.
const MOST_LEXER_STATES: usize = 50_000;
/// What a byte of a constraint takes when it is compiled, besides its lexer: about so many bytes, as measured with a
/// schema of 190 KB.
const COMPILED_BYTES: usize = 160;
/// White space that may stand between the parts of a JSON text: a space or two, or a new line and its indentation. No
/// more, since a model that has begun with it may never end.
const JSON_SPACE: &str = r"\x20{1,2}|\x0D?\x0A(\x20{0,24}|\x09{0,8})";

/// What an output must look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// JSON that satisfies this JSON Schema.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// Text that this regular expression matches from its beginning to its end.
    Regex(String),
    /// Text derived from this grammar: EBNF as llama.cpp and XGrammar write it (`root ::= ...`), or Lark.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Constraint {
    /// Of its texts.
    fn bytes(&self) -> usize {
        match self {
            Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Grammar(text) => text.len(),
            Constraint::Choice(choices) => choices.iter().map(String::len).sum(),
            Constraint::JsonObject => 0,
        }
    }
}

/// Why an output cannot be constrained so, or not any further.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// The tokens' bytes are not known.
    #[error("constraints need a byte-level or byte-fallback tokenizer, this model's is neither")]
    Tokenizer,
    /// Too long.
    #[error("the constraint has {bytes} bytes, at most {MOST_BYTES} are taken")]
    TooLong {
        /// Given.
        bytes: usize,
    },
    /// Too many, or none.
    #[error("the constraint has {choices} choices, 1 to {MOST_CHOICES} are taken")]
    Choices {
        /// Given.
        choices: usize,
    },
    /// Not what it should be.
    #[error("the constraint cannot be used: {0}")]
    Invalid(String),
    /// The parser gave up.
    #[error("the constraint became too complex to follow: {0}")]
    Stuck(String),
}

/// What a model's outputs can be constrained with: its tokens as bytes. Made once a model.
pub struct Grammars {
    factory: ParserFactory,
    /// Of the model: its rows may be more than the tokenizer knows.
    vocabulary: u32,
    eos_ids: Vec<u32>,
    kept: Kept,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model of `vocabulary` tokens that ends with any of `eos_ids`.
    pub fn new(text: &Text, vocabulary: u32, eos_ids: &[u32]) -> Result<Grammars, GrammarError> {
        let tokens = vocabulary::environment(text, vocabulary, eos_ids)?;
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError::Invalid(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_grammar_size = MOST_SYMBOLS;
        limits.max_lexer_states = MOST_LEXER_STATES;
        // They would hold what was generated so far.
        limits.verbose_errors = false;
        Ok(Grammars { factory, vocabulary, eos_ids: eos_ids.to_vec(), kept: Kept::default() })
    }

    /// A constraint at its beginning: compiled, or one of those that were compiled lately. With `ignore_eos` an output
    /// that could end goes on as long as it can.
    pub fn start(&self, constraint: &Constraint, ignore_eos: bool) -> Result<Started, GrammarError> {
        if let Some(started) = self.kept.find(constraint, ignore_eos) {
            return Ok(started);
        }
        let (started, bytes) = self.compile(constraint, ignore_eos)?;
        self.kept.keep(constraint, ignore_eos, bytes, &started);
        Ok(started)
    }

    /// How often constraints were asked for, and of which the work was already done.
    pub fn uses(&self) -> Uses {
        self.kept.uses()
    }

    /// Compiles a constraint and finds the first tokens: takes a millisecond for a small one, up to seconds for one at
    /// the limits. Says about how many bytes it takes.
    fn compile(&self, constraint: &Constraint, ignore_eos: bool) -> Result<(Started, usize), GrammarError> {
        let invalid = |error: anyhow::Error| GrammarError::Invalid(first_line(&error.to_string()));
        let parser = self.factory.create_parser(top_level(constraint)?).map_err(invalid)?;
        let bytes = parser.parser.lexer_stats().num_bytes + constraint.bytes() * COMPILED_BYTES;
        let mut grammar = Grammar {
            matcher: Matcher::new(Ok(parser)),
            vocabulary: self.vocabulary,
            eos_ids: self.eos_ids.clone(),
            ignore_eos,
        };
        match grammar.next().map_err(|error| GrammarError::Invalid(error.to_string()))? {
            Next::Mask(mask) => Ok((Started { grammar: Box::new(grammar), mask }, bytes)),
            Next::Complete => Err(GrammarError::Invalid("it allows no text at all".to_owned())),
        }
    }
}

/// A constraint at its beginning.
#[derive(Clone, Debug)]
pub struct Started {
    /// To be told each token.
    pub grammar: Box<Grammar>,
    /// What the first token may be: [`Next::Mask`].
    pub mask: Arc<[u32]>,
}

/// Where one output stands.
pub struct Grammar {
    matcher: Matcher,
    vocabulary: u32,
    eos_ids: Vec<u32>,
    ignore_eos: bool,
}

impl Clone for Grammar {
    /// Of its own from here on: nothing is shared that both would wait for.
    fn clone(&self) -> Grammar {
        Grammar { matcher: self.matcher.deep_clone(), eos_ids: self.eos_ids.clone(), ..*self }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

/// What may follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// One of these tokens: bit `i % 32` of word `i / 32` stands for token `i`; `vocabulary / 32` words, rounded up.
    Mask(Arc<[u32]>),
    /// Nothing: the output is complete.
    Complete,
}

impl Grammar {
    /// Takes a token that was drawn; says what may follow. Tens of microseconds mostly, up to about ten milliseconds.
    pub fn take(&mut self, token: u32) -> Result<Next, GrammarError> {
        // What the parser says quotes the output, which is nobody's but the client's.
        let refused = |_| GrammarError::Stuck("a token was drawn that it does not allow".to_owned());
        self.matcher.consume_token(token).map_err(refused)?;
        self.next()
    }

    fn next(&mut self) -> Result<Next, GrammarError> {
        if self.matcher.is_stopped() {
            return match self.matcher.stop_reason() {
                reason if reason.is_ok() => Ok(Next::Complete),
                reason => Err(GrammarError::Stuck(reason.to_string())),
            };
        }
        let allowed = self.matcher.compute_mask().map_err(stuck)?;
        let mut words = allowed.as_slice().to_vec();
        words.resize(mask_words(self.vocabulary) as usize, 0);
        let ends: Vec<u32> = self.eos_ids.iter().copied().filter(|id| bit(&words, *id)).collect();
        for id in &ends {
            words[(id / 32) as usize] &= !(1 << (id % 32));
        }
        if words.iter().all(|word| *word == 0) {
            return Ok(Next::Complete);
        }
        if !self.ignore_eos {
            for id in ends {
                words[(id / 32) as usize] |= 1 << (id % 32);
            }
        }
        Ok(Next::Mask(words.into()))
    }
}

/// Whether a mask allows a token.
pub fn bit(mask: &[u32], token: u32) -> bool {
    mask.get((token / 32) as usize).is_some_and(|word| word >> (token % 32) & 1 != 0)
}

fn stuck(error: anyhow::Error) -> GrammarError {
    GrammarError::Stuck(first_line(&error.to_string()))
}

/// Errors quote what they are about over many lines.
fn first_line(text: &str) -> String {
    const MOST: usize = 400;
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("unknown").trim();
    match line.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line.to_owned(),
    }
}

fn top_level(constraint: &Constraint) -> Result<TopLevelGrammar, GrammarError> {
    let bytes = constraint.bytes();
    if bytes > MOST_BYTES {
        return Err(GrammarError::TooLong { bytes });
    }
    let lark = |text: String| TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(text));
    Ok(match constraint {
        Constraint::JsonSchema(text) => {
            let schema: Value = serde_json::from_str(text)
                .map_err(|error| GrammarError::Invalid(format!("the JSON Schema is not JSON: {error}")))?;
            TopLevelGrammar::from_json_schema(with_bounded_space(schema)?)
        }
        Constraint::JsonObject => TopLevelGrammar::from_json_schema(with_bounded_space(json!({"type": "object"}))?),
        Constraint::Regex(text) => TopLevelGrammar::from_regex(text),
        Constraint::Grammar(text) if ebnf::is_ebnf(text) => lark(ebnf::to_lark(text).map_err(GrammarError::Invalid)?),
        Constraint::Grammar(text) => lark(text.clone()),
        Constraint::Choice(choices) => {
            if choices.is_empty() || choices.len() > MOST_CHOICES {
                return Err(GrammarError::Choices { choices: choices.len() });
            }
            if choices.iter().any(String::is_empty) {
                return Err(GrammarError::Invalid("a choice is empty".to_owned()));
            }
            let texts: Vec<String> = choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
            lark(format!("start: {}", texts.join(" | ")))
        }
    })
}

/// The schema, and between the parts of what it describes at most so much white space. A schema's own wish about that
/// (`x-guidance`) stands.
fn with_bounded_space(mut schema: Value) -> Result<Value, GrammarError> {
    match &mut schema {
        Value::Object(keys) => {
            keys.entry("x-guidance").or_insert_with(|| json!({"whitespace_pattern": JSON_SPACE}));
        }
        Value::Bool(true) => schema = json!({"x-guidance": {"whitespace_pattern": JSON_SPACE}}),
        other => {
            let given = first_line(&other.to_string());
            return Err(GrammarError::Invalid(format!("the JSON Schema is {given}, must be an object")));
        }
    }
    Ok(schema)
}
