//! Goal: quantised weights have the values that other software gives them, bit for bit. Method: blocks and tensors in
//! `tests/fixtures/quant`, whose values were computed by the Python packages that its scripts name.

use ostinato::quant::blocks::BlockType;
use ostinato::quant::number::Number;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use sha2::{Digest, Sha256};
use std::path::PathBuf;

fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/quant").join(name);
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
    let file = fixture("blocks.safetensors");
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
