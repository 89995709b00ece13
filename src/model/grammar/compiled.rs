//! Compiles constraints and follows them with llguidance. This runs in a worker process, because nothing here bounds
//! stack, memory or time.
//!
//! Not here: process management, and who sends the requests.

use super::vocabulary::Vocabulary;
use super::{Constraint, GrammarError, JSON_SPACE, MOST_CHOICES, Next, bit, ebnf, structural};
use crate::kernels::sampling::mask_words;
use llguidance::api::{GrammarWithLexer, StopReason, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::Arc;
use toktrie::InferenceCapabilities;

/// The maximum number of symbols of a compiled grammar.
const MOST_SYMBOLS: usize = 200_000;
/// The maximum number of lexer states per output. A state takes one to two kilobytes.
const MOST_LEXER_STATES: usize = 50_000;
/// The estimated size in bytes of a compiled constraint per byte of its text, without its lexer. Measured with a schema
/// of 190 KB.
const COMPILED_BYTES: usize = 160;

/// A compiler of constraints for one vocabulary.
pub(super) struct Compiler {
    factory: ParserFactory,
    /// The number of the model's tokens, which may exceed the tokenizer's.
    vocabulary: u32,
    eos_ids: Vec<u32>,
}

/// A compiled constraint, at its start.
pub(super) struct Compiled {
    /// The parser state at the start, which is cloned for each output.
    pub(super) follower: Follower,
    /// The mask of the tokens that may come first.
    pub(super) mask: Arc<[u32]>,
    /// The estimated size in bytes.
    pub(super) bytes: usize,
}

impl Compiler {
    /// Creates a compiler. `tokenize` returns the model's own tokens for a text.
    pub(super) fn new(
        vocabulary: &Vocabulary,
        tokenize: impl Fn(&str) -> Option<Vec<u32>> + Send + Sync + 'static,
    ) -> Result<Compiler, GrammarError> {
        let tokens = vocabulary.environment(tokenize);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError::Invalid(error.to_string()))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_grammar_size = MOST_SYMBOLS;
        limits.max_lexer_states = MOST_LEXER_STATES;
        // Verbose errors would include the text generated so far.
        limits.verbose_errors = false;
        Ok(Compiler { factory, vocabulary: vocabulary.rows, eos_ids: vocabulary.eos_ids.clone() })
    }

    /// Compiles a constraint and computes its first mask.
    pub(super) fn compile(&self, constraint: &Constraint, ignore_eos: bool) -> Result<Compiled, GrammarError> {
        let invalid = |error: anyhow::Error| GrammarError::Invalid(reason(&error.to_string()));
        let parser = self.factory.create_parser(top_level(constraint)?).map_err(invalid)?;
        let bytes = parser.parser.lexer_stats().num_bytes + constraint.bytes() * COMPILED_BYTES;
        let mut follower = Follower {
            matcher: Matcher::new(Ok(parser)),
            vocabulary: self.vocabulary,
            eos_ids: self.eos_ids.clone(),
            ignore_eos,
        };
        match follower.next()? {
            Next::Mask(mask) => Ok(Compiled { follower, mask, bytes }),
            Next::Complete => Err(GrammarError::Invalid("it allows no text at all".to_owned())),
        }
    }
}

/// The parser state of one output.
pub(super) struct Follower {
    matcher: Matcher,
    vocabulary: u32,
    eos_ids: Vec<u32>,
    ignore_eos: bool,
}

impl Clone for Follower {
    /// Returns an independent copy.
    fn clone(&self) -> Follower {
        Follower { matcher: self.matcher.deep_clone(), eos_ids: self.eos_ids.clone(), ..*self }
    }
}

impl Follower {
    /// Takes tokens that were generated before.
    pub(super) fn replay(&mut self, tokens: &[u32]) -> Result<(), GrammarError> {
        tokens.iter().try_for_each(|token| self.consume(*token))
    }

    /// Takes a generated token and returns what may follow.
    pub(super) fn take(&mut self, token: u32) -> Result<Next, GrammarError> {
        self.consume(token)?;
        self.next()
    }

    fn consume(&mut self, token: u32) -> Result<(), GrammarError> {
        self.matcher.consume_token(token).map_err(stuck)
    }

    fn next(&mut self) -> Result<Next, GrammarError> {
        if self.matcher.is_stopped() {
            return match self.matcher.stop_reason() {
                StopReason::LexerTooComplex => Err(GrammarError::Stuck(LEXER_LIMIT.to_owned())),
                StopReason::ParserTooComplex => Err(GrammarError::Stuck(PARSER_LIMIT.to_owned())),
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

const LEXER_LIMIT: &str = "its regular expressions need more lexer states or steps for one token than are taken \
                           (50000 states, 200000 steps)";
const PARSER_LIMIT: &str =
    "its rules need more parser items for one token than are taken (2000 in a row, 50000 in all)";

/// Converts a parser error. The parser's message quotes the output, which is private to the client, so only the kind of
/// the error is reported.
fn stuck(error: anyhow::Error) -> GrammarError {
    let text = error.to_string();
    GrammarError::Stuck(if text.contains("lexer error") {
        LEXER_LIMIT.to_owned()
    } else if text.contains("parser error") || text.contains("Parser Error") || text.contains("too many items") {
        PARSER_LIMIT.to_owned()
    } else {
        "its parser cannot go on with the tokens drawn so far".to_owned()
    })
}

/// Returns the first non-empty line of a text, at most 400 characters. Errors quote their subject over many lines.
pub(super) fn first_line(text: &str) -> String {
    const MOST: usize = 400;
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("unknown").trim();
    match line.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line.to_owned(),
    }
}

/// Returns what an error of the parser says. The error of a regular expression quotes it over several lines, marks the
/// place below it, and says what is wrong in the last line.
fn reason(text: &str) -> String {
    let first = first_line(text);
    let Some(why) = text.lines().find_map(|line| line.trim().strip_prefix("error: ")) else { return first };
    if first.contains(why) {
        return first;
    }
    let mark = |line: &&str| line.trim_start().starts_with('^') && line.trim().chars().all(|c| c == '^' || c == ' ');
    // The quoted expression and the mark are indented by four spaces.
    let place = text.lines().find(mark).and_then(|line| line.strip_prefix("    ")?.find('^'));
    let place = place.map_or(String::new(), |place| format!(" at character {}", place + 1));
    format!("{first} {}{place}", first_line(why))
}

fn top_level(constraint: &Constraint) -> Result<TopLevelGrammar, GrammarError> {
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
        Constraint::StructuralTag(text) => lark(structural::structural_tag(text)?),
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

/// Bounds the white space between the parts of the JSON that a schema describes. A white space setting in the schema
/// itself (`x-guidance`) takes precedence.
pub(super) fn with_bounded_space(mut schema: Value) -> Result<Value, GrammarError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_an_expression_says_what_is_wrong_and_where() {
        let text = "invalid regex \"a(b\": regex parse error:\n    a(b\n     ^\nerror: unclosed group";
        assert_eq!(reason(text), "invalid regex \"a(b\": regex parse error: unclosed group at character 2");
        assert_eq!(reason("error: one line"), "error: one line");
        assert_eq!(reason("first\nsecond"), "first");
    }
}
