//! Goal: quantised weights have the values that other software gives them, bit for bit. Method: blocks and tensors in
//! `tests/fixtures/quant`, whose values were computed by the Python packages that its scripts name; and what llama.cpp's
//! converter and quantiser made of the demo model (`tests/fixtures/llama.cpp`).

use ostinato::model::gguf;
use ostinato::model::gguf::write::{FileType, convert};
use ostinato::model::text::Text;
use ostinato::quant::blocks::BlockType;
use ostinato::quant::number::Number;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn fixture(name: &str) -> Vec<u8> {
    let path = path("tests/fixtures").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The elements of an F32 tensor.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn blocks_of_every_gguf_type_have_the_values_of_pythons_gguf() {
    let file = fixture("quant/blocks.safetensors");
    let file = SafeTensors::deserialize(&file).expect("the fixture");
    let mut compared = 0;
    for kind in BlockType::ALL {
        let tensor = |part: &str| file.tensor(&format!("{kind}.{part}")).unwrap_or_else(|e| panic!("{kind}: {e}"));
        let (blocks, first, digests) = (tensor("blocks"), tensor("first"), tensor("digests"));
        assert_eq!((blocks.dtype(), blocks.shape()[1]), (Dtype::U8, kind.bytes()), "{kind}");
        let mut values = vec![f32::NAN; blocks.shape()[0] * kind.elements()];
        kind.dequantize(blocks.data(), &mut values);
        if kind.codes().number == Number::E2m1 {
            // e2m1 has a negative zero; the package's table of integers has not. Both zeros are 0 in the fixture.
            values.iter_mut().for_each(|value| *value += 0.0);
        }
        // The values themselves show what is wrong, if the first block is.
        let wanted = floats(first.data());
        let found = &values[..kind.elements()];
        let wrong = (0..kind.elements()).find(|i| wanted[*i].to_bits() != found[*i].to_bits());
        assert_eq!(wrong.map(|i| (i, wanted[i], found[i])), None, "{kind}, block 0: element, wanted, found");
        let rows = values.chunks_exact(kind.elements()).zip(digests.data().chunks_exact(8));
        for (block, (values, digest)) in rows.enumerate() {
            assert_eq!(&Sha256::digest(bytes(values))[..8], digest, "{kind}, block {block}: {values:?}");
            compared += values.len();
        }
    }
    assert!(compared > 100_000, "only {compared} elements were compared");
}

/// What llama.cpp made of the demo model.
fn story() -> Value {
    serde_json::from_slice(&fixture("llama.cpp/story.json")).expect("JSON")
}

/// The digest of a file's tensors, as the fixture's script computes it.
fn digest(file: &Path) -> String {
    let (model, _) = gguf::open(file).expect("a model");
    let bytes = std::fs::read(file).expect("the file");
    let mut sha = Sha256::new();
    for name in model.parts.tensors.keys() {
        let info = model.parts.tensor(name).expect("it is listed");
        let dims = info.dims.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        sha.update(format!("{name} {} {dims} ", info.kind));
        sha.update(&bytes[info.offset as usize..][..info.bytes as usize]);
    }
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_converted_file_holds_the_tensors_that_llama_cpps_converter_writes() {
    let story = story();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("demo.gguf");
    convert(&path("demo/model"), &file, FileType::from_name("BF16").expect("a type"), 2).expect("converted");
    assert_eq!(digest(&file), story["files"]["BF16"]["digest"]);
    // The file that the tests of whole models use.
    assert_eq!(digest(&path("tests/fixtures/llama.cpp/demo-Q4_K_M.gguf")), story["files"]["Q4_K_M"]["digest"]);
}

#[test]
fn the_tokenizer_of_llama_cpps_file_is_the_one_it_was_converted_from() {
    let load = |name: &str| Text::load(&path(name)).expect("readable").expect("a tokenizer");
    let (original, converted) = (load("demo/model"), load("tests/fixtures/llama.cpp/demo-Q4_K_M.gguf"));
    let same = |text: &str| {
        let [wanted, found] = [&original, &converted].map(|from| from.encode(text, true).expect("a text"));
        assert_eq!(found, wanted, "{text:?}");
        let [wanted, found] = [&original, &converted].map(|from| from.decode(&wanted, false).expect("tokens"));
        assert_eq!(found, wanted, "{text:?}");
        found.len()
    };
    let story = story();
    let texts = story["texts"].as_array().expect("texts");
    for pair in texts {
        let text = pair[0].as_str().expect("a text");
        same(text);
        let wanted: Vec<u32> = serde_json::from_value(pair[1].clone()).expect("ids");
        assert_eq!(converted.encode(text, false).expect("a text"), wanted, "llama.cpp, {text:?}");
    }
    assert!(texts.len() > 30, "{} texts", texts.len());
    // Prose, its pieces, and any characters in any order.
    let tasks = std::fs::read_to_string(path("demo/tasks-heldout.jsonl")).expect("texts");
    let mut bytes: usize = tasks.lines().map(same).sum();
    let characters: Vec<char> =
        texts.iter().flat_map(|pair| pair[0].as_str().expect("a text").chars()).chain(' '..='~').collect();
    let mut state = 18u64;
    for _ in 0..2000 {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let text: String = (0..next() % 40).map(|_| characters[next() % characters.len()]).collect();
        bytes += same(&text);
    }
    assert!(bytes > 250_000, "only {bytes} bytes were compared");
}
