//! Model names on the command line: an embedded model, a folder, a GGUF file, or a repository of the Hugging Face hub.
//! Finds the files of a model, and the name under which it is served. Not here: reading them.

use super::{Usage, cache_directory, hub, progress};
use crate::config::{Draft, embedded};
use crate::gpu::error::StartError;
use crate::model::checkpoint::{Checkpoint, CheckpointError};
use crate::model::gguf::split::split_name;
use crate::model::{demo, gguf};
use std::path::{Path, PathBuf};

/// Returns the path of a model's files: the given path, or the files of a repository of the hub, which are downloaded
/// unless they are in the hub's cache. With `plain` the download shows no bar.
pub(super) fn find(given: &str, plain: bool) -> anyhow::Result<PathBuf> {
    let path = Path::new(given);
    if embedded(path).is_some() || path.exists() {
        return Ok(path.to_owned());
    }
    match hub::Reference::parse(given) {
        Some(reference) => hub::find(&reference, &progress::Show::new(plain)),
        // A name without a folder may be meant for one of the hub.
        None if path.components().count() == 1 && !gguf::is_named(path) => Err(Usage(format!(
            "{given} does not exist; a model is a folder, a GGUF file, demo, or ORG/NAME on the Hugging Face hub"
        ))
        .into()),
        // Opening the path reports what is wrong with it.
        None => Ok(path.to_owned()),
    }
}

/// Returns where drafts come from, with the path of a draft model's files: see [`find`].
pub(super) fn draft(given: Option<&Draft>, plain: bool) -> anyhow::Result<Option<Draft>> {
    match given {
        Some(Draft::Model(path)) => Ok(Some(Draft::Model(find(&path.to_string_lossy(), plain)?))),
        lookup_or_none => Ok(lookup_or_none.cloned()),
    }
}

/// Opens a checkpoint's headers. An embedded model is unpacked first. Also returns the checkpoint's own path.
pub(super) fn opened(path: &Path) -> anyhow::Result<(PathBuf, Checkpoint)> {
    opened_as(path, Checkpoint::open)
}

/// Like [`opened`], for what drafts: a model, or a draft head.
pub(super) fn opened_draft(path: &Path) -> anyhow::Result<(PathBuf, Checkpoint)> {
    opened_as(path, Checkpoint::open_draft)
}

fn opened_as(
    path: &Path,
    open: fn(&Path) -> Result<Checkpoint, CheckpointError>,
) -> anyhow::Result<(PathBuf, Checkpoint)> {
    let path =
        demo::unpack(path, cache_directory().as_deref()).map_err(|(path, source)| StartError::Demo { path, source })?;
    let checkpoint = open(&path)?;
    Ok((path, checkpoint))
}

/// Returns the name under which a model is served that was given without one: a repository's own name, the last part of
/// a folder's path, or a file's name without its ending and without the number of a split file. Spaces become `-`.
pub(super) fn served_as(given: &str) -> String {
    let path = Path::new(given);
    if let Some(embedded) = embedded(path) {
        return embedded.trim_start_matches("embedded:").to_owned();
    }
    if !path.exists()
        && let Some(reference) = hub::Reference::parse(given)
    {
        return reference.name();
    }
    let last = |path: &Path| Some(path.file_name()?.to_string_lossy().into_owned());
    // `.` and `..` have no name of their own.
    let name = last(path).or_else(|| last(&path.canonicalize().ok()?)).unwrap_or_else(|| given.to_owned());
    let whole = match split_name(&name) {
        Some((whole, ..)) => whole,
        None if gguf::is_named(path) => &name[..name.len() - ".gguf".len()],
        None => &name,
    };
    whole.replace(|c: char| c.is_whitespace() || c.is_control(), "-")
}

/// Refuses two models that would be served under one name. `names` are the names with what was given for each.
pub(super) fn told_apart(names: &[(String, String)]) -> Result<(), Usage> {
    for (index, (name, given)) in names.iter().enumerate() {
        if let Some((_, earlier)) = names[..index].iter().find(|(other, _)| other == name) {
            return Err(Usage(format!(
                "\"{earlier}\" and \"{given}\" would both be served as \"{name}\": name one, --model NAME={given}"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_served_under_the_last_part_of_what_it_is_called() {
        for (given, name) in [
            ("demo", "demo"),
            ("embedded:demo-hybrid", "demo-hybrid"),
            ("/models/Qwen3-8B", "Qwen3-8B"),
            ("/models/Qwen3-8B/", "Qwen3-8B"),
            ("models/Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),
            ("/m/big-00001-of-00003.gguf", "big"),
            ("/m/big-1-of-3.gguf", "big-1-of-3"),
            ("/m/my model", "my-model"),
            ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
            ("Qwen/Qwen3-8B@v1.0", "Qwen/Qwen3-8B"),
            ("unsloth/Qwen3-8B-GGUF:Q4_K_M", "unsloth/Qwen3-8B-GGUF:Q4_K_M"),
        ] {
            assert_eq!(served_as(given), name, "{given}");
        }
        let here = std::env::current_dir().expect("a folder");
        assert_eq!(served_as("."), here.file_name().expect("a name").to_string_lossy());
    }

    #[test]
    fn two_models_of_one_name_are_refused_with_both() {
        let names = |given: &[&str]| -> Vec<(String, String)> {
            given.iter().map(|given| (served_as(given), (*given).to_owned())).collect()
        };
        assert!(told_apart(&names(&["/a/x", "/b/y", "demo"])).is_ok());
        let error = told_apart(&names(&["/a/x", "/b/y", "/c/x"])).expect_err("x twice").to_string();
        assert!(error.contains("\"/a/x\" and \"/c/x\" would both be served as \"x\""), "{error}");
        assert!(error.contains("--model NAME=/c/x"), "{error}");
    }
}
