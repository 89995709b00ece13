//! The environment variables of the Hugging Face hub, as its own programs read them.

use super::HubError;
use crate::config::file;
use std::path::PathBuf;

/// The hub's public address.
const ENDPOINT: &str = "https://huggingface.co";

/// The locations of the hub and of its cache.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Settings {
    /// The folder of the cache.
    pub(super) cache: PathBuf,
    /// The hub's address, without a slash at its end.
    pub(super) endpoint: String,
    /// The access token.
    pub(super) token: Option<String>,
    /// Whether the cache alone is used.
    pub(super) offline: bool,
}

impl Settings {
    /// Reads the variables of this process, and the file with the token.
    pub(super) fn of_process() -> Result<Settings, HubError> {
        Settings::read(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(variable: &dyn Fn(&str) -> Option<String>) -> Result<Settings, HubError> {
        let path = |name: &str| variable(name).map(PathBuf::from);
        let user = || path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        let home = || path("HF_HOME").or_else(|| Some(user()?.join("huggingface")));
        let own = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = own.or_else(|| Some(home()?.join("hub"))).ok_or(HubError::NoCache)?;
        let flag = |name: &str| {
            variable(name).is_some_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()))
        };
        let kept = || {
            let file = path("HF_TOKEN_PATH").or_else(|| Some(home()?.join("token")))?;
            file::read_text(&file, file::SMALL).ok()
        };
        let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN"));
        let token = token.or_else(|| if flag("HF_HUB_DISABLE_IMPLICIT_TOKEN") { None } else { kept() });
        Ok(Settings {
            // Links in the cache lead from one absolute path to another.
            cache: std::path::absolute(&cache).unwrap_or(cache),
            endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned()).trim_end_matches('/').to_owned(),
            token: token.map(|token| token.trim().to_owned()).filter(|token| !token.is_empty()),
            offline: flag("HF_HUB_OFFLINE") || flag("TRANSFORMERS_OFFLINE"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn read(variables: &[(&str, &str)]) -> Settings {
        let variables: HashMap<&str, &str> = variables.iter().copied().collect();
        match Settings::read(&|name| variables.get(name).map(|value| (*value).to_owned())) {
            Ok(settings) => settings,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn the_variables_are_those_of_the_hubs_own_programs() {
        let settings = read(&[("HOME", "/home/a")]);
        assert_eq!(settings.cache, PathBuf::from("/home/a/.cache/huggingface/hub"));
        assert_eq!((settings.endpoint.as_str(), settings.offline), ("https://huggingface.co", false));
        assert!(settings.token.is_none());
        assert_eq!(read(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]).cache, PathBuf::from("/c/huggingface/hub"));
        assert_eq!(read(&[("HOME", "/h"), ("HF_HOME", "/f")]).cache, PathBuf::from("/f/hub"));
        assert_eq!(read(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/g")]).cache, PathBuf::from("/g"));
        let mirror = read(&[("HOME", "/h"), ("HF_ENDPOINT", "http://m:1/"), ("HF_HUB_OFFLINE", "1")]);
        assert_eq!((mirror.endpoint.as_str(), mirror.offline), ("http://m:1", true));
        assert!(!read(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).offline);
        assert!(matches!(Settings::read(&|_| None), Err(HubError::NoCache)));
    }

    #[test]
    fn the_token_is_the_variables_or_the_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let home = folder.path().to_str().expect("UTF-8");
        assert!(read(&[("HF_HOME", home)]).token.is_none());
        std::fs::write(folder.path().join("token"), "hf_kept\n").expect("written");
        assert_eq!(read(&[("HF_HOME", home)]).token.as_deref(), Some("hf_kept"));
        assert_eq!(read(&[("HF_HOME", home), ("HF_TOKEN", "hf_given")]).token.as_deref(), Some("hf_given"));
        assert!(read(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).token.is_none());
    }
}
