//! The tokenizer of a GGUF model as the `tokenizer.json` and `tokenizer_config.json` of a Hugging Face checkpoint:
//! byte-level BPE with a known pre-tokenizer, and SentencePiece's BPE with scores or merges.
//!
//! Not here: other kinds of tokenizers, and pre-tokenizers whose expressions are not known exactly. They are refused by
//! name, because a wrong expression changes what a model reads without any error.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::config::SpecialIds;
use super::container::{Array, Header, Value};

/// The maximum length in bytes of a SentencePiece token from which merges are derived.
pub const MAX_PIECE_BYTES: usize = 256;

/// The character that stands for a space in SentencePiece tokens.
const SPACE: &str = "\u{2581}";

/// The type of a token in the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    fn of(id: i64) -> Option<Kind> {
        Some(match id {
            1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => return None,
        })
    }
}

/// A step that cuts text before it is tokenized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step<'a> {
    /// Isolates the matches of an expression.
    Split(&'a str),
    /// Isolates each digit.
    Digits,
    /// GPT-2's expression, which the byte-level step of the library applies itself.
    Gpt2,
}

/// A pre-tokenizer: the names that `tokenizer.ggml.pre` has for it, and what it does.
#[derive(Debug)]
struct Pre {
    names: &'static [&'static str],
    steps: &'static [Step<'static>],
    /// Whether text is normalised to Unicode's composed form first.
    nfc: bool,
    /// Whether a piece of text that is a token as a whole becomes that token, whatever the merges say.
    ignore_merges: bool,
    /// Whether a sequence begins with a special token if the metadata does not say.
    add_bos: bool,
}

/// Letters, digits one by one, punctuation and spaces; English contractions apart.
const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// The expression [`QWEN2`] without English contractions.
const QWEN2_PLAIN: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The expression [`QWEN2`] with ends of lines apart from punctuation.
const SEED: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}|",
    r" ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// The expression [`QWEN2`] with combining marks as letters.
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// The expression [`QWEN2`] with up to three digits together.
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Words by case, with contractions as their ends, and up to three digits together.
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Words by case, and digits one by one.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Chinese and Japanese characters.
const DEEPSEEK3_HAN: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";
/// Letters after a sign, words, punctuation and spaces.
const DEEPSEEK3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"##,
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Chinese and Korean characters.
const DEEPSEEK_HAN: &str = "[一-龥ࠀ-一가-\u{d7ff}]+";
/// Letters of alphabets that have an upper and a lower case.
const DEEPSEEK_LETTERS: &str = concat!(
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ",
    "ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ",
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
);
/// Punctuation.
const DEEPSEEK_SIGNS: &str = "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+";

