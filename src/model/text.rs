//! The tokenizer and chat template of a checkpoint, and the conversion of token ids to text. Cheap to clone: all clones
//! share one tokenizer.
//!
//! Not here: sampling, and the definition of a request.

pub mod assembler;
mod bytes;
pub mod chat;
mod patterns;
mod python;
pub mod stop;
pub mod stream;

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde::Deserialize;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

use self::assembler::Assembler;
use self::chat::{ChatMessage, ChatOptions, ChatStyle, Templates};
use self::stream::{SpecialIds, TextStream};
use super::checkpoint::Checkpoint;
use super::gguf::config::EMBEDDING_FILES;
use super::gguf::{self, GgufError};
use super::grammar::{GrammarError, Grammars, Uses};
use crate::actors::workers::Cancel;
use crate::config::file;

/// The tokenizer and the chat templates of a checkpoint.
#[derive(Clone)]
pub struct Text {
    inner: Arc<Inner>,
}

/// A handle to the tokenizer alone. Objects that a [`Text`] owns hold this instead of the [`Text`].
#[derive(Clone)]
pub(super) struct Tokens {
    tokenizer: Arc<Tokenizer>,
    spelling: Option<bytes::Spelling>,
}

impl Tokens {
    /// Returns the token ids that a text has within an output: ids of ordinary tokens whose bytes are those of the text.
    /// `None` if the tokenizer has none.
    pub(super) fn of(&self, text: &str) -> Option<Vec<u32>> {
        let encode = |text: &str| encoded(&self.tokenizer, text, false)?.ok();
        let ids = encode(text)?;
        if self.spell(&ids, text) {
            return Some(ids);
        }
        // Tokenizers in the style of SentencePiece put a space before a text. It is not part of what follows a line.
        let ids = encode(&format!("\n{text}"))?;
        (1..=ids.len()).map(|at| &ids[at..]).find(|ids| self.spell(ids, text)).map(<[u32]>::to_vec)
    }

    /// Whether these ids are ordinary tokens with the bytes of a text.
    fn spell(&self, ids: &[u32], text: &str) -> bool {
        let Some(spelling) = self.spelling else { return false };
        let mut rest = text.as_bytes();
        ids.iter().all(|id| {
            let special = self.tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(id);
            let word = bytes::of_token(&self.tokenizer, spelling, *id);
            let begins = !special.is_some_and(|token| token.special) && rest.starts_with(&word);
            rest = if begins { &rest[word.len()..] } else { rest };
            begins
        }) && rest.is_empty()
    }
}

/// The state that all clones share. It does not change after loading, except that `grammars` is filled once.
struct Inner {
    tokenizer: Arc<Tokenizer>,
    /// The ids of special tokens, which decoding omits by default.
    special: HashSet<u32>,
    templates: Templates,
    /// How tokens spell bytes; `None` if only the decoder knows.
    spelling: Option<bytes::Spelling>,
    /// The files that this was loaded from: name and contents.
    files: Vec<File>,
    /// Built when the first constraint is used.
    grammars: OnceLock<Arc<Grammars>>,
}

/// The maximum length of a run of white space in a text that is encoded. The expressions of pre-tokenizers try each length
/// of a run, and the library's limit on that (1,000,000) ends the splitting of the rest of the text without an error.
pub const MOST_SPACES: usize = 500_000;

/// The special tokens that become text in an output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SpecialText {
    /// None.
    #[default]
    None,
    /// The special tokens with these names, as they are spelled.
    Named(Vec<&'static str>),
    /// All special tokens, as they are spelled.
    All,
}

/// A file's name and contents.
pub type File = (&'static str, Vec<u8>);

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Text").field("vocabulary", &self.vocabulary()).field("chat", &self.has_chat()).finish()
    }
}

/// The reason why text could not be loaded, encoded, decoded or rendered.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The operating system could not open or read the file.
    #[error("cannot read {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file is malformed.
    #[error("{file} is not valid: {reason}")]
    Invalid {
        /// The file's name.
        file: &'static str,
        /// The defect of the file.
        reason: String,
    },
    /// The tokenizer could not encode the text.
    #[error("cannot encode the text: {0}")]
    Encode(String),
    /// The tokenizer could not decode the ids.
    #[error("cannot decode the tokens: {0}")]
    Decode(String),
    /// The checkpoint has no chat template, or none with the requested name.
    #[error("the checkpoint has no chat template{0}")]
    NoTemplate(String),
    /// The template does not compile, or could not be rendered with these messages.
    #[error("the chat template failed: {0}")]
    Template(String),
    /// The template itself raised an error for this conversation.
    #[error("the chat template refuses the messages: {0}")]
    Refused(String),
    /// The template exceeds a limit of its worker process (stack, memory or CPU time), or its output is too long.
    #[error("the chat template cannot be rendered: {0}")]
    TooLarge(String),
    /// A GGUF file has no supported tokenizer.
    #[error("{}: {error}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: Box<GgufError>,
    },
    /// The caller cancelled the call.
    #[error("nobody waits for the text any more")]
    Cancelled,
    /// No worker process is available to render the template.
    #[error("no chat template can be rendered now: {0}")]
    Unavailable(String),
}

