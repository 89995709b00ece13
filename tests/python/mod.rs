//! The Python interpreter of the environment with the packages of `tests/requirements.txt`.

use std::path::PathBuf;

/// Returns the interpreter that `deploy/setup.sh test` installs in cargo's target folder, or the one that
/// `OSTINATO_TEST_PYTHON` names.
pub fn python() -> PathBuf {
    let beside = || PathBuf::from(concat!(env!("CARGO_TARGET_TMPDIR"), "/../python/bin/python"));
    let python = std::env::var_os("OSTINATO_TEST_PYTHON").map_or_else(beside, PathBuf::from);
    assert!(python.exists(), "{} is not there: run deploy/setup.sh test", python.display());
    python
}
