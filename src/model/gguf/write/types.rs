//! The element type of each tensor of a file, by the file's type: one type for all matrices, or one of llama.cpp's
//! mixtures, which spend more bits on tensors that lose much by few.

use super::super::container::TensorType;
use super::WriteError;
use crate::quant::blocks::BlockType;

/// The type of a file: how the types of its tensors are chosen. Vectors, norms, routers and convolutions are always
/// F32, and a matrix whose rows are no whole blocks of its type takes one with smaller blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum FileType {
    /// All matrices have this type, the embedding and the head as well.
    One(TensorType),
    /// Q3_K, the head Q6_K.
    Q3_K_S,
    /// Q3_K, values and down projections Q4_K, some Q5_K, attention outputs Q4_K, the head Q6_K.
    Q3_K_M,
    /// Q3_K, values, down projections and attention outputs Q5_K, the head Q6_K.
    Q3_K_L,
    /// Q4_K, values and down projections of the first layers Q5_K, the head Q6_K.
    Q4_K_S,
    /// Q4_K, values and down projections of half of the layers Q6_K, the head Q6_K.
    Q4_K_M,
    /// Q5_K, the head Q6_K.
    Q5_K_S,
    /// Q5_K, values and down projections of half of the layers Q6_K, the head Q6_K.
    Q5_K_M,
}

use FileType::*;

impl FileType {
    const MIXTURES: [(FileType, &'static str, TensorType, u32); 7] = [
        (Q3_K_S, "Q3_K_S", TensorType::Blocks(BlockType::Q3_K), 11),
        (Q3_K_M, "Q3_K_M", TensorType::Blocks(BlockType::Q3_K), 12),
        (Q3_K_L, "Q3_K_L", TensorType::Blocks(BlockType::Q3_K), 13),
        (Q4_K_S, "Q4_K_S", TensorType::Blocks(BlockType::Q4_K), 14),
        (Q4_K_M, "Q4_K_M", TensorType::Blocks(BlockType::Q4_K), 15),
        (Q5_K_S, "Q5_K_S", TensorType::Blocks(BlockType::Q5_K), 16),
        (Q5_K_M, "Q5_K_M", TensorType::Blocks(BlockType::Q5_K), 17),
    ];

    fn row(self) -> Option<&'static (FileType, &'static str, TensorType, u32)> {
        FileType::MIXTURES.iter().find(|row| row.0 == self)
    }

    /// Returns the types of one element type that can be written.
    fn single() -> impl Iterator<Item = TensorType> {
        // The blocks of NVFP4 need a factor beside the tensor.
        TensorType::all().filter(|kind| *kind != TensorType::Blocks(BlockType::NVFP4))
    }

    /// Returns the names of all file types.
    pub fn known() -> Vec<&'static str> {
        FileType::single().map(TensorType::name).chain(FileType::MIXTURES.iter().map(|row| row.1)).collect()
    }

    /// Returns the file type with this name, in any case: `Q4_K_M`, or the name of an element type, which stands for
    /// that type in all matrices.
    ///
    /// # Errors The name is not known.
    pub fn from_name(name: &str) -> Result<FileType, WriteError> {
        let mixture = FileType::MIXTURES.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0);
        let single = || FileType::single().find(|kind| kind.name().eq_ignore_ascii_case(name)).map(One);
        mixture.or_else(single).ok_or_else(|| WriteError::FileType(name.chars().take(80).collect()))
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            One(kind) => kind.name(),
            mixture => mixture.row().map_or("", |row| row.1),
        }
    }

    /// Returns the type that most matrices have.
    pub fn base(self) -> TensorType {
        match self {
            One(kind) => kind,
            mixture => mixture.row().map_or(TensorType::F32, |row| row.2),
        }
    }

    /// Returns the value of `general.file_type`, which names a mixture also where all matrices have one type.
    pub fn id(self) -> u32 {
        let One(kind) = self else { return self.row().map_or(0, |row| row.3) };
        match kind {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::Blocks(BlockType::Q4_0) => 2,
            TensorType::Blocks(BlockType::Q4_1) => 3,
            TensorType::Blocks(BlockType::Q8_0) => 7,
            TensorType::Blocks(BlockType::Q5_0) => 8,
            TensorType::Blocks(BlockType::Q5_1) => 9,
            TensorType::Blocks(BlockType::Q2_K) => 10,
            TensorType::Blocks(BlockType::Q3_K) => 11,
            TensorType::Blocks(BlockType::Q4_K) => 14,
            TensorType::Blocks(BlockType::Q5_K) => 16,
            TensorType::Blocks(BlockType::Q6_K) => 18,
            TensorType::Blocks(BlockType::IQ2_XXS) => 19,
            TensorType::Blocks(BlockType::IQ2_XS) => 20,
            TensorType::Blocks(BlockType::IQ3_XXS) => 23,
            TensorType::Blocks(BlockType::IQ4_NL) => 25,
            TensorType::Blocks(BlockType::IQ3_S) => 26,
            TensorType::Blocks(BlockType::IQ2_S) => 28,
            TensorType::Blocks(BlockType::IQ4_XS) => 30,
            TensorType::BF16 => 32,
            TensorType::Blocks(BlockType::MXFP4) => 38,
            TensorType::Blocks(BlockType::NVFP4) => 39,
        }
    }
}

