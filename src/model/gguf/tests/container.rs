//! The container: round trips, and every rule that a header can break.

use super::super::container::{
    Array, ContainerError, Header, MAX_HEADER_BYTES, MAX_PAIRS, MAX_TENSORS, TensorType, Value,
};
use super::{File, text};
use crate::quant::blocks::BlockType;

fn parse(file: &File) -> Result<Header, ContainerError> {
    let bytes = file.bytes();
    Header::parse(&bytes, bytes.len() as u64)
}

fn refused(file: &File) -> String {
    parse(file).expect_err("it is refused").to_string()
}

#[test]
fn every_kind_of_value_comes_back() {
    let arrays = [
        Array::U8(vec![0, 255]),
        Array::I8(vec![-128, 127]),
        Array::U16(vec![65_535]),
        Array::I16(vec![-32_768]),
        Array::U32(vec![u32::MAX]),
        Array::I32(vec![i32::MIN; 40_000]),
        Array::U64(vec![u64::MAX]),
        Array::I64(vec![i64::MIN]),
        Array::F32(vec![0.1, f32::INFINITY]),
        Array::F64(vec![0.1]),
        Array::Bool(vec![true, false]),
        Array::String(vec![String::new(), "ä".repeat(100_000)]),
        Array::U32(Vec::new()),
    ];
    let values = [
        Value::U8(255),
        Value::I8(-1),
        Value::U16(65_535),
        Value::I16(-1),
        Value::U32(u32::MAX),
        Value::I32(-1),
        Value::F32(1e-6),
        Value::Bool(true),
        text("Grüße"),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F64(1e300),
    ];
    for version in [2, 3] {
        let mut file = File { version, ..File::new() };
        for value in values.iter().cloned().chain(arrays.iter().cloned().map(Value::Array)) {
            let key = format!("key {}", file.pairs.len());
            file = file.pair(&key, value);
        }
        let header = parse(&file).unwrap();
        assert_eq!(header.version, version);
        assert_eq!(header.metadata.len(), file.pairs.len());
        for (key, value) in &file.pairs {
            assert_eq!(header.get(key), Some(value));
        }
    }
    assert_eq!(Value::F32(1e-6).number(), Some(1e-6));
    assert_eq!(Value::I8(-1).unsigned(), None);
}

#[test]
fn every_type_has_its_size_and_place() {
    let mut file = File::new().pair("general.alignment", Value::U32(64));
    file.alignment = 64;
    for kind in TensorType::all() {
        assert_eq!(TensorType::of(kind.id()), Ok(kind));
        file = file.tensor(kind.name(), &[kind.block_elements() * 2, 3, 2], kind);
    }
    let header = parse(&file).unwrap();
    assert_eq!(header.tensors.len(), 22);
    assert_eq!(header.data_start % 64, 0);
    for (tensor, written) in header.tensors.iter().zip(&file.tensors) {
        assert_eq!((tensor.rows(), tensor.row_bytes()), (6, 2 * tensor.kind.block_bytes()));
        assert_eq!((tensor.offset, tensor.bytes), (header.data_start + written.offset, 12 * tensor.kind.block_bytes()));
        assert_eq!(header.tensor(&tensor.name), Some(tensor));
    }
    let sizes: Vec<(u64, u64)> = TensorType::all().map(|kind| (kind.block_elements(), kind.block_bytes())).collect();
    assert_eq!(sizes.iter().map(|size| size.1).sum::<u64>(), 1487);
    // A reader that has more than the header takes no more than the header.
    let (bytes, header_bytes) = (file.bytes(), file.header());
    let mut rest = &bytes[..];
    Header::read(&mut rest, bytes.len() as u64).unwrap();
    assert_eq!(rest.len(), bytes.len() - header_bytes.len());
}

#[test]
fn the_beginning_names_what_it_is() {
    let header = |bytes: &[u8]| Header::parse(bytes, bytes.len() as u64).unwrap_err().to_string();
    assert_eq!(header(b"GGML\x03\0\0\0"), "it begins with the bytes [47, 47, 4d, 4c], a GGUF file with 47 47 55 46");
    for version in [0, 1, 4, 0xffff] {
        let error = refused(&File { version, ..File::new() });
        match version {
            0 => assert_eq!(error, "it is big-endian (version 0x00000000), only little-endian files are supported"),
            _ => assert_eq!(error, format!("it is GGUF version {version}, supported are 2 and 3")),
        }
    }
    let error = refused(&File { version: 3 << 24, ..File::new() });
    assert_eq!(error, "it is big-endian (version 0x03000000), only little-endian files are supported");
    assert_eq!(header(b"GG"), "it is truncated: the magic number ends at byte 4, the file has 2 bytes");
}