/// The known pre-tokenizers.
const PRES: &[Pre] = &[
    Pre {
        names: &["qwen2", "deepseek-r1-qwen", "hunyuan"],
        steps: &[Step::Split(QWEN2)],
        nfc: true,
        ignore_merges: false,
        add_bos: false,
    },
    Pre { names: &["qwen35"], steps: &[Step::Split(QWEN35)], nfc: true, ignore_merges: false, add_bos: false },
    Pre { names: &["ufakzeka"], steps: &[Step::Split(QWEN2_PLAIN)], nfc: false, ignore_merges: false, add_bos: false },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3", "lfm2", "pixtral"],
        steps: &[Step::Split(LLAMA3)],
        nfc: false,
        ignore_merges: true,
        add_bos: true,
    },
    Pre {
        names: &["smaug-bpe", "dbrx", "chatglm-bpe"],
        steps: &[Step::Split(LLAMA3)],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    Pre { names: &["glm4"], steps: &[Step::Split(LLAMA3)], nfc: false, ignore_merges: true, add_bos: false },
    Pre {
        names: &["gpt-4o", "llama4", "minimax-m2"],
        steps: &[Step::Split(GPT4O)],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    Pre { names: &["tekken"], steps: &[Step::Split(TEKKEN)], nfc: false, ignore_merges: true, add_bos: true },
    Pre {
        names: &["gpt-2", "phi-2", "exaone4"],
        steps: &[Step::Gpt2],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    Pre { names: &["olmo"], steps: &[Step::Gpt2], nfc: true, ignore_merges: false, add_bos: false },
    Pre { names: &["seed-coder"], steps: &[Step::Split(SEED)], nfc: false, ignore_merges: false, add_bos: false },
    Pre {
        names: &["smollm", "starcoder", "refact"],
        steps: &[Step::Digits, Step::Gpt2],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    Pre { names: &["command-r"], steps: &[Step::Digits, Step::Gpt2], nfc: true, ignore_merges: false, add_bos: false },
    Pre {
        names: &["deepseek-llm"],
        steps: &[
            Step::Split("[\r\n]"),
            Step::Split(DEEPSEEK_LETTERS),
            Step::Split(DEEPSEEK_SIGNS),
            Step::Split(r"\s+$"),
            Step::Split(DEEPSEEK_HAN),
            Step::Digits,
        ],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["deepseek-coder"],
        steps: &[
            Step::Split("[\r\n]"),
            Step::Split(r"\s?\p{L}+"),
            Step::Split(r"\s?\p{P}+"),
            Step::Split(DEEPSEEK_HAN),
            Step::Digits,
        ],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
    Pre {
        names: &["deepseek-v3", "hunyuan-dense"],
        steps: &[Step::Split(r"\p{N}{1,3}"), Step::Split(DEEPSEEK3_HAN), Step::Split(DEEPSEEK3)],
        nfc: false,
        ignore_merges: false,
        add_bos: false,
    },
];

/// Returns the names of the known pre-tokenizers.
pub fn known_pres() -> impl Iterator<Item = &'static str> {
    PRES.iter().flat_map(|pre| pre.names).copied()
}

/// Returns the name of the pre-tokenizer that takes these steps, if one is known.
pub(super) fn name_of_pre(steps: &[Step<'_>], nfc: bool, ignore_merges: bool) -> Option<&'static str> {
    let same = |pre: &&Pre| pre.steps == steps && pre.nfc == nfc && pre.ignore_merges == ignore_merges;
    PRES.iter().find(same).and_then(|pre| pre.names.first()).copied()
}

/// The spellings of tokens that end an answer, in the vocabularies of the known models. Only tokens that are not
/// ordinary text count.
pub(super) const ENDS: [&str; 16] = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    // It stands for the answer of a tool that the model has called.
    "<|tool_response>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "</s>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// A tokenizer in the files of a Hugging Face checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizerFiles {
    /// The content of tokenizer.json.
    pub tokenizer: Json,
    /// The content of tokenizer_config.json, with the chat templates.
    pub config: Json,
    /// The special token ids.
    pub ids: SpecialIds,
    /// The number of tokens in the metadata, which includes unused ones.
    pub tokens: usize,
}

/// The reason why a tokenizer cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TokenizerError {
    /// A required metadata key is missing.
    #[error("the metadata key {0} is missing")]
    Missing(&'static str),
    /// A metadata value has the wrong type or is out of range.
    #[error("{key} is {value}, must be {rule}")]
    Value {
        /// The key.
        key: String,
        /// The value in the file.
        value: String,
        /// The allowed values.
        rule: String,
    },
    /// The kind of tokenizer is not supported.
    #[error("tokenizer {0:?} is not supported (gpt2, llama and gemma4 are)")]
    GgufModel(String),
    /// The pre-tokenizer is not supported.
    #[error("pre-tokenizer {0:?} is not supported ({known} are)", known = known_pres().collect::<Vec<_>>().join(", "))]
    Pre(String),
    /// Two lists in the metadata that must have one entry for each token differ in length.
    #[error("{key} has {has} entries, there are {expected} tokens")]
    Length {
        /// The key of the second list.
        key: &'static str,
        /// Its length.
        has: usize,
        /// The number of tokens.
        expected: usize,
    },
    /// Two tokens have the same text.
    #[error("token {text:?} has the ids {first} and {second}")]
    Duplicate {
        /// The text.
        text: String,
        /// The lower id.
        first: usize,
        /// The higher id.
        second: usize,
    },
    /// A token has a type that does not exist.
    #[error("token {id} has the type {kind}, must be 1 to 6")]
    Kind {
        /// The token's id.
        id: usize,
        /// The type in the file.
        kind: i64,
    },
    /// A merge does not consist of two tokens that form a third.
    #[error("merge {index} is {merge:?}, must be two tokens that form a third")]
    Merge {
        /// The merge's index.
        index: usize,
        /// Its text.
        merge: String,
    },
    /// A token's score is not a number.
    #[error("token {0} has a score that is not a number")]
    Score(usize),
    /// A token is too long to derive merges from it.
    #[error("token {id} has {bytes} bytes, merges are derived for at most {MAX_PIECE_BYTES}")]
    TooLong {
        /// The token's id.
        id: usize,
        /// The length of its text in bytes.
        bytes: usize,
    },
    /// The metadata ask for a special token at the ends of a sequence, but do not name it.
    #[error("{key} is set, but there is no token for it")]
    NoToken {
        /// The key that asks for the token.
        key: &'static str,
    },
}

pub(super) const MODEL: &str = "tokenizer.ggml.model";
pub(super) const PRE: &str = "tokenizer.ggml.pre";
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
pub(super) const MERGES: &str = "tokenizer.ggml.merges";
pub(super) const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
pub(super) const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
pub(super) const TEMPLATE: &str = "tokenizer.chat_template";

/// Returns the special token ids of a model without text: one whose metadata name no tokenizer, or say that there is
/// none. Returns `None` for a model that has a tokenizer.
///
/// # Errors The kind of the tokenizer is not a text.
pub fn ids_without_text(header: &Header) -> Result<Option<SpecialIds>, TokenizerError> {
    if !matches!(text(header, MODEL)?, None | Some("none" | "no_vocab")) {
        return Ok(None);
    }
    let id = |name: &str| {
        let value = header.get(&format!("tokenizer.ggml.{name}_token_id")).and_then(Value::unsigned);
        value.and_then(|id| u32::try_from(id).ok())
    };
    let mut ends = Vec::new();
    for id in ["eos", "eot", "eom"].into_iter().filter_map(id) {
        if !ends.contains(&id) {
            ends.push(id);
        }
    }
    Ok(Some(SpecialIds { bos: id("bos"), eos: id("eos"), pad: id("padding"), ends }))
}

/// Returns the tokenizer's files.
///
/// # Errors The first problem found.
pub fn convert(header: &Header) -> Result<TokenizerFiles, TokenizerError> {
    let model = text(header, MODEL)?.ok_or(TokenizerError::Missing(MODEL))?;
    // Gemma 4's is SentencePiece's with merges instead of scores, and without any default.
    let gemma4 = model == "gemma4";
    let sentence_piece = match model {
        "gpt2" => false,
        "llama" => true,
        _ if gemma4 => true,
        other => return Err(TokenizerError::GgufModel(other.chars().take(80).collect())),
    };
    if gemma4 && header.get(MERGES).is_none() {
        return Err(TokenizerError::Missing(MERGES));
    }
    let vocabulary = Vocabulary::read(header, sentence_piece && !gemma4)?;
    let pre = match sentence_piece {
        true => None,
        false => {
            let name = text(header, PRE)?.unwrap_or("default");
            let known = PRES.iter().find(|pre| pre.names.contains(&name));
            Some(known.ok_or_else(|| TokenizerError::Pre(name.chars().take(80).collect()))?)
        }
    };
    // Early files of Gemma 4 say that sequences do not begin with the token, without which the model is useless.
    let add_bos = gemma4 || flag(header, ADD_BOS)?.unwrap_or(pre.is_none_or(|pre| pre.add_bos));
    let add_eos = flag(header, ADD_EOS)?.unwrap_or(false);
    let ends = Ends {
        first: if add_bos { Some(vocabulary.special(vocabulary.bos, ADD_BOS)?) } else { None },
        last: if add_eos { Some(vocabulary.special(vocabulary.eos, ADD_EOS)?) } else { None },
    };
    let tokenizer = match pre {
        Some(pre) => vocabulary.byte_level(header, pre, &ends)?,
        None => vocabulary.sentence_piece(header, flag(header, ADD_SPACE)?.unwrap_or(!gemma4), &ends)?,
    };
    let config = vocabulary.config(header, add_bos, add_eos)?;
    let ids = SpecialIds {
        bos: vocabulary.bos.map(|id| id as u32),
        eos: vocabulary.eos.map(|id| id as u32),
        pad: vocabulary.pad.map(|id| id as u32),
        ends: vocabulary.ends(),
    };
    Ok(TokenizerFiles { tokenizer, config, ids, tokens: vocabulary.tokens.len() })
}

fn wrong(key: &str, value: &Value, rule: &str) -> TokenizerError {
    TokenizerError::Value { key: key.to_owned(), value: value.to_string(), rule: rule.to_owned() }
}

fn text<'a>(header: &'a Header, key: &str) -> Result<Option<&'a str>, TokenizerError> {
    header.get(key).map(|value| value.text().ok_or_else(|| wrong(key, value, "a text"))).transpose()
}

fn flag(header: &Header, key: &str) -> Result<Option<bool>, TokenizerError> {
    header.get(key).map(|value| value.flag().ok_or_else(|| wrong(key, value, "true or false"))).transpose()
}

/// The special tokens around a sequence: text and id.
struct Ends<'a> {
    first: Option<(&'a str, usize)>,
    last: Option<(&'a str, usize)>,
}

impl Ends<'_> {
    /// Returns the step that adds the tokens around a sequence, if there are any.
    fn template(&self) -> Option<Json> {
        if self.first.is_none() && self.last.is_none() {
            return None;
        }
        let special = |token: Option<(&str, usize)>, type_id: u32| {
            token.map(|(text, _)| json!({"SpecialToken": {"id": text, "type_id": type_id}}))
        };
        let part = |id: &str, type_id: u32| {
            let sequence = json!({"Sequence": {"id": id, "type_id": type_id}});
            let parts = [special(self.first, type_id), Some(sequence), special(self.last, type_id)];
            parts.into_iter().flatten().collect::<Vec<Json>>()
        };
        let (one, two) = (part("A", 0), [part("A", 0), part("B", 1)].concat());
        let mut tokens = Map::new();
        for (text, id) in [self.first, self.last].into_iter().flatten() {
            tokens.insert(text.to_owned(), json!({"id": text, "ids": [id], "tokens": [text]}));
        }
        Some(json!({
            "type": "TemplateProcessing",
            "single": one,
            "pair": two,
            "special_tokens": tokens,
        }))
    }
}

/// The tokens of the metadata.
struct Vocabulary<'a> {
    tokens: &'a [String],
    kinds: Vec<Kind>,
    /// The id of each text. Tokens that only fill up the embedding are left out.
    ids: HashMap<&'a str, usize>,
    bos: Option<usize>,
    eos: Option<usize>,
    eot: Option<usize>,
    eom: Option<usize>,
    unknown: Option<usize>,
    pad: Option<usize>,
    /// Whether special tokens take the white space behind them: see [`STRIPPING`].
    strips: bool,
}

/// Parts of the names of models whose special tokens take the white space behind them, except for [`NOT_STRIPPING`]. No key
/// of the metadata says so, and llama.cpp goes by these parts too.
const STRIPPING: [&str; 2] = ["phi-3", "phi3"];
const NOT_STRIPPING: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

impl<'a> Vocabulary<'a> {
    /// Reads the tokens. `defaults`: special tokens that are not named have SentencePiece's usual ids.
    fn read(header: &'a Header, defaults: bool) -> Result<Vocabulary<'a>, TokenizerError> {
        let value = header.get(TOKENS).ok_or(TokenizerError::Missing(TOKENS))?;
        let tokens = value.texts().ok_or_else(|| wrong(TOKENS, value, "a list of texts"))?;
        let count = tokens.len();
        let mut kinds = match header.get(TYPES) {
            None => vec![Kind::Normal; count],
            Some(Value::Array(Array::I32(kinds))) if kinds.len() == count => {
                let kind = |(id, kind): (usize, &i32)| {
                    let kind = i64::from(*kind);
                    Kind::of(kind).ok_or(TokenizerError::Kind { id, kind })
                };
                kinds.iter().enumerate().map(kind).collect::<Result<Vec<Kind>, _>>()?
            }
            Some(Value::Array(Array::I32(kinds))) => {
                return Err(TokenizerError::Length { key: TYPES, has: kinds.len(), expected: count });
            }
            Some(other) => return Err(wrong(TYPES, other, "a list of 32-bit integers")),
        };
        let mut ids = HashMap::new();
        for (id, token) in tokens.iter().enumerate() {
            // The converter fills the ids that the embedding has, but the tokenizer has not, with such names.
            let filler = kinds[id] == Kind::Unused && token.starts_with("[PAD") && token.ends_with(']');
            if token.is_empty() || filler {
                kinds[id] = Kind::Unused;
            } else if let Some(first) = ids.insert(token.as_str(), id) {
                return Err(TokenizerError::Duplicate { text: token.chars().take(80).collect(), first, second: id });
            }
        }
        let special = |name: &str, default: Option<usize>| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            // Some files have ids that do not exist, which means that there is no such token.
            let id = header.get(&key).and_then(Value::unsigned).and_then(|id| usize::try_from(id).ok());
            id.filter(|id| *id < count).or(default).filter(|id| *id < count && !tokens[*id].is_empty())
        };
        let default = |id: usize| defaults.then_some(id);
        let (bos, eos) = (special("bos", default(1)), special("eos", default(2)));
        let (eot, eom) = (special("eot", None), special("eom", None));
        // These are never ordinary text, though some files do not mark them.
        for id in [bos, eos, eot, eom].into_iter().flatten() {
            if kinds[id] == Kind::Normal {
                kinds[id] = Kind::Control;
            }
        }
        let (unknown, pad) = (special("unknown", default(0)), special("padding", None));
        let name = header.get("general.name").and_then(Value::text).unwrap_or_default().to_lowercase();
        let strips = STRIPPING.iter().any(|part| name.contains(part));
        Ok(Vocabulary { tokens, kinds, ids, bos, eos, eot, eom, unknown, pad, strips })
    }

    fn special(&self, id: Option<usize>, key: &'static str) -> Result<(&'a str, usize), TokenizerError> {
        id.map(|id| (self.tokens[id].as_str(), id)).ok_or(TokenizerError::NoToken { key })
    }

    /// Returns all tokens that end an answer, the end of a sequence first.
    fn ends(&self) -> Vec<u32> {
        let mut found: Vec<usize> = [self.eos, self.eot, self.eom].into_iter().flatten().collect();
        // With these two, the third only ends a part of an answer.
        let parts = ["<|return|>", "<|call|>"].iter().all(|text| self.ids.contains_key(text));
        for text in ENDS {
            match self.ids.get(text) {
                Some(&id) if !(parts && text == "<|end|>") => {
                    if matches!(self.kinds[id], Kind::Control | Kind::UserDefined) {
                        found.push(id);
                    }
                }
                _ => {}
            }
        }
        let mut ends = Vec::new();
        for id in found {
            if !ends.contains(&(id as u32)) {
                ends.push(id as u32);
            }
        }
        ends
    }

    /// Returns the vocabulary with all added tokens. They are a part of it so that each keeps its id, also where ids
    /// before it are unused.
    fn json(&self) -> Json {
        let mut map = Map::new();
        for (id, token) in self.tokens.iter().enumerate() {
            if self.ids.get(token.as_str()) == Some(&id) {
                map.insert(token.clone(), json!(id));
            }
        }
        Json::Object(map)
    }

    /// Returns the tokens that are found in text before anything else.
    fn added(&self) -> Vec<Json> {
        let of = |(id, token): (usize, &String)| {
            let special = match self.kinds[id] {
                Kind::Control | Kind::Unknown => true,
                Kind::UserDefined => false,
                Kind::Normal | Kind::Unused | Kind::Byte => return None,
            };
            Some(json!({
                "id": id,
                "content": token,
                "single_word": false,
                "lstrip": false,
                "rstrip": self.strips && !NOT_STRIPPING.contains(&token.as_str()),
                "normalized": false,
                "special": special,
            }))
        };
        let known = |(id, token): &(usize, &String)| self.ids.get(token.as_str()) == Some(id);
        self.tokens.iter().enumerate().filter(known).filter_map(of).collect()
    }

    /// Returns the merges of the metadata, if there are any.
    fn merges(&self, header: &Header) -> Result<Option<Vec<Json>>, TokenizerError> {
        let Some(value) = header.get(MERGES) else { return Ok(None) };
        let merges = value.texts().ok_or_else(|| wrong(MERGES, value, "a list of texts"))?;
        let mut joined = String::new();
        let pair = |(index, merge): (usize, &String)| {
            // A token may begin with a space, but has none behind its first character.
            let second = merge.char_indices().nth(1).map_or(merge.len(), |(at, _)| at);
            let cut = merge[second..].find(' ').map(|at| second + at);
            let Some((left, right)) = cut.map(|cut| (&merge[..cut], &merge[cut + 1..])) else {
                return Err(TokenizerError::Merge { index, merge: merge.chars().take(80).collect() });
            };
            joined.clear();
            joined.extend([left, right]);
            match [left, right, &joined].iter().all(|token| self.ids.contains_key(token)) {
                true => Ok(json!([left, right])),
                false => Err(TokenizerError::Merge { index, merge: merge.chars().take(80).collect() }),
            }
        };
        merges.iter().enumerate().map(pair).collect::<Result<Vec<Json>, _>>().map(Some)
    }

    fn byte_level(&self, header: &Header, pre: &Pre, ends: &Ends<'_>) -> Result<Json, TokenizerError> {
        let merges = self.merges(header)?.ok_or(TokenizerError::Missing(MERGES))?;
        let byte_level = |use_regex: bool| {
            let mut step = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
            step["use_regex"] = json!(use_regex);
            step
        };
        let mut steps: Vec<Json> = Vec::new();
        for step in pre.steps {
            steps.push(match step {
                Step::Split(regex) => {
                    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
                }
                Step::Digits => json!({"type": "Digits", "individual_digits": true}),
                Step::Gpt2 => byte_level(true),
            });
        }
        if !pre.steps.iter().any(|step| matches!(step, Step::Gpt2)) {
            steps.push(byte_level(false));
        }
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true});
        let after = match ends.template() {
            None => bytes,
            Some(template) => json!({"type": "Sequence", "processors": [bytes, template]}),
        };
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(),
            "normalizer": if pre.nfc { json!({"type": "NFC"}) } else { Json::Null },
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": after,
            "decoder": byte_level(true),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": pre.ignore_merges,
                "vocab": self.json(),
                "merges": merges,
            },
        }))
    }

    fn sentence_piece(&self, header: &Header, add_space: bool, ends: &Ends<'_>) -> Result<Json, TokenizerError> {
        let merges = match self.merges(header)? {
            Some(merges) => merges,
            None => self.derived_merges(header)?,
        };
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
        let prepend = json!({"type": "Prepend", "prepend": SPACE});
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if add_space {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added(),
            "normalizer": match add_space {
                true => json!({"type": "Sequence", "normalizers": [prepend, replace]}),
                false => replace,
            },
            "pre_tokenizer": null,
            "post_processor": ends.template(),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": self.unknown.map(|id| &self.tokens[id]),
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": true,
                "byte_fallback": true,
                "ignore_merges": false,
                "vocab": self.json(),
                "merges": merges,
            },
        }))
    }

    /// Derives merges from scores: every way to cut a token into two tokens, those of the best tokens first.
    fn derived_merges(&self, header: &Header) -> Result<Vec<Json>, TokenizerError> {
        let value = header.get(SCORES).ok_or(TokenizerError::Missing(SCORES))?;
        let Value::Array(Array::F32(scores)) = value else {
            return Err(wrong(SCORES, value, "a list of single precision numbers"));
        };
        let expected = self.tokens.len();
        if scores.len() != expected {
            return Err(TokenizerError::Length { key: SCORES, has: scores.len(), expected });
        }
        let mut merges: Vec<(f32, usize, usize, &str, &str)> = Vec::new();
        for (id, token) in self.tokens.iter().enumerate().filter(|(id, _)| self.kinds[*id] == Kind::Normal) {
            if scores[id].is_nan() {
                return Err(TokenizerError::Score(id));
            }
            if token.len() > MAX_PIECE_BYTES {
                return Err(TokenizerError::TooLong { id, bytes: token.len() });
            }
            let characters = token.chars().count();
            for (index, (at, _)) in token.char_indices().enumerate().skip(1) {
                let (left, right) = token.split_at(at);
                let of_text = |part: &str| {
                    self.ids.get(part).is_some_and(|id| matches!(self.kinds[*id], Kind::Normal | Kind::UserDefined))
                };
                if of_text(left) && of_text(right) {
                    merges.push((scores[id], index, characters - index, left, right));
                }
            }
        }
        // The sort is stable: merges with equal keys stay in the order of their tokens' ids. Longer left parts come
        // first, as in the library's own conversion.
        merges.sort_by(|a, b| {
            b.0.partial_cmp(&a.0).unwrap_or(std::cmp::Ordering::Equal).then((b.1, b.2).cmp(&(a.1, a.2)))
        });
        Ok(merges.into_iter().map(|(_, _, _, left, right)| json!([left, right])).collect())
    }

    /// Returns the content of tokenizer_config.json.
    fn config(&self, header: &Header, add_bos: bool, add_eos: bool) -> Result<Json, TokenizerError> {
        let token = |id: Option<usize>| id.map(|id| self.tokens[id].as_str());
        let mut config = Map::new();
        let mut set = |key: &str, value: Json| {
            config.insert(key.to_owned(), value);
        };
        set("tokenizer_class", json!("PreTrainedTokenizerFast"));
        set("add_bos_token", json!(add_bos));
        set("add_eos_token", json!(add_eos));
        set("bos_token", json!(token(self.bos)));
        set("eos_token", json!(token(self.eos)));
        set("pad_token", json!(token(self.pad)));
        set("unk_token", json!(token(self.unknown)));
        set("clean_up_tokenization_spaces", json!(false));
        let default = text(header, TEMPLATE)?;
        let mut named = Vec::new();
        let prefix = format!("{TEMPLATE}.");
        for key in header.metadata.keys() {
            if let Some(name) = key.strip_prefix(&prefix) {
                named.push(json!({"name": name, "template": text(header, key)?}));
            }
        }
        match (default, named.is_empty()) {
            (None, true) => {}
            (Some(template), true) => set("chat_template", json!(template)),
            (default, false) => {
                let default = default.map(|template| json!({"name": "default", "template": template}));
                set("chat_template", default.into_iter().chain(named).collect());
            }
        }
        Ok(Json::Object(config))
    }
}
