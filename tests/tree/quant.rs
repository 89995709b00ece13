//! Goal: quantised weights have the values that other software gives them, bit for bit. Method: blocks and tensors in
//! `tests/fixtures/quant`, whose values were computed by the Python packages that its scripts name; and the files that
//! llama.cpp's converter and quantiser made from the demo model (`tests/fixtures/llama.cpp`).

use crate::python::python;
use ostinato::model::gguf;
use ostinato::model::gguf::container::TensorType;
use ostinato::model::gguf::write::{FileType, convert};
use ostinato::model::synth::{self, SynthOptions};
use ostinato::model::text::Text;
use ostinato::quant::blocks::BlockType;
use ostinato::quant::number::Number;
use ostinato::quant::safetensors::{
    Awq, CodeMatrix, Description, Fp8, Gptq, GptqVersion, Int8, Mxfp4, Nested, NestedStorage, Nvfp4, PackedInts,
    ScaleShape, Storage, TableCodes, Tensor, TensorDtype, TensorHead, TensorRole, WeightError,
};
use ostinato::quant::table::TableType;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// A case of `formats.json` and its tensors.
struct Case<'a> {
    json: &'a Value,
    name: &'a str,
    /// The tensors by the ends of their names.
    tensors: BTreeMap<String, (TensorDtype, Vec<u64>, &'a [u8])>,
}

impl<'a> Case<'a> {
    fn number(&self, key: &str) -> Option<u32> {
        self.json[key].as_u64().map(|n| n as u32)
    }

