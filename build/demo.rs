//! Packs the embedded models (`demo/`) for the program. A file of 16-bit weights is split behind its header into the low
//! and the high bytes of the weights, because the high ones (sign and exponent) repeat and the low ones do not, and each
//! part is deflated. `src/model/demo.rs` unpacks them.

use flate2::Compression;
use flate2::write::DeflateEncoder;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The models: the constant in the generated code, the folder, and the feature without which it is left out.
const MODELS: [(&str, &str, Option<&str>); 2] =
    [("DEMO", "demo/model", None), ("DEMO_HYBRID", "demo/hybrid", Some("CARGO_FEATURE_DEMO_HYBRID"))];
/// The files of each model.
const FILES: [&str; 5] =
    ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];

pub fn pack() {
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut code = String::from("// Written by build/demo.rs from demo/.\n\n");
    for (constant, folder, feature) in MODELS {
        if feature.is_some_and(|feature| std::env::var_os(feature).is_none()) {
            continue;
        }
        // FNV-1a of all files' bytes.
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut files = String::new();
        for name in FILES {
            let path = Path::new(folder).join(name);
            println!("cargo:rerun-if-changed={}", path.display());
            let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            for byte in &bytes {
                hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
            }
            let weights = if name.ends_with(".safetensors") { first_weight(&bytes) } else { bytes.len() };
            let (head, rest) = bytes.split_at(weights);
            assert!(rest.len() % 2 == 0, "{}: its weights have 16 bits each", path.display());
            let plane = |first: usize| -> Vec<u8> { rest.iter().skip(first).step_by(2).copied().collect() };
            let part = |name: &str, bytes: &[u8]| {
                let file = out.join(format!("{constant}.{name}"));
                std::fs::write(&file, deflated(bytes)).expect("OUT_DIR is writable");
                format!("include_bytes!({:?})", file.display().to_string())
            };
            let (head, low, high) = (
                part(&format!("{name}.head"), head),
                part(&format!("{name}.low"), &plane(0)),
                part(&format!("{name}.high"), &plane(1)),
            );
            writeln!(
                files,
                "        Packed {{ name: {name:?}, bytes: {}, head: {head}, low: {low}, high: {high} }},",
                bytes.len()
            )
            .expect("writing to a string");
        }
        writeln!(code, "static {constant}: Files = Files {{\n    hash: {hash:#x},\n    files: [\n{files}    ],\n}};")
            .expect("writing to a string");
    }
    std::fs::write(out.join("demo.rs"), code).expect("OUT_DIR is writable");
}

/// Returns the place of the first weight in a safetensors file: behind the length of the header and the header.
fn first_weight(bytes: &[u8]) -> usize {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    8 + usize::try_from(length).expect("a header that fits")
}

/// Returns the bytes as a raw deflate stream.
pub fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).expect("writing to memory");
    encoder.finish().expect("writing to memory")
}