#[test]
fn counts_and_lengths_have_limits() {
    let head = |tensors: u64, pairs: u64, rest: &[u8]| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(pairs.to_le_bytes());
        bytes.extend(rest);
        // The file claims to be large, so that only the parser's own limits apply.
        Header::parse(&bytes, 1 << 50).unwrap_err().to_string()
    };
    assert_eq!(head(MAX_TENSORS + 1, 0, b""), "the number of tensors is 1048577, at most 1048576 are supported");
    assert_eq!(head(0, 1_000_000, b""), "the number of metadata pairs is 1000000, at most 65536 are supported");
    assert_eq!(
        head(0, u64::MAX, b""),
        "the number of metadata pairs is 18446744073709551615, at most 65536 are supported"
    );
    let key = |length: u64| length.to_le_bytes();
    assert_eq!(
        head(0, 1, &key(1 << 62)),
        "the length of the metadata key 0 is 4611686018427387904, at most 65535 are supported"
    );
    let value = |id: u32, rest: &[&[u8]]| {
        let mut bytes = key(1).to_vec();
        bytes.push(b'k');
        bytes.extend(id.to_le_bytes());
        bytes.extend(rest.concat());
        head(0, 1, &bytes)
    };
    let most = MAX_HEADER_BYTES;
    assert!(value(8, &[&u64::MAX.to_le_bytes()]).starts_with("it is truncated: k ends at byte 18446744073709551615"));
    assert!(value(8, &[&most.to_le_bytes()]).ends_with(&format!("a header may have {most} bytes")));
    for id in [0u32, 4, 8, 10, 12] {
        // A list that is longer than any file, and one that fits in the file but not in a header.
        let list = |count: u64| value(9, &[&id.to_le_bytes(), &count.to_le_bytes()]);
        assert!(list(u64::MAX / 2).starts_with("it is truncated: k ends at byte"), "{id}");
        assert!(list(most).ends_with(&format!("a header may have {most} bytes")), "{id}");
        // One that fits in a header, but that the bytes do not hold.
        assert!(list(1000).starts_with("it is truncated: k"), "{id}");
    }
    assert_eq!(value(13, &[]), "the metadata key k has a value of type 13");
    let nested = value(9, &[&9u32.to_le_bytes(), &1u64.to_le_bytes()]);
    assert_eq!(nested, "the metadata key k has a value of type 9 as an element of a list");
    assert_eq!(value(7, &[&[2]]), "k is a truth value of 2, must be 0 or 1");
    assert_eq!(value(8, &[&1u64.to_le_bytes(), &[0xff]]), "k is not UTF-8");
}

#[test]
fn keys_and_names_are_unique() {
    let twice = File::new().pair("a", Value::U8(1)).pair("a", Value::U8(2));
    assert_eq!(refused(&twice), "the metadata key \"a\" occurs twice or is empty");
    assert_eq!(refused(&File::new().pair("", Value::U8(1))), "the metadata key \"\" occurs twice or is empty");
    let file = File::new().tensor("t", &[1], TensorType::F32).tensor("t", &[1], TensorType::F32);
    assert_eq!(refused(&file), "the tensor name \"t\" occurs twice or is empty");
    assert!(parse(&File::new().tensor(&"n".repeat(63), &[1], TensorType::F32)).is_ok());
    let long = refused(&File::new().tensor(&"n".repeat(64), &[1], TensorType::F32));
    assert_eq!(long, "the length of the name of tensor 0 is 64, at most 63 are supported");
}

