//! Tokenizer, chat template, and the way from token ids to text. Cheap to clone: all clones
//! share one tokenizer. Deliberately absent: sampling, and what a request is.

pub mod assembler;
mod bytes;
pub mod chat;
pub mod stop;
pub mod stream;

use std::collections::HashSet;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use self::assembler::Assembler;
use self::chat::{ChatMessage, ChatOptions, Templates};
use self::stream::TextStream;
use super::grammar::{GrammarError, Grammars, Uses};
use crate::actors::workers::Cancel;
use crate::config::file;

/// Tokenizer and chat template of a checkpoint.
#[derive(Clone)]
pub struct Text {
    inner: Arc<Inner>,
}

/// A tokenizer alone, for what a text owns itself.
#[derive(Clone)]
pub(super) struct Tokens(Arc<Tokenizer>);

impl Tokens {
    /// The token ids of a text, without those that stand around a prompt.
    pub(super) fn of(&self, text: &str) -> Option<Vec<u32>> {
        self.0.encode_fast(text, false).ok().map(|encoding| encoding.get_ids().to_vec())
    }
}

/// What all clones share; never changed after loading.
struct Inner {
    tokenizer: Arc<Tokenizer>,
    /// Ids of special tokens, which decoding leaves out.
    special: HashSet<u32>,
    templates: Templates,
    /// What it was made of, by file name.
    files: Vec<File>,
    /// Made when the first constraint is.
    grammars: OnceLock<Arc<Grammars>>,
}

/// A file's name and contents.
pub type File = (&'static str, Vec<u8>);

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Text").field("vocabulary", &self.vocabulary()).field("chat", &self.has_chat()).finish()
    }
}

/// Why text could not be loaded, encoded, decoded or rendered.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The operating system refused.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Its words.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{file} is not valid: {reason}")]
    Invalid {
        /// Its name.
        file: &'static str,
        /// Why.
        reason: String,
    },
    /// The tokenizer could not encode.
    #[error("cannot encode the text: {0}")]
    Encode(String),
    /// The tokenizer could not decode.
    #[error("cannot decode the tokens: {0}")]
    Decode(String),
    /// There is no chat template, or none of that name.
    #[error("the checkpoint has no chat template{0}")]
    NoTemplate(String),
    /// The template does not compile, or could not be rendered with these messages.
    #[error("the chat template failed: {0}")]
    Template(String),
    /// The conversation was refused by the template itself.
    #[error("the chat template refuses the messages: {0}")]
    Refused(String),
    /// The template meets a limit of its worker process (stack, memory or processor time), or renders too much.
    #[error("the chat template cannot be rendered: {0}")]
    TooLarge(String),
    /// The call that asked has ended.
    #[error("nobody waits for the text any more")]
    Cancelled,
    /// There is no worker process to render it.
    #[error("no chat template can be rendered now: {0}")]
    Unavailable(String),
}

impl Text {
    /// Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja, and
    /// config.json and generation_config.json for those who ask for its files; `None` where there is no
    /// tokenizer.json.
    pub fn load(dir: &Path) -> Result<Option<Text>, TextError> {
        let read = |name: &str, most: u64| {
            let path = dir.join(name);
            match file::read(&path, most) {
                Ok(bytes) => Ok(Some(bytes)),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                Err(source) => Err(TextError::Unreadable { path, source }),
            }
        };
        let Some(tokenizer) = read("tokenizer.json", file::LARGE)? else {
            return Ok(None);
        };
        let mut files = vec![("tokenizer.json", tokenizer)];
        for name in [
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
        ] {
            files.extend(read(name, file::SMALL)?.map(|bytes| (name, bytes)));
        }
        Text::from_files(files).map(Some)
    }

