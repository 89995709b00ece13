//! Goal: what `make dist` packs is complete and starts where it is unpacked. Method: the script packs the program under
//! test; the Debian package is unpacked into an empty folder.

use std::path::Path;
use std::process::Command;

#[test]
fn the_packages_hold_a_program_that_starts_and_all_that_belongs_to_it() {
    let folder = tempfile::tempdir().unwrap();
    let (out, root) = (folder.path().join("dist"), folder.path().join("root"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/package.sh");
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    // Compressed as little as possible: the time goes into what is tested.
    run(Command::new(&script)
        .arg("dist")
        .arg(&out)
        .env("OSTINATO", env!("CARGO_BIN_EXE_ostinato"))
        .env("DPKG_DEB_COMPRESSOR_TYPE", "gzip")
        .env("DPKG_DEB_COMPRESSOR_LEVEL", "1"));
    run(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(&out));
    let named = |end: &str| {
        let mut found = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
        found.find(|path| path.to_string_lossy().ends_with(end)).unwrap_or_else(|| panic!("{end} in {}", out.display()))
    };
    assert!(named(".debug").exists());
    let archive = run(Command::new("tar").arg("--list").arg("--file").arg(named(".tar.gz")));

    run(Command::new("dpkg-deb").arg("--extract").arg(named(".deb")).arg(&root));
    let version = run(Command::new(root.join("usr/bin/ostinato")).arg("--version"));
    assert!(version.starts_with(concat!("ostinato ", env!("CARGO_PKG_VERSION"))), "{version}");
    for file in [
        "bin/ostinato",
        "share/man/man1/ostinato.1.gz",
        "share/man/man1/ostinato-serve.1.gz",
        "share/bash-completion/completions/ostinato",
        "share/fish/vendor_completions.d/ostinato.fish",
        "share/doc/ostinato/licences.txt",
        "lib/systemd/system/ostinato.service",
    ] {
        assert!(root.join("usr").join(file).metadata().is_ok_and(|metadata| metadata.len() > 0), "{file}");
        assert!(archive.lines().any(|line| line.ends_with(file)), "{file} in the archive");
    }
    assert!(root.join("etc/ostinato/ostinato.toml").exists());
    let unit = std::fs::read_to_string(root.join("usr/lib/systemd/system/ostinato.service")).unwrap();
    assert!(unit.contains("ExecStart=/usr/bin/ostinato serve"), "{unit}");
    let control = run(Command::new("dpkg-deb").arg("--field").arg(named(".deb")));
    assert!(control.contains("\nDepends: libc6 (>= 2."), "{control}");
    let licences = std::fs::read_to_string(root.join("usr/share/doc/ostinato/licences.txt")).unwrap();
    for crate_name in ["ash ", "tonic ", "tokenizers "] {
        assert!(licences.contains(&format!("==== {crate_name}")), "{crate_name}");
    }
    assert!(licences.contains("Permission is hereby granted"), "texts and not names alone");
    let size = |path: &Path| path.metadata().unwrap().len();
    let stripped = size(&root.join("usr/bin/ostinato"));
    assert!(stripped < size(Path::new(env!("CARGO_BIN_EXE_ostinato"))), "{stripped}");
}
