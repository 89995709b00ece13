//! Models in GGUF files: their headers, configuration, tokenizer and tensors, translated into the layout that Hugging
//! Face checkpoints have.
//!
//! Not here: whether the translated configuration can be run, and, except when a file is written, the tensors' data.

pub mod config;
pub mod container;
pub mod split;
pub mod tensors;
pub mod tokenizer;
pub mod write;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use self::config::{
    GgufConfigError, GgufModel, LONG_ROPE_FACTORS, MAX_ROPE_FACTORS, ROPE_FACTORS, RopeFactors, SpecialIds,
};
use self::container::{Header, TensorType};
use self::split::{GgufFile, GgufFiles, SplitError};
use self::tensors::{Source, TensorProblem};
use self::tokenizer::{TokenizerError, TokenizerFiles};
use crate::config::file::{self, Stamp};

/// A model in one or more GGUF files.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// The files with their headers.
    pub parts: GgufFiles,
    /// The configuration.
    pub model: GgufModel,
    /// The origin of each tensor, by its name in Hugging Face checkpoints.
    pub sources: BTreeMap<String, Source>,
    /// The special token ids, by the tokenizer.
    pub ids: SpecialIds,
    /// The contents of config.json and generation_config.json, and of tokenizer.json and tokenizer_config.json unless
    /// the model is one without text.
    pub files: Vec<(&'static str, Vec<u8>)>,
}

/// The reason why a model cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GgufError {
    /// The files cannot be read or do not form one model.
    #[error(transparent)]
    Files(#[from] SplitError),
    /// The metadata do not describe a supported model.
    #[error(transparent)]
    Config(#[from] GgufConfigError),
    /// The tokenizer is not supported.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Tensors are missing or have unexpected shapes.
    #[error("{} problems, first: {}", .0.len(), .0.first().map_or(String::new(), ToString::to_string))]
    Tensors(Vec<TensorProblem>),
    /// The tokenizer has more tokens than the embedding has rows.
    #[error("the tokenizer has {tokens} tokens, the embedding {rows} rows")]
    Vocabulary {
        /// The number of tokens.
        tokens: usize,
        /// The number of rows of the embedding.
        rows: u64,
    },
}

/// Whether a path names a GGUF file.
pub fn is_named(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}

/// Opens the model that the file `path` belongs to. Also returns the identities of its files, in order.
///
/// # Errors Returns the first problem found, but all problems of tensors.
pub fn open(path: &Path) -> Result<(Gguf, Vec<Stamp>), GgufError> {
    let mut stamps = Vec::new();
    let gguf = Gguf::open(path, |path| {
        let (opened, _) = file::open(path)?;
        let stamp = Stamp::settled(&opened)?;
        let bytes = stamp.len;
        stamps.push(stamp);
        Ok((opened, bytes))
    })?;
    // Files with rotary factors were opened again.
    stamps.truncate(gguf.parts.files.len());
    Ok((gguf, stamps))
}

impl Gguf {
    /// Opens the model that the file `path` belongs to, with all of its files. `open` opens a file for reading and
    /// returns its length. It is called for each file once and in order, and once more for each tensor of divisors of the
    /// rotary frequencies.
    ///
    /// # Errors Returns the first problem found, but all problems of tensors.
    pub fn open<R: Read + Seek>(
        path: &Path,
        mut open: impl FnMut(&Path) -> std::io::Result<(R, u64)>,
    ) -> Result<Gguf, GgufError> {
        let parts = GgufFiles::open(path, &mut open)?;
        let factors = rope_factors(&parts, open)?;
        Gguf::new(parts, &factors)
    }

    /// Translates a model, given the headers of its files and the values of its tensors of divisors of the rotary
    /// frequencies.
    ///
    /// # Errors Returns the first problem found, but all problems of tensors.
    pub fn new(parts: GgufFiles, factors: &RopeFactors) -> Result<Gguf, GgufError> {
        let model = GgufModel::read(&parts, factors)?;
        let sources = tensors::map(&model, &parts).map_err(GgufError::Tensors)?;
        let (ids, tokenizer) = match tokenizer::ids_without_text(parts.header())? {
            Some(ids) => (ids, None),
            None => {
                let TokenizerFiles { tokenizer, config, ids, tokens } = tokenizer::convert(parts.header())?;
                if tokens as u64 > model.vocab {
                    return Err(GgufError::Vocabulary { tokens, rows: model.vocab });
                }
                (ids, Some([("tokenizer.json", tokenizer), ("tokenizer_config.json", config)]))
            }
        };
        let files = [
            ("config.json", model.config_json(&ids)),
            ("generation_config.json", config::generation_config_json(&parts, &ids)),
        ];
        let files = files.into_iter().chain(tokenizer.into_iter().flatten());
        let files = files.chain(config::embedding_json(&parts)?);
        let files = files.map(|(name, json)| (name, json.to_string().into_bytes())).collect();
        Ok(Gguf { parts, model, sources, ids, files })
    }

    /// Returns the content of one of [`Gguf::files`].
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes.as_slice())
    }
}

