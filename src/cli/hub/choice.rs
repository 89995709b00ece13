//! Chooses the files of a repository that make up a model: a checkpoint in safetensors files with its configuration and
//! tokenizer, or one GGUF model. Pure.

use super::shards;
use crate::model::gguf::split::split_name;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The single file of a checkpoint's weights.
const SINGLE: &str = "model.safetensors";
/// The index of a checkpoint whose weights are in several files.
const INDEX: &str = "model.safetensors.index.json";
/// The list of the modules of an embedding model.
const MODULES: &str = "modules.json";
/// The quantisation that is taken if none is selected: what most users of GGUF files take.
const USUAL: &str = "Q4_K_M";

/// The files of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelFiles {
    /// The names in the repository, weights last.
    pub(super) names: Vec<String>,
    /// The first GGUF file; `None` for a checkpoint in safetensors files.
    gguf: Option<String>,
}

impl ModelFiles {
    /// Whether these are all parts of a GGUF model that is split, by the number in their names.
    pub(super) fn is_whole(&self) -> bool {
        let split = self.gguf.as_deref().and_then(split_name);
        split.is_none_or(|(.., count)| count == self.names.len() as u64)
    }

    /// The model's path: the snapshot, or a file in it.
    pub(super) fn path(&self, snapshot: &Path) -> PathBuf {
        self.gguf.as_ref().map_or_else(|| snapshot.to_owned(), |name| snapshot.join(name))
    }
}

/// The reason why it is not clear which GGUF file is meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ChoiceError {
    /// There are several, and none is selected.
    #[error("there are several GGUF files, select one with :FILE: {choices}")]
    Several {
        /// The names that can be selected.
        choices: String,
    },
    /// No file has the selected name.
    #[error("no GGUF file is \"{selected}\"; there are {choices}")]
    None {
        /// The selected name.
        selected: String,
        /// The names that can be selected.
        choices: String,
    },
    /// The index of the weights cannot be read.
    #[error("{INDEX} names no files")]
    Index,
}

/// Returns the files of the model in a repository that has the files `names`; `None` if it has no weights that can be
/// run. `selected` is a GGUF file's name or quantisation. `read` returns the content of the index of a checkpoint in
/// several files, if it can.
pub(super) fn files(
    names: &[String],
    selected: Option<&str>,
    read: impl FnOnce(&str) -> Option<String>,
) -> Result<Option<ModelFiles>, ChoiceError> {
    let has = |name: &str| names.iter().any(|other| other == name);
    let checkpoint = has("config.json") && (has(SINGLE) || has(INDEX));
    if selected.is_none() && checkpoint {
        let described = |name: &&String| {
            let small = name.ends_with(".json") || name.ends_with(".jinja");
            (!name.contains('/') && small && !(has(SINGLE) && **name == INDEX)) || (has(MODULES) && is_of_module(name))
        };
        let mut files: Vec<String> = names.iter().filter(described).cloned().collect();
        match has(SINGLE) {
            true => files.push(SINGLE.to_owned()),
            false => files.extend(read(INDEX).as_deref().and_then(shards).ok_or(ChoiceError::Index)?),
        }
        return Ok(Some(ModelFiles { names: files, gguf: None }));
    }
    let models = gguf_models(names);
    if models.is_empty() && selected.is_none() {
        return Ok(None);
    }
    let parts = chosen(&models, selected)?;
    Ok(Some(ModelFiles { gguf: parts.first().cloned(), names: parts }))
}

/// Whether a file describes a module of an embedding model, or holds its weights: it is in a folder whose name begins with the
/// module's number, as `2_Dense/`.
fn is_of_module(name: &str) -> bool {
    let Some((folder, file)) = name.split_once('/') else { return false };
    let numbered = folder.split_once('_').is_some_and(|(number, _)| number.parse::<u32>().is_ok());
    numbered && ["config.json", SINGLE].contains(&file)
}

/// Returns the name of a GGUF file's model: without the ending and the number of a part; `None` for other files.
fn stem(name: &str) -> Option<&str> {
    let (stem, end) = name.split_at_checked(name.len().checked_sub(5)?)?;
    let whole = split_name(name).map_or(stem, |(whole, ..)| whole);
    end.eq_ignore_ascii_case(".gguf").then_some(whole)
}

/// The GGUF models among files: the files of each, in order, by the model's name.
fn gguf_models(names: &[String]) -> BTreeMap<&str, Vec<String>> {
    let mut models: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, stem) in names.iter().filter_map(|name| Some((name, stem(name)?))) {
        let lower = stem.to_ascii_lowercase();
        // Image projectors and importance matrices are not models.
        if !lower.contains("mmproj") && !lower.contains("imatrix") {
            models.entry(stem).or_default().push(name.clone());
        }
    }
    models.values_mut().for_each(|parts| parts.sort());
    models
}