#[test]
fn tensors_must_have_possible_shapes_and_types() {
    let with = |dims: &[u64], kind: u32| {
        let mut file = File::new().tensor("t", &[32], TensorType::Blocks(BlockType::Q4_0));
        (file.tensors[0].dims, file.tensors[0].kind) = (dims.to_owned(), kind);
        file
    };
    let rule = "must have 1 to 4 of at least 1 each";
    assert_eq!(refused(&with(&[], 0)), format!("tensor t has the dimensions [0], {rule}"));
    assert_eq!(refused(&with(&[1; 5], 0)), format!("tensor t has the dimensions [5], {rule}"));
    assert_eq!(refused(&with(&[4, 0], 0)), format!("tensor t has the dimensions [4, 0], {rule}"));
    assert_eq!(refused(&with(&[40], 2)), "tensor t has rows of 40 elements, Q4_0 stores blocks of 32");
    assert_eq!(refused(&with(&[128, 2], 12)), "tensor t has rows of 128 elements, Q4_K stores blocks of 256");
    for (id, name) in [
        (19, "IQ1_S"),
        (29, "IQ1_M"),
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (41, "Q1_0"),
        (42, "Q2_0"),
        (26, "I32"),
        (28, "F64"),
    ] {
        assert_eq!(refused(&with(&[32], id)), format!("tensor t has the type {name}, which is not supported"));
    }
    assert_eq!(refused(&with(&[32], 99)), "tensor t has the type type 99, which is not supported");
    for dims in [&[1 << 63][..], &[u64::MAX, 2], &[1 << 32, 1 << 32], &[1 << 61, 4], &[1 << 20, 1 << 20, 1 << 22]] {
        assert!(refused(&with(dims, 0)).ends_with("whose product is too large"), "{dims:?}");
    }
    // 2^62 elements of half a byte: the size in bytes fits, but not in the file.
    let error = refused(&with(&[1 << 62], 2));
    assert!(error.starts_with("tensor t ends at byte 2594073385365405"), "{error}");
}

#[test]
fn the_data_lies_in_the_file_without_overlap() {
    let file = File::new().tensor("a", &[3], TensorType::F32).tensor("b", &[8], TensorType::F32);
    assert_eq!(parse(&file).unwrap().tensors[1].offset % 32, 0);
    let moved = |index: usize, offset: u64| {
        let bytes = file.bytes();
        let mut file = file.clone();
        file.tensors[index].offset = offset;
        Header::parse(&[file.header(), vec![0; 200]].concat(), bytes.len() as u64)
    };
    assert_eq!(moved(1, 16).unwrap_err().to_string(), "tensor b begins at offset 16, must be a multiple of 32");
    assert_eq!(moved(1, 0).unwrap_err().to_string(), "tensor a ends at byte 108, tensor b begins at byte 96");
    assert_eq!(moved(1, 64).unwrap_err().to_string(), "tensor b ends at byte 192, the file has 160 bytes");
    for offset in [1 << 62, u64::MAX - 31] {
        assert!(moved(1, offset).unwrap_err().to_string().starts_with("tensor b ends at byte"), "{offset}");
    }
    // The order of the data need not be that of the descriptions.
    let mut swapped = file.clone();
    (swapped.tensors[0].offset, swapped.tensors[1].offset) = (32, 0);
    let bytes = [swapped.header(), vec![0; 200]].concat();
    assert!(Header::parse(&bytes, bytes.len() as u64).is_ok());
}

#[test]
fn the_alignment_is_a_power_of_two() {
    for good in [1, 8, 32, 1 << 20] {
        let file = File { alignment: good, ..File::new() }.pair("general.alignment", Value::U32(good as u32));
        let header = parse(&file.tensor("t", &[1], TensorType::F32)).unwrap();
        assert_eq!((header.alignment, header.data_start % good), (good, 0));
    }
    for bad in [Value::U32(0), Value::U32(24), Value::U32(1 << 21), Value::U64(32), text("32")] {
        let error = refused(&File::new().pair("general.alignment", bad.clone()));
        assert!(error.starts_with(&format!("general.alignment is {bad}, must be a power of two")), "{error}");
    }
}

#[test]
fn a_file_of_many_pairs_is_read() {
    let mut file = File::new();
    for index in 0..MAX_PAIRS {
        file = file.pair(&index.to_string(), Value::U8(0));
    }
    assert_eq!(parse(&file).unwrap().metadata.len() as u64, MAX_PAIRS);
    let error = refused(&file.pair("one more", Value::U8(0)));
    assert_eq!(error, "the number of metadata pairs is 65537, at most 65536 are supported");
}