impl Text {
    /// Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja from `dir`. Also
    /// keeps config.json and generation_config.json for callers of [`Text::files`]. Returns `None` if there is no
    /// tokenizer.json. If `dir` is a GGUF file, translates the tokenizer that it contains.
    pub fn load(dir: &Path) -> Result<Option<Text>, TextError> {
        if gguf::is_named(dir) {
            let (gguf, _) =
                gguf::open(dir).map_err(|error| TextError::Gguf { path: dir.to_owned(), error: Box::new(error) })?;
            return Text::from_embedded(gguf.files);
        }
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

    /// Like [`Text::load`], for a checkpoint that is open: the header of a GGUF file is not read again.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Text>, TextError> {
        if checkpoint.embedded.is_empty() {
            return Text::load(&checkpoint.dir);
        }
        Text::from_embedded(checkpoint.embedded.clone())
    }

    /// Builds the text from the files that stand for a GGUF model's, if it has a tokenizer.
    fn from_embedded(files: Vec<File>) -> Result<Option<Text>, TextError> {
        // How an embedding model pools is none of the text's files.
        let files: Vec<File> = files.into_iter().filter(|(name, _)| !EMBEDDING_FILES.contains(name)).collect();
        match files.iter().any(|(name, _)| *name == "tokenizer.json") {
            true => Text::from_files(files).map(Some),
            false => Ok(None),
        }
    }