    fn find(&'a self, part: &str) -> Option<Tensor<'a>> {
        let (dtype, shape, bytes) = self.tensors.get(part)?;
        Some(Tensor { name: self.name, dtype: *dtype, shape, bytes: Some(bytes) })
    }

    fn tensor(&'a self, part: &str) -> Tensor<'a> {
        self.find(part).unwrap_or_else(|| panic!("{} has no {part}", self.name))
    }

    fn bytes(&self, part: &str) -> &'a [u8] {
        self.tensors.get(part).unwrap_or_else(|| panic!("{} has no {part}", self.name)).2
    }

    fn size(&self) -> [u64; 2] {
        ["rows", "cols"].map(|key| self.json[key].as_u64().expect("a size"))
    }

    /// The numbers, the elements of a block, and how scales are read that are quantised themselves.
    fn table(&self) -> (TableType, u32, Option<NestedStorage>) {
        let name = self.json["table"].as_str().expect("a table");
        let table = TableType::ALL.into_iter().find(|table| table.name() == name).expect("a known table");
        let offset_bits = self.json["offset"].as_f64().map_or(0, |offset| (offset as f32).to_bits());
        let nested = self.number("nested_block").map(|block| NestedStorage { block, offset_bits });
        (table, self.number("block").expect("a block"), nested)
    }

    fn group(&self) -> ScaleShape {
        self.number("group").map_or(ScaleShape::Row, ScaleShape::Group)
    }

    fn open(&'a self) -> Result<CodeMatrix<'a>, WeightError> {
        let (bits, group) = (self.number("bits").unwrap_or(0), self.number("group"));
        match self.json["format"].as_str().expect("a format") {
            "fp8" => {
                let scale_shape = match self.json["scale"].as_str().expect("a shape") {
                    "tensor" => ScaleShape::Tensor,
                    "block" => {
                        let side = |i: usize| self.json["block"][i].as_u64().expect("a size") as u32;
                        ScaleShape::Block { rows: side(0), cols: side(1) }
                    }
                    _ => self.group(),
                };
                Fp8 { weight: self.tensor("weight"), scale: self.tensor("scale"), scale_shape }.open()
            }
            "packed" => PackedInts {
                packed: self.tensor("packed"),
                scale: self.tensor("scale"),
                scale_shape: self.group(),
                zero_point: self.find("zero_point"),
                g_idx: self.find("g_idx"),
                shape: self.size(),
                bits,
            }
            .open(),
            "int8" => Int8 {
                weight: self.tensor("weight"),
                scale: self.tensor("scale"),
                scale_shape: self.group(),
                zero_point: self.find("zero_point"),
                largest: false,
            }
            .open(),
            "int8-largest" => Int8 {
                weight: self.tensor("weight"),
                scale: self.tensor("scale"),
                scale_shape: ScaleShape::Row,
                zero_point: None,
                largest: true,
            }
            .open(),
            "table" => {
                let (table, block, nested) = self.table();
                let nested = nested.map(|NestedStorage { block, offset_bits }| Nested {
                    numbers: self.tensor("scale_numbers"),
                    largest: self.tensor("scale_of_scales"),
                    block,
                    offset: f32::from_bits(offset_bits),
                });
                let (packed, largest) = (self.tensor("weight"), self.tensor("scale"));
                TableCodes { packed, largest, nested, table, block, shape: self.size() }.open()
            }
            "nvfp4" => Nvfp4 {
                packed: self.tensor("packed"),
                scale: self.tensor("scale"),
                global: self.tensor("global"),
                global_divides: self.json["divides"].as_bool().expect("a flag"),
            }
            .open(),
            "mxfp4" => Mxfp4 { packed: self.tensor("packed"), scale: self.tensor("scale") }.open(),
            "gptq" => Gptq {
                qweight: self.tensor("qweight"),
                qzeros: self.tensor("qzeros"),
                scales: self.tensor("scales"),
                g_idx: self.find("g_idx"),
                bits,
                group,
                symmetric: self.json["symmetric"].as_bool().expect("a flag"),
                version: if self.number("version") == Some(1) { GptqVersion::V1 } else { GptqVersion::V2 },
            }
            .open(),
            "awq" => Awq {
                qweight: self.tensor("qweight"),
                qzeros: self.find("qzeros"),
                scales: self.tensor("scales"),
                group,
            }
            .open(),
            other => panic!("format {other}"),
        }
    }
}

impl Case<'_> {
    /// The description of the case's weight, and the bytes of its tensors.
    fn description(&self) -> (Description, Vec<&[u8]>) {
        let (bits, group) = (self.number("bits").unwrap_or(0), self.number("group"));
        let storage = match self.json["format"].as_str().expect("a format") {
            "fp8" => Storage::Fp8 {
                scale_shape: match (self.json["scale"].as_str(), &self.json["block"]) {
                    (Some("tensor"), _) => ScaleShape::Tensor,
                    (Some("block"), block) => {
                        let side = |i: usize| block[i].as_u64().expect("a size") as u32;
                        ScaleShape::Block { rows: side(0), cols: side(1) }
                    }
                    _ => self.group(),
                },
            },
            "packed" => Storage::PackedInts { bits, scale_shape: self.group(), shape: self.size() },
            "int8-largest" => Storage::Int8 { scale_shape: ScaleShape::Row, largest: true },
            "table" => {
                let (table, block, nested) = self.table();
                Storage::Table { table, block, shape: self.size(), nested }
            }
            "int8" => Storage::Int8 { scale_shape: self.group(), largest: false },
            "nvfp4" => Storage::Nvfp4 { global_divides: self.json["divides"].as_bool().expect("a flag") },
            "mxfp4" => Storage::Mxfp4,
            "gptq" => Storage::Gptq {
                bits,
                group,
                symmetric: self.json["symmetric"].as_bool().expect("a flag"),
                version: if self.number("version") == Some(1) { GptqVersion::V1 } else { GptqVersion::V2 },
            },
            "awq" => Storage::Awq { group },
            other => panic!("format {other}"),
        };
        let roles = [
            (TensorRole::Codes, &["weight", "packed", "qweight"][..]),
            (TensorRole::Scale, &["scale", "scales"]),
            (TensorRole::Zero, &["zero_point", "qzeros"]),
            (TensorRole::GroupIndex, &["g_idx"]),
            (TensorRole::Global, &["global"]),
            (TensorRole::ScaleNumbers, &["scale_numbers"]),
            (TensorRole::ScaleOfScales, &["scale_of_scales"]),
        ];
        let (mut tensors, mut bytes) = (Vec::new(), Vec::new());
        for (role, names) in roles {
            let Some((dtype, shape, data)) = names.iter().find_map(|name| self.tensors.get(*name)) else { continue };
            tensors.push(TensorHead { role, name: self.name.to_owned(), dtype: *dtype, shape: shape.clone() });
            bytes.push(*data);
        }
        (Description { storage, tensors }, bytes)
    }

    /// Parts of the weight, made of the bytes that they need, have the values that the whole one has.
    fn compare_parts(&self, wanted: &[f32]) {
        let (description, bytes) = self.description();
        let (rows, cols) = (self.number("rows").expect("rows"), self.number("cols").expect("columns") as usize);
        for (start, end) in [(0, 1), (0, rows), (rows - 1, rows), (rows / 3, rows / 2 + 1), (rows - 3, rows - 2)] {
            let part = description.part(start..end).unwrap_or_else(|e| panic!("{}: {e}", self.name));
            let held: Vec<Vec<u8>> = bytes
                .iter()
                .zip(&part.tensors)
                .map(|(bytes, runs)| {
                    let begins = (0..runs.count).map(|i| (runs.first + i * runs.stride) as usize);
                    begins.flat_map(|begin| bytes[begin..begin + runs.bytes as usize].to_vec()).collect()
                })
                .collect();
            let held: Vec<&[u8]> = held.iter().map(Vec::as_slice).collect();
            let matrix = part.description.open(&held).unwrap_or_else(|e| panic!("{} {start}..{end}: {e}", self.name));
            let (first, last) = (part.first, part.first + matrix.rows());
            assert!(first <= start && end <= last && last <= rows, "{}: {first} to {last}", self.name);
            let found = values(&matrix).unwrap_or_else(|e| panic!("{}: {e}", self.name));
            let wanted = &wanted[first as usize * cols..last as usize * cols];
            assert!(found.iter().zip(wanted).all(|(a, b)| a + 0.0 == *b), "{} {start}..{end}", self.name);
            assert_eq!(found.len(), wanted.len());
        }
    }
}

/// The values of a matrix, with its columns in the checkpoint's order.
fn values(matrix: &CodeMatrix<'_>) -> Result<Vec<f32>, WeightError> {
    let (cols, groups) = (matrix.cols() as usize, matrix.groups());
    let (mut codes, mut scales, mut minimums) = (vec![0; cols], vec![0.0; groups], vec![0.0; groups]);
    let (mut line, mut all) = (vec![0.0; cols], Vec::new());
    for row in 0..matrix.rows() {
        matrix.decode(row, 1, &mut codes, &mut scales, &mut minimums)?;
        matrix.codes().dequantize(&codes, &scales, &minimums, &mut line);
        let begin = all.len();
        all.extend(&line);
        for (value, col) in line.iter().zip(matrix.order().into_iter().flatten()) {
            all[begin + *col as usize] = *value;
        }
    }
    Ok(all)
}

/// Calls `check` with each case of a fixture, and returns their number.
fn each_case(fixture_name: &str, check: impl Fn(&Case<'_>)) -> usize {
    let file = fixture(&format!("{fixture_name}.safetensors"));
    let file = SafeTensors::deserialize(&file).expect("the fixture");
    let cases: Value = serde_json::from_slice(&fixture(&format!("{fixture_name}.json"))).expect("JSON");
    let cases = cases.as_array().expect("a list");
    for json in cases {
        let name = json["name"].as_str().expect("a name");
        let mut tensors = BTreeMap::new();
        for (full, view) in file.iter() {
            let Some(part) = full.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')) else { continue };
            let dtype = match view.dtype() {
                Dtype::F32 => TensorDtype::F32,
                Dtype::F16 => TensorDtype::F16,
                Dtype::BF16 => TensorDtype::Bf16,
                Dtype::F8_E4M3 => TensorDtype::E4m3,
                Dtype::F8_E5M2 => TensorDtype::E5m2,
                Dtype::U8 => TensorDtype::U8,
                Dtype::I8 => TensorDtype::I8,
                Dtype::I32 => TensorDtype::I32,
                other => panic!("{full} is of {other:?}"),
            };
            let shape: Vec<u64> = view.shape().iter().map(|n| *n as u64).collect();
            tensors.insert(part.to_owned(), (dtype, shape, view.data()));
        }
        check(&Case { json, name, tensors });
    }
    cases.len()
}

#[test]
fn matrices_of_every_safetensors_format_have_the_values_of_other_software() {
    let count = each_case("quant/formats", |case| {
        let name = case.name;
        let matrix = case.open().unwrap_or_else(|e| panic!("{name}: {e}"));
        let size = [matrix.rows(), matrix.cols()];
        assert_eq!(size.map(Some), ["rows", "cols"].map(|key| case.number(key)), "{name}");
        // Both zeros are 0 in the fixture.
        let values: Vec<f32> =
            values(&matrix).unwrap_or_else(|e| panic!("{name}: {e}")).iter().map(|v| v + 0.0).collect();
        let wanted = floats(case.bytes("first"));
        let wrong = (0..wanted.len()).find(|col| wanted[*col].to_bits() != values[*col].to_bits());
        assert_eq!(wrong.map(|col| (col, wanted[col], values[col])), None, "{name}, row 0: column, wanted, found");
        let digests = case.bytes("digests").chunks_exact(8);
        assert_eq!(digests.len(), size[0] as usize, "{name}");
        for (row, (values, digest)) in values.chunks_exact(size[1] as usize).zip(digests).enumerate() {
            assert_eq!(&Sha256::digest(bytes(values))[..8], digest, "{name}, row {row}: {values:?}");
        }
        case.compare_parts(&values);
    });
    assert!(count > 30, "only {count} cases");
}

/// Goal: weights of bitsandbytes have the library's values. Method: matrices that it quantised, and its own dequantisation of
/// them in f16. FP4 and 8 bits are exact; NF4 is off by at most 0.0039 of the largest value of a block, and hardly on average.
#[test]
fn matrices_of_bitsandbytes_have_the_values_of_the_library() {
    let count = each_case("quant/table", |case| {
        let name = case.name;
        let matrix = case.open().unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!([matrix.rows(), matrix.cols()].map(u64::from), case.size(), "{name}");
        let found = values(&matrix).unwrap_or_else(|e| panic!("{name}: {e}"));
        let wanted = tensor_values(TensorType::F16, case.bytes("values"));
        assert_eq!(found.len(), wanted.len(), "{name}");
        let is_nf4 = case.json["table"] == "nf4";
        let block = case.number("block").unwrap_or(matrix.cols()) as usize;
        let (mut error, mut size) = (0.0, 0.0);
        for (index, (found, wanted)) in found.chunks(block).zip(wanted.chunks(block)).enumerate() {
            let most = wanted.iter().fold(0f32, |most, x| most.max(x.abs()));
            let limit = most * if is_nf4 { 0.0039 } else { 0.0 };
            for (at, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                // The library's values were rounded to f16.
                let rounding = wanted.abs() / 2048.0 + 6e-8;
                let apart = (found - wanted).abs();
                assert!(apart <= limit + rounding, "{name}, block {index}, element {at}: {found}, wanted {wanted}");
                error += f64::from(apart).powi(2);
                size += f64::from(*wanted).powi(2);
            }
        }
        let apart = (error / size).sqrt();
        println!("{name}: {apart:.1e} of the values' size");
        assert!(apart < if is_nf4 { 7e-3 } else { 3e-4 }, "{name}: {apart:e}");
        case.compare_parts(&found);
    });
    assert_eq!(count, 9);
}

/// The results of llama.cpp with the demo model.
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
    hex(&sha.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The values of a tensor of a GGUF file, in the order of the file.
fn tensor_values(kind: TensorType, bytes: &[u8]) -> Vec<f32> {
    match kind {
        TensorType::F32 => floats(bytes),
        TensorType::F16 => bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
        TensorType::BF16 => bytes.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
        TensorType::Blocks(blocks) => {
            let mut values = vec![0.0; bytes.len() / blocks.bytes() * blocks.elements()];
            blocks.dequantize(bytes, &mut values);
            values
        }
    }
}

#[test]
fn pythons_gguf_reads_every_type_of_file_with_the_same_values() {
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = folder.path().join("checkpoint");
    // Rows of whole blocks of every type.
    let config = std::fs::read_to_string(path("tests/fixtures/qwen3-deep/config.json")).expect("the configuration");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    for (key, value) in [("hidden_size", 256), ("intermediate_size", 256), ("num_hidden_layers", 2)] {
        config[key] = value.into();
    }
    synth::write(&config.to_string(), &checkpoint, &SynthOptions::default(), &mut |_, _| {}).expect("written");
    let (mut files, mut wanted) = (Vec::new(), BTreeSet::new());
    // Also a file with a tokenizer.
    let kinds = FileType::known().into_iter().map(|kind| (kind, checkpoint.clone()));
    for (kind, from) in kinds.chain([("Q4_K_M", path("demo/model"))]) {
        let file = folder.path().join(format!("{}-{kind}.gguf", files.len()));
        convert(&from, &file, FileType::from_name(kind).expect("a type"), 2).expect("converted");
        let (model, _) = gguf::open(&file).expect("a model");
        let data = std::fs::read(&file).expect("the file");
        for info in &model.parts.files[0].header.tensors {
            let dims = info.dims.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            let values = tensor_values(info.kind, &data[info.offset as usize..][..info.bytes as usize]);
            let values: Vec<f32> = values.iter().map(|value| value + 0.0).collect();
            let digest = hex(&Sha256::digest(bytes(&values)));
            wanted.insert(format!("{} {} {} {dims} {digest}", file.display(), info.name, info.kind));
        }
        files.push(file);
    }
    let output =
        Command::new(python()).arg(path("tests/python/gguf_values.py")).args(&files).output().expect("it runs");
    let [said, problem] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("text"));
    assert!(output.status.success(), "{problem}");
    let found: BTreeSet<String> = said.lines().map(str::to_owned).collect();
    assert_eq!(found.symmetric_difference(&wanted).collect::<Vec<_>>(), Vec::<&String>::new());
    // Every type but NVFP4, which is not written.
    assert_eq!(files.len(), TensorType::all().count() - 1 + 7 + 1);
}

#[test]
fn a_converted_file_holds_the_tensors_that_llama_cpps_converter_writes() {
    let story = story();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("demo.gguf");
    convert(&path("demo/model"), &file, FileType::from_name("BF16").expect("a type"), 2).expect("converted");
    assert_eq!(digest(&file), story["files"]["BF16"]["digest"]);
    // The file that the tests of whole models use. A mixture gives its tensors the same types; the codes are our own.
    let theirs = path("tests/fixtures/llama.cpp/demo-Q4_K_M.gguf");
    assert_eq!(digest(&theirs), story["files"]["Q4_K_M"]["digest"]);
    convert(&path("demo/model"), &file, FileType::from_name("Q4_K_M").expect("a type"), 2).expect("converted");
    let types = |file: &Path| -> BTreeMap<String, TensorType> {
        let (model, _) = gguf::open(file).expect("a model");
        model.parts.files[0].header.tensors.iter().map(|info| (info.name.clone(), info.kind)).collect()
    };
    assert_eq!(types(&file), types(&theirs));
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