/// Reads the divisors of the rotary frequencies, if the model has them.
///
/// # Errors They cannot be read, or are not short vectors of single precision numbers.
pub fn rope_factors<R: Read + Seek>(
    parts: &GgufFiles,
    mut open: impl FnMut(&Path) -> std::io::Result<(R, u64)>,
) -> Result<RopeFactors, GgufError> {
    let llama3 = factors(parts, ROPE_FACTORS, &mut open, GgufConfigError::RopeFactors)?;
    let [short, long] = LONG_ROPE_FACTORS.map(|tensor| {
        let rule = "a short vector of type F32".to_owned();
        factors(parts, tensor, &mut open, |has| GgufConfigError::Divisors { tensor, has, rule })
    });
    Ok(RopeFactors { llama3, long: short?.zip(long?).map(<[_; 2]>::from) })
}

/// Reads a tensor of divisors of the rotary frequencies, if the model has it. `wrong` makes an error of what it has.
fn factors<R: Read + Seek>(
    parts: &GgufFiles,
    tensor: &str,
    open: &mut impl FnMut(&Path) -> std::io::Result<(R, u64)>,
    wrong: impl FnOnce(String) -> GgufConfigError,
) -> Result<Option<Vec<f32>>, GgufError> {
    let Some(at) = parts.find(tensor) else { return Ok(None) };
    let info = parts.at(at);
    if info.kind != TensorType::F32 || info.rows() != 1 || info.cols() > MAX_ROPE_FACTORS {
        return Err(wrong(format!("the type {} and the dimensions {:?}", info.kind, info.dims)).into());
    }
    let path = &parts.files[at.file].path;
    let mut bytes = vec![0; info.bytes as usize];
    let read = open(path).and_then(|(mut reader, _)| {
        reader.seek(SeekFrom::Start(info.offset))?;
        reader.read_exact(&mut bytes)
    });
    read.map_err(|error| SplitError::Unreadable { path: path.clone(), reason: error.to_string() })?;
    Ok(Some(bytes.as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()))
}

/// Entry point for the fuzzer: reads `data` as a GGUF file and runs every step of opening a model on it. Must not
/// panic, and must not use more memory than a small multiple of the length of `data`.
pub fn fuzz(data: &[u8]) {
    let Ok(header) = Header::parse(data, data.len() as u64) else { return };
    drop(tokenizer::convert(&header));
    let part = GgufFile { path: "model.gguf".into(), bytes: data.len() as u64, header };
    let Ok(parts) = GgufFiles::new(vec![part]) else { return };
    let factors = rope_factors(&parts, |_: &Path| Ok((std::io::Cursor::new(data), data.len() as u64)));
    let Ok(factors) = factors else { return };
    if let Ok(model) = GgufModel::read(&parts, &factors) {
        drop(model.config_json(&SpecialIds::default()).to_string());
        if let Ok(sources) = tensors::map(&model, &parts) {
            for source in sources.values() {
                drop(source.runs());
            }
        }
    }
    drop(Gguf::new(parts, &factors));
}