    /// Builds the text from the contents of the named files, which must include tokenizer.json.
    pub fn from_files(files: Vec<File>) -> Result<Text, TextError> {
        let read = |name: &str| files.iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes.as_slice());
        let mut config = object("tokenizer_config.json", read("tokenizer_config.json"))?;
        // Older checkpoints name their special tokens only in special_tokens_map.json.
        for (key, value) in object("special_tokens_map.json", read("special_tokens_map.json"))? {
            config.entry(key).or_insert(value);
        }
        let invalid = |file, reason: String| TextError::Invalid { file, reason };
        let template = read("chat_template.jinja")
            .map(std::str::from_utf8)
            .transpose()
            .map_err(|error| invalid("chat_template.jinja", error.to_string()))?;
        let Some(tokenizer) = read("tokenizer.json") else {
            return Err(invalid("tokenizer.json", "the file is missing".to_owned()));
        };
        let mut inner = Text::build(tokenizer, &config, template)?;
        inner.files = files;
        Ok(Text { inner: Arc::new(inner) })
    }

    /// Builds the text from the contents of tokenizer.json, tokenizer_config.json and chat_template.jinja.
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
        // Disable truncation and padding settings that a training script may have left in the file: they would change
        // prompts.
        tokenizer.with_truncation(None).map_err(invalid)?;
        tokenizer.with_padding(None);
        // A file may ask for a special token around a text that it does not define, which only an encoding shows.
        if encoded(&tokenizer, "", true).is_none() {
            let reason = "its post_processor names a special token that it does not define".to_owned();
            return Err(TextError::Invalid { file: "tokenizer.json", reason });
        }
        let special =
            tokenizer.get_added_tokens_decoder().iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let templates = Templates::new(config, template)?;
        let spelling = bytes::spelling(&tokenizer);
        let tokenizer = Arc::new(tokenizer);
        Ok(Inner { tokenizer, special, templates, spelling, files: Vec::new(), grammars: OnceLock::new() })
    }

    /// Returns the token ids of a text. With `add_special`, the tokenizer adds its special tokens around the text
    /// (usually a beginning-of-sequence token). Special tokens that are spelled out in the text become one id each in
    /// either case.
    ///
    /// # Errors The text has a run of more than [`MOST_SPACES`] characters of white space, or the tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let spaces = longest_space(text);
        if spaces > MOST_SPACES {
            return Err(TextError::Encode(format!(
                "a run of {spaces} characters of white space, must be at most {MOST_SPACES}"
            )));
        }
        encoded(&self.inner.tokenizer, text, add_special)
            .unwrap_or_else(|| Err("its tokenizer cannot take it".into()))
            .map_err(|error| TextError::Encode(error.to_string()))
    }

    /// Returns the text of token ids. Ids outside the tokenizer's vocabulary contribute no text. With `skip_special`,
    /// neither do special tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        // Some decoders of the library require at least one token.
        if !ids.iter().any(|id| self.is_known(*id) && (!skip_special || !self.is_special(*id))) {
            return Ok(String::new());
        }
        self.decoded(ids, skip_special)
            .unwrap_or_else(|| Err("its decoder cannot take them".into()))
            .map_err(|error| TextError::Decode(error.to_string()))
    }

    /// Returns the text of one token, special or not. An incomplete character becomes `U+FFFD`. `None` if there is no
    /// such token.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.tokenizer.id_to_token(id)?;
        self.decode(&[id], false).ok()
    }

    /// Returns the tokenizer's own spelling of a token, in which bytes of incomplete characters differ too. `None` if there
    /// is no such token.
    pub fn spelling(&self, id: u32) -> Option<String> {
        self.inner.tokenizer.id_to_token(id)
    }

    /// Returns the bytes of each token, indexed by id: empty if there is no such token; for a special token a byte 255,
    /// which occurs in no text, followed by the token's name. Returns `None` if the tokenizer is neither byte-level nor
    /// byte-fallback.
    pub fn token_bytes(&self) -> Option<Vec<Vec<u8>>> {
        bytes::token_bytes(&self.inner.tokenizer)
    }

    /// Returns the constraint compiler (structured output) for the one model that this text belongs to, which has
    /// `vocabulary` tokens and ends a sequence with any of `eos_ids`. The first call builds it, which takes up to a
    /// second for a large vocabulary; later calls ignore their arguments.
    pub fn grammars(&self, vocabulary: u32, eos_ids: &[u32]) -> Result<Arc<Grammars>, GrammarError> {
        if let Some(grammars) = self.inner.grammars.get() {
            return Ok(Arc::clone(grammars));
        }
        let made = Arc::new(Grammars::new(self, vocabulary, eos_ids)?);
        Ok(Arc::clone(self.inner.grammars.get_or_init(|| made)))
    }

    /// Returns how often constraints were requested.
    pub fn constraint_uses(&self) -> Uses {
        self.inner.grammars.get().map(|grammars| grammars.uses()).unwrap_or_default()
    }

    /// Returns the bytes of one token, which may be a part of a character; of a special token those of its name. Empty
    /// if there is no such token.
    pub fn bytes(&self, id: u32) -> Vec<u8> {
        match self.inner.spelling {
            Some(spelling) => bytes::of_token(&self.inner.tokenizer, spelling, id),
            None => self.token(id).unwrap_or_default().into_bytes(),
        }
    }

    /// Returns a handle to the tokenizer.
    pub(super) fn tokens(&self) -> Tokens {
        Tokens { tokenizer: Arc::clone(&self.inner.tokenizer), spelling: self.inner.spelling }
    }

    /// Returns the number of tokens in the tokenizer's vocabulary. The model's embedding may have more rows.
    pub fn vocabulary(&self) -> usize {
        self.inner.tokenizer.get_vocab_size(true)
    }

    /// Returns the id of a token by its exact spelling, for example `<|im_end|>`.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.tokenizer.token_to_id(token)
    }

    /// Whether the id is a special token, which generated text omits by default.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.special.contains(&id)
    }

    /// Whether the checkpoint has a chat template.
    pub fn has_chat(&self) -> bool {
        !self.inner.templates.is_empty()
    }

    /// Returns the name of the template for a conversation with or without tools, and how the model writes what that
    /// template describes.
    pub fn chat_style(&self, tools: bool) -> (&'static str, ChatStyle) {
        self.inner.templates.style(tools)
    }

    /// Returns the files that this was loaded from and those that describe the model, with their contents as read.
    pub fn files(&self) -> &[File] {
        &self.inner.files
    }

    /// Renders a conversation with the checkpoint's chat template. The result spells out its special tokens, so encode
    /// it with `add_special` = false.
    pub fn chat(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TextError> {
        self.chat_until(messages, options, &Cancel::default())
    }

    /// Like [`Text::chat`], but returns [`TextError::Cancelled`] when `cancel` is cancelled.
    pub fn chat_until(
        &self,
        messages: &[ChatMessage],
        options: &ChatOptions,
        cancel: &Cancel,
    ) -> Result<String, TextError> {
        self.inner.templates.render(messages, options, cancel)
    }

    /// Returns an incremental detokenizer for one sequence.
    pub fn stream(&self) -> TextStream {
        TextStream::new(self.clone(), SpecialIds::None)
    }

    /// Returns an incremental detokenizer for one sequence that stops at any of the strings `stops`. Empty strings are
    /// ignored.
    pub fn assembler(&self, stops: Vec<String>) -> Assembler {
        Assembler::new(self.stream(), stops)
    }

    /// Returns a detokenizer like that of [`Text::assembler`] that includes these special tokens in the text.
    pub fn assembler_with(&self, special: &SpecialText, stops: Vec<String>) -> Assembler {
        let special = match special {
            SpecialText::None => SpecialIds::None,
            SpecialText::All => SpecialIds::All,
            SpecialText::Named(names) => {
                let ids = names.iter().filter_map(|name| self.special_id(name));
                SpecialIds::These(ids.collect::<Vec<u32>>().into())
            }
        };
        Assembler::new(TextStream::new(self.clone(), special), stops)
    }

    /// Returns the id of the special token with this name. `None` if an ordinary token or no token has this name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.id(name).filter(|id| self.is_special(*id))
    }

    /// Decodes a window of a stream. Unlike [`Text::decode`] it cannot fail: if the decoder returns an error, the
    /// tokens are spelled out instead. All of the ids are text, special ones too.
    fn window(&self, ids: &[u32]) -> String {
        if ids.is_empty() {
            return String::new();
        }
        // The decoder panicked because the window is too short for it: there is no text yet.
        let Some(decoded) = self.decoded(ids, false) else { return String::new() };
        decoded.unwrap_or_else(|_| ids.iter().filter_map(|id| self.inner.tokenizer.id_to_token(*id)).collect())
    }

    /// Decodes ids with the library. Returns `None` if it panics, as some of its decoders do for texts of only spaces.
    fn decoded(&self, ids: &[u32], skip_special: bool) -> Option<tokenizers::Result<String>> {
        let tokenizer = AssertUnwindSafe(&self.inner.tokenizer);
        std::panic::catch_unwind(move || tokenizer.decode(ids, skip_special)).ok()
    }

    /// Whether the id is in the vocabulary.
    fn is_known(&self, id: u32) -> bool {
        self.inner.tokenizer.id_to_token(id).is_some()
    }
}

