//! Models in several files.

use std::io::{Cursor, Error, ErrorKind};
use std::path::{Path, PathBuf};

use super::super::container::{TensorType, Value};
use super::super::split::{GgufFiles, SplitError};
use super::File;

/// Returns the files of a model in three parts with one tensor each.
fn three() -> Vec<(String, File)> {
    let file = |number: u16| {
        let file = File::new()
            .pair("split.no", Value::U16(number))
            .pair("split.count", Value::U16(3))
            .pair("split.tensors.count", Value::I32(3))
            .tensor(&format!("t{number}"), &[4], TensorType::F32);
        (format!("m-{:05}-of-00003.gguf", number + 1), file)
    };
    (0..3).map(file).collect()
}

fn open(files: &[(String, File)], path: &str) -> Result<GgufFiles, SplitError> {
    GgufFiles::open(Path::new(path), |path: &Path| {
        let found = files.iter().find(|(name, _)| Path::new("d").join(name) == path);
        let bytes = found.ok_or(Error::from(ErrorKind::NotFound))?.1.bytes();
        Ok((Cursor::new(bytes.clone()), bytes.len() as u64))
    })
}

#[test]
fn any_file_opens_all() {
    for number in 1..=3 {
        let parts = open(&three(), &format!("d/m-{number:05}-of-00003.gguf")).unwrap();
        assert_eq!(parts.files.len(), 3);
        assert_eq!(parts.find("t2").map(|at| (at.file, at.index)), Some((2, 0)));
        assert_eq!(parts.tensor("t1").unwrap().name, "t1");
        assert_eq!(parts.get("split.no"), Some(&Value::U16(0)));
    }
}

#[test]
fn missing_files_are_named_together() {
    let files: Vec<_> = three().into_iter().skip(1).take(1).collect();
    let error = open(&files, "d/m-00002-of-00003.gguf").unwrap_err();
    let missing = ["d/m-00001-of-00003.gguf", "d/m-00003-of-00003.gguf"].map(PathBuf::from);
    assert_eq!(error, SplitError::Missing { paths: missing.into() });
    assert_eq!(error.to_string(), "files of the model are missing: d/m-00001-of-00003.gguf, d/m-00003-of-00003.gguf");
    let error = open(&[], "d/m.gguf").unwrap_err();
    assert_eq!(error.to_string(), "d/m.gguf does not exist");
}

#[test]
fn names_and_claims_must_agree() {
    let changed = |index: usize, key: &str, value: Value| {
        let mut files = three();
        files[index].1.pairs.iter_mut().find(|pair| pair.0 == key).unwrap().1 = value;
        open(&files, "d/m-00001-of-00003.gguf").unwrap_err().to_string()
    };
    assert_eq!(
        changed(1, "split.no", Value::U16(0)),
        "d/m-00002-of-00003.gguf: split.no is 0, must be 1 by the names of the files"
    );
    assert_eq!(
        changed(2, "split.count", Value::U16(4)),
        "d/m-00003-of-00003.gguf: split.count is 4, must be 3 by the names of the files"
    );
    assert_eq!(
        changed(0, "split.tensors.count", Value::I32(4)),
        "d/m-00001-of-00003.gguf: split.tensors.count is 4, the files of the model hold 3 tensors"
    );
    assert_eq!(
        changed(0, "split.count", Value::I32(-1)),
        "d/m-00001-of-00003.gguf: split.count is -1, must be a number"
    );
    let mut files = three();
    files[0].0 = "alone.gguf".to_owned();
    let error = open(&files, "d/alone.gguf").unwrap_err().to_string();
    assert_eq!(error, "d/alone.gguf: split.count is 3, must be 1 by the names of the files");
    for name in ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-01001.gguf"] {
        let error = open(&three(), &format!("d/{name}")).unwrap_err();
        assert!(matches!(error, SplitError::Name { .. }), "{error}");
    }
    // What only looks like the name of a part is a file of its own.
    for name in ["m-1-of-3.gguf", "m-00001-of-00003.bin", "-of-00003.gguf", "m-+0001-of-00003.gguf"] {
        let files = [(name.to_owned(), File::new())];
        assert_eq!(open(&files, &format!("d/{name}")).unwrap().files.len(), 1, "{name}");
    }
}

#[test]
fn tensors_and_headers_are_checked_over_all_files() {
    let mut files = three();
    files[2].1.tensors[0].name = "t0".to_owned();
    let error = open(&files, "d/m-00001-of-00003.gguf").unwrap_err().to_string();
    assert_eq!(error, "tensor t0 is in d/m-00001-of-00003.gguf and in d/m-00003-of-00003.gguf");
    let mut files = three();
    files[1].1.version = 1;
    let error = open(&files, "d/m-00001-of-00003.gguf").unwrap_err().to_string();
    assert_eq!(error, "d/m-00002-of-00003.gguf cannot be used: it is GGUF version 1, supported are 2 and 3");
}
