//! The interpreter that has what `tests/requirements.txt` names.

use std::path::PathBuf;

/// As `deploy/setup.sh test` installs it beside what cargo builds; `OSTINATO_TEST_PYTHON` names another.
pub fn python() -> PathBuf {
    let beside = || PathBuf::from(concat!(env!("CARGO_TARGET_TMPDIR"), "/../python/bin/python"));
    let python = std::env::var_os("OSTINATO_TEST_PYTHON").map_or_else(beside, PathBuf::from);
    assert!(python.exists(), "{} is not there: run deploy/setup.sh test", python.display());
    python
}
