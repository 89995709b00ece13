//! `ostinato completions`, `ostinato man` and `--version`: what the definition of the arguments and the build say about
//! the program itself.

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use std::io::Write;
use std::path::Path;
use std::sync::LazyLock;

/// Returns the text of `--version`: the version, the commit if the build was told it in `OSTINATO_COMMIT`, and the
/// compiler.
pub(super) fn version() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let commit = option_env!("OSTINATO_COMMIT").filter(|commit| !commit.is_empty());
        let commit = commit.map(|commit| format!("commit {commit}, ")).unwrap_or_default();
        format!("{} ({commit}{})", env!("CARGO_PKG_VERSION"), env!("OSTINATO_RUSTC"))
    });
    &TEXT
}

/// Prints the completion script for a shell.
pub(super) fn completions(shell: Shell, command: &mut Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, command, "ostinato", &mut script);
    // Written at once: a reader that closes the pipe gives an error and no panic.
    Ok(std::io::stdout().lock().write_all(&script)?)
}

/// Prints the program's manual page, or writes the pages of the program and of its commands into the folder `out`.
pub(super) fn pages(command: Command, out: Option<&Path>) -> anyhow::Result<()> {
    let Some(folder) = out else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return Ok(std::io::stdout().lock().write_all(&page)?);
    };
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(command, folder))
        .with_context(|| format!("cannot write the manual pages to {}", folder.display()))
}