    /// From the contents of files of these names, tokenizer.json among them.
    pub fn from_files(files: Vec<File>) -> Result<Text, TextError> {
        let read = |name: &str| files.iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes.as_slice());
        let mut config = object("tokenizer_config.json", read("tokenizer_config.json"))?;
        // Older checkpoints name their special tokens only there.
        for (key, value) in object("special_tokens_map.json", read("special_tokens_map.json"))? {
            config.entry(key).or_insert(value);
        }
        let invalid = |file, reason: String| TextError::Invalid { file, reason };
        let template = read("chat_template.jinja")
            .map(std::str::from_utf8)
            .transpose()
            .map_err(|error| invalid("chat_template.jinja", error.to_string()))?;
        let Some(tokenizer) = read("tokenizer.json") else {
            return Err(invalid("tokenizer.json", "there is none".to_owned()));
        };
        let mut inner = Text::build(tokenizer, &config, template)?;
        inner.files = files;
        Ok(Text { inner: Arc::new(inner) })
    }

    /// From the contents of tokenizer.json, tokenizer_config.json and chat_template.jinja.
    pub fn from_bytes(
        tokenizer: &[u8],
        tokenizer_config: Option<&[u8]>,
        chat_template: Option<&str>,
    ) -> Result<Text, TextError> {
        let mut files = vec![("tokenizer.json", tokenizer.to_vec())];
        files.extend(tokenizer_config.map(|bytes| ("tokenizer_config.json", bytes.to_vec())));
        files.extend(chat_template.map(|text| ("chat_template.jinja", text.as_bytes().to_vec())));
        Text::from_files(files)
    }

    fn build(tokenizer: &[u8], config: &Map<String, Value>, template: Option<&str>) -> Result<Inner, TextError> {
        let invalid =
            |error: tokenizers::Error| TextError::Invalid { file: "tokenizer.json", reason: error.to_string() };
        let mut tokenizer = read_tokenizer(tokenizer)?;
        // What a training script left in the file must not shorten or lengthen a prompt.
        tokenizer.with_truncation(None).map_err(invalid)?;
        tokenizer.with_padding(None);
        let special =
            tokenizer.get_added_tokens_decoder().iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let templates = Templates::new(config, template)?;
        Ok(Inner { tokenizer: Arc::new(tokenizer), special, templates, files: Vec::new(), grammars: OnceLock::new() })
    }

    /// The token ids of a text; `add_special` puts what the tokenizer puts around a text
    /// (begin of sequence, mostly). Special tokens spelled out in the text become one id each.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.tokenizer.encode_fast(text, add_special);
        encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(|error| TextError::Encode(error.to_string()))
    }

    /// The text of token ids. Ids outside the tokenizer's vocabulary have none.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        // A decoder of the library counts on one token at least.
        if !ids.iter().any(|id| self.is_text(*id, !skip_special)) {
            return Ok(String::new());
        }
        self.decoded(ids, skip_special)
            .unwrap_or_else(|| Err("its decoder cannot take them".into()))
            .map_err(|error| TextError::Decode(error.to_string()))
    }

    /// The text of one token as it stands, special or not; a part of a character is `U+FFFD`.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.tokenizer.id_to_token(id)?;
        self.decode(&[id], false).ok()
    }

    /// The bytes that each token stands for, by id: none where there is no such token, and behind a byte 255, which no
    /// text has, the name of a special one. `None` where the tokenizer does not spell its tokens in bytes.
    pub fn token_bytes(&self) -> Option<Vec<Vec<u8>>> {
        bytes::token_bytes(&self.inner.tokenizer)
    }

    /// What outputs can be constrained with, for the one model that this text belongs to: of `vocabulary` tokens, ending
    /// with any of `eos_ids`. The first call takes up to a second for a large vocabulary.
    pub fn grammars(&self, vocabulary: u32, eos_ids: &[u32]) -> Result<Arc<Grammars>, GrammarError> {
        if let Some(grammars) = self.inner.grammars.get() {
            return Ok(Arc::clone(grammars));
        }
        let made = Arc::new(Grammars::new(self, vocabulary, eos_ids)?);
        Ok(Arc::clone(self.inner.grammars.get_or_init(|| made)))
    }

    /// How often outputs were to be constrained.
    pub fn constraint_uses(&self) -> Uses {
        self.inner.grammars.get().map(|grammars| grammars.uses()).unwrap_or_default()
    }

    /// Its tokenizer.
    pub(super) fn tokens(&self) -> Tokens {
        Tokens(Arc::clone(&self.inner.tokenizer))
    }

    /// How many tokens the tokenizer knows; the model may have more rows.
    pub fn vocabulary(&self) -> usize {
        self.inner.tokenizer.get_vocab_size(true)
    }

    /// The id of a token by its exact spelling, for example `<|im_end|>`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// Whether the id is a special token, which text deltas leave out.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.special.contains(&id)
    }

    /// Whether the checkpoint has a chat template.
    pub fn has_chat(&self) -> bool {
        !self.inner.templates.is_empty()
    }

    /// The files that it was made of and those that describe its model, as they were read.
    pub fn files(&self) -> &[File] {
        &self.inner.files
    }

    /// Renders a conversation with the checkpoint's template. The result names its special
    /// tokens itself: encode it with `add_special` false.
    pub fn chat(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TextError> {
        self.chat_until(messages, options, &Cancel::default())
    }

    /// The same; gives up when nobody waits for it any more.
    pub fn chat_until(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        cancel: &Cancel,
    ) -> Result<String, TextError> {
        self.inner.templates.render(messages, options, cancel)
    }

    /// A detokenizer for one sequence.
    pub fn stream(&self) -> TextStream {
        TextStream::new(self.clone(), false)
    }

    /// A detokenizer for one sequence that ends at any of `stops` (empty ones are ignored).
    pub fn assembler(&self, stops: Vec<String>) -> Assembler {
        Assembler::new(self.stream(), stops)
    }

    /// A detokenizer as of [`Text::assembler`] in whose text special tokens stand as they are spelled.
    pub fn assembler_of_all(&self, stops: Vec<String>) -> Assembler {
        Assembler::new(TextStream::new(self.clone(), true), stops)
    }

    /// Like `decode`; for windows of a stream, which cannot fail half way.
    fn window(&self, ids: &[u32], special: bool) -> String {
        if ids.is_empty() {
            return String::new();
        }
        // What is too short for its decoder is so far no text.
        let Some(decoded) = self.decoded(ids, !special) else { return String::new() };
        decoded.unwrap_or_else(|_| ids.iter().filter_map(|id| self.inner.tokenizer.id_to_token(*id)).collect())
    }

    /// What the library makes of ids; `None` where it panics, as some of its decoders do for texts of nothing but spaces.
    fn decoded(&self, ids: &[u32], skip_special: bool) -> Option<tokenizers::Result<String>> {
        let tokenizer = AssertUnwindSafe(&self.inner.tokenizer);
        std::panic::catch_unwind(move || tokenizer.decode(ids, skip_special)).ok()
    }

    /// Whether the id leaves a trace in the text, special tokens only where asked for.
    fn is_text(&self, id: u32, special: bool) -> bool {
        (special || !self.is_special(id)) && self.inner.tokenizer.id_to_token(id).is_some()
    }
}

/// The tokenizer of a file. The library that reads it panics where some parts are not what it expects: that is the
/// file's fault, and an error like others.
fn read_tokenizer(bytes: &[u8]) -> Result<Tokenizer, TextError> {
    let invalid = |reason: String| TextError::Invalid { file: "tokenizer.json", reason };
    serde_json::from_slice::<IgnoredAny>(bytes).map_err(|error| invalid(error.to_string()))?;
    let read = std::panic::catch_unwind(|| Tokenizer::from_bytes(bytes));
    read.map_err(|_| invalid("a part of it is not what its type asks for".to_owned()))?
        .map_err(|error| invalid(error.to_string()))
}

/// The JSON object of a file; empty where there is no file.
fn object(file: &'static str, bytes: Option<&[u8]>) -> Result<Map<String, Value>, TextError> {
    match bytes {
        None => Ok(Map::new()),
        Some(bytes) => {
            serde_json::from_slice(bytes).map_err(|error| TextError::Invalid { file, reason: error.to_string() })
        }
    }
}