fn chosen(models: &BTreeMap<&str, Vec<String>>, selected: Option<&str>) -> Result<Vec<String>, ChoiceError> {
    let choices = || models.keys().copied().collect::<Vec<_>>().join(", ");
    let Some(selected) = selected else {
        return match models.values().next() {
            Some(only) if models.len() == 1 => Ok(only.clone()),
            _ => chosen(models, Some(USUAL)).map_err(|_| ChoiceError::Several { choices: choices() }),
        };
    };
    let wanted = stem(selected).unwrap_or(selected).to_lowercase();
    let ends = |stem: &str| {
        let stem = stem.to_lowercase();
        let rest = stem.strip_suffix(&wanted);
        rest.is_some_and(|rest| rest.is_empty() || rest.ends_with(['-', '.', '_', '/']))
    };
    // `x-Q4_K_M` and `x-UD-Q4_K_M` both end in Q4_K_M: the shorter name is the one without another quantisation's mark.
    let mut found: Vec<(&str, &Vec<String>)> =
        models.iter().filter(|(stem, _)| ends(stem)).map(|(stem, parts)| (*stem, parts)).collect();
    found.sort_by_key(|(stem, _)| stem.len());
    match found[..] {
        [] => Err(ChoiceError::None { selected: selected.to_owned(), choices: choices() }),
        [(a, _), (b, _), ..] if a.len() == b.len() => {
            let both: Vec<&str> = found.iter().map(|(stem, _)| *stem).collect();
            Err(ChoiceError::Several { choices: both.join(", ") })
        }
        [(_, parts), ..] => Ok(parts.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_checkpoint_is_its_descriptions_and_then_its_weights() {
        let names = owned(&[
            "README.md",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "onnx/model.json",
            "original/params.json",
        ]);
        let files = files(&names, None, |_| None).expect("clear").expect("a model");
        assert_eq!(files.names, ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]);
        assert_eq!(files.path(Path::new("/s")), Path::new("/s"));
    }

    #[test]
    fn modules_of_an_embedding_model_belong_to_it() {
        let others = ["onnx/config.json", "2_Dense/pytorch_model.bin", "2_Dense/old/config.json"];
        let own = ["config.json", MODULES, "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"];
        let names = owned(&[&own[..], &others, &["model.safetensors"]].concat());
        let found = files(&names, None, |_| None).expect("clear").expect("a model");
        assert_eq!(found.names, [&own[..], &["model.safetensors"]].concat());
        let without: Vec<String> = names.into_iter().filter(|name| name != MODULES).collect();
        let found = files(&without, None, |_| None).expect("clear").expect("a model");
        assert_eq!(found.names, ["config.json", "model.safetensors"]);
    }

    #[test]
    fn shards_are_those_of_the_index() {
        let names = owned(&["config.json", INDEX, "a.safetensors", "b.safetensors", "other.safetensors"]);
        let index = r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#;
        let found = files(&names, None, |name| (name == INDEX).then(|| index.to_owned())).expect("clear");
        assert_eq!(found.expect("a model").names, ["config.json", INDEX, "a.safetensors", "b.safetensors"]);
        assert_eq!(files(&names, None, |_| Some("[]".to_owned())), Err(ChoiceError::Index));
    }

    #[test]
    fn a_gguf_model_is_selected_by_quantisation_or_name() {
        let names = owned(&[
            "README.md",
            "config.json",
            "M-Q4_K_M.gguf",
            "M-UD-Q4_K_M.gguf",
            "M-Q8_0.gguf",
            "mmproj-M-f16.gguf",
            "BF16/M-BF16-00002-of-00002.gguf",
            "BF16/M-BF16-00001-of-00002.gguf",
            "M-IQ4_K_M.gguf",
        ]);
        let find =
            |selected: Option<&str>| files(&names, selected, |_| None).map(|files| files.expect("a model").names);
        assert_eq!(find(None), Ok(owned(&["M-Q4_K_M.gguf"])), "the usual one");
        assert_eq!(find(Some("q8_0")), Ok(owned(&["M-Q8_0.gguf"])));
        assert_eq!(find(Some("Q4_K_M")), Ok(owned(&["M-Q4_K_M.gguf"])));
        assert_eq!(find(Some("UD-Q4_K_M")), Ok(owned(&["M-UD-Q4_K_M.gguf"])));
        assert_eq!(find(Some("M-Q8_0.gguf")), Ok(owned(&["M-Q8_0.gguf"])));
        let parts = owned(&["BF16/M-BF16-00001-of-00002.gguf", "BF16/M-BF16-00002-of-00002.gguf"]);
        assert_eq!(find(Some("BF16")), Ok(parts.clone()));
        let found = files(&names, Some("BF16"), |_| None).expect("clear").expect("a model");
        assert_eq!(found.path(Path::new("/s")), Path::new("/s").join(&parts[0]));
        assert!(found.is_whole());
        let one = files(&parts[..1], None, |_| None).expect("clear").expect("a model");
        assert!(!one.is_whole(), "the second part is missing");
        let error = find(Some("Q2_K")).expect_err("no file has this quantisation").to_string();
        assert!(error.contains("\"Q2_K\"") && error.contains("M-Q8_0") && !error.contains("mmproj"), "{error}");
    }

    #[test]
    fn without_a_usual_one_nothing_is_guessed() {
        let names = owned(&["M-Q8_0.gguf", "M-Q5_0.gguf"]);
        let error = files(&names, None, |_| None).expect_err("two").to_string();
        assert!(error.contains("M-Q5_0, M-Q8_0"), "{error}");
        assert_eq!(files(&owned(&["pytorch_model.bin"]), None, |_| None), Ok(None));
        let only = files(&owned(&["M-Q8_0.gguf"]), None, |_| None);
        assert_eq!(only.map(|files| files.map(|files| files.names)), Ok(Some(owned(&["M-Q8_0.gguf"]))));
    }
}