/// Returns the type of the tensor `name` of a file: `dims` are its dimensions, the contiguous one first, `layer` the
/// index of its block, if it belongs to one, `layers` the number of all blocks, and `tied` whether the embedding is the
/// head as well, which then has the head's type.
pub fn type_of(
    file_type: FileType,
    name: &str,
    dims: &[u64],
    layer: Option<u64>,
    layers: u64,
    tied: bool,
) -> TensorType {
    let vector = dims.iter().skip(1).all(|n| *n == 1);
    let precise = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d.weight"];
    if vector || !name.ends_with(".weight") || precise.iter().any(|part| name.ends_with(part)) {
        return TensorType::F32;
    }
    let base = file_type.base();
    let kind = match (file_type, layer) {
        (One(kind), _) => kind,
        _ if name == "output.weight" || tied && name == "token_embd.weight" => {
            let whole = dims[0].is_multiple_of(base.block_elements());
            if whole { TensorType::Blocks(BlockType::Q6_K) } else { TensorType::Blocks(BlockType::Q8_0) }
        }
        (_, None) => base,
        (_, Some(layer)) => of_layer(file_type, name, layer, layers),
    };
    fitting(kind, dims[0])
}

/// Returns the type of a layer's matrix in a mixture.
fn of_layer(file_type: FileType, name: &str, layer: u64, layers: u64) -> TensorType {
    let base = file_type.base();
    // A third of the layers in the middle, and an eighth at either end.
    let eighth = layers / 8;
    let more = layer < eighth || layer >= 7 * layers / 8 || (layer.saturating_sub(eighth)) % 3 == 2;
    let is = |part: &str| name.contains(part);
    let values = is(".attn_v.weight") || is(".attn_qkv.weight");
    let (down, output) = (is(".ffn_down"), is(".attn_output.weight"));
    match file_type {
        Q3_K_M if values => {
            if layer < 2 {
                TensorType::Blocks(BlockType::Q5_K)
            } else {
                TensorType::Blocks(BlockType::Q4_K)
            }
        }
        Q3_K_M if down => {
            if layer < layers / 16 {
                TensorType::Blocks(BlockType::Q5_K)
            } else {
                TensorType::Blocks(BlockType::Q4_K)
            }
        }
        Q3_K_M if output => TensorType::Blocks(BlockType::Q4_K),
        Q3_K_L if values || down || output => TensorType::Blocks(BlockType::Q5_K),
        Q4_K_S if values && layer < 4 || down && layer < eighth => TensorType::Blocks(BlockType::Q5_K),
        Q4_K_M | Q5_K_M if (values || down) && more => TensorType::Blocks(BlockType::Q6_K),
        _ => base,
    }
}

/// Returns the type itself, or the one that takes its place where rows of `cols` elements are no whole blocks.
fn fitting(kind: TensorType, cols: u64) -> TensorType {
    use BlockType::*;
    if cols.is_multiple_of(kind.block_elements()) {
        return kind;
    }
    let TensorType::Blocks(blocks) = kind else { return TensorType::F16 };
    let smaller = TensorType::Blocks(match blocks {
        Q2_K | Q3_K => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        other => other,
    });
    if cols.is_multiple_of(smaller.block_elements()) { smaller } else { TensorType::F16 }
}