/// Encodes a text with the library. Returns `None` if it panics, as it does where parts of tokenizer.json do not fit each
/// other.
fn encoded(tokenizer: &Tokenizer, text: &str, add_special: bool) -> Option<tokenizers::Result<Vec<u32>>> {
    let encode = || tokenizer.encode_fast(text, add_special).map(|encoding| encoding.get_ids().to_vec());
    std::panic::catch_unwind(AssertUnwindSafe(encode)).ok()
}

/// Returns the length of the longest run of white space, if that can be more than [`MOST_SPACES`].
fn longest_space(text: &str) -> usize {
    if text.len() <= MOST_SPACES {
        return 0;
    }
    text.split(|c: char| !c.is_whitespace()).map(|run| run.chars().count()).max().unwrap_or(0)
}

/// The parts of tokenizer.json that may have regular expressions.
#[derive(Deserialize)]
struct Parts {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    decoder: Option<Value>,
}

/// Parses tokenizer.json. The library panics on some malformed parts; a panic is reported as an invalid file.
fn read_tokenizer(bytes: &[u8]) -> Result<Tokenizer, TextError> {
    let invalid = |reason: String| TextError::Invalid { file: "tokenizer.json", reason };
    let not_json = |error: serde_json::Error| invalid(error.to_string());
    let Parts { normalizer, pre_tokenizer, decoder } = serde_json::from_slice(bytes).map_err(not_json)?;
    let mut bytes = Cow::Borrowed(bytes);
    for (key, part) in [("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder)] {
        let Some(part) = part else { continue };
        let mut translated = part.clone();
        patterns::translate_all(&mut translated).map_err(|(expression, construct)| {
            invalid(format!("the expression {expression:?} of {key} has {construct}, which is not supported"))
        })?;
        if translated != part {
            let mut whole: Value = serde_json::from_slice(&bytes).map_err(not_json)?;
            whole[key] = translated;
            bytes = Cow::Owned(whole.to_string().into_bytes());
        }
    }
    let read = std::panic::catch_unwind(|| Tokenizer::from_bytes(&*bytes));
    read.map_err(|_| invalid("a part of it is not what its type asks for".to_owned()))?
        .map_err(|error| invalid(error.to_string()))
}

/// Parses a file that must be a JSON object. Returns an empty object if there is no file.
fn object(file: &'static str, bytes: Option<&[u8]>) -> Result<Map<String, Value>, TextError> {
    match bytes {
        None => Ok(Map::new()),
        Some(bytes) => {
            serde_json::from_slice(bytes).map_err(|error| TextError::Invalid { file, reason: error.to_string() })
        }
    }
}
