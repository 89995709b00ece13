//! The compiled shaders and what was read off them: written by the build, see
//! `build/shaders.rs`. Deliberately absent: pipelines.

use super::recording::{Access, Arg, Range};

/// A compiled variant.
#[derive(Debug)]
pub struct Shader {
    /// For example `gemv.bf16`.
    pub name: &'static str,
    /// The file it was compiled from.
    pub source: &'static str,
    /// SPIR-V, little-endian words.
    pub spirv: &'static [u8],
    /// Size of the argument block.
    pub push_bytes: u32,
    /// The argument block's fields in order.
    pub fields: &'static [ArgField],
    /// Specialization constants: id and name.
    pub constants: &'static [(u32, &'static str)],
    /// Multiplies cooperative matrices: subgroups of 32, all full.
    pub matrices: bool,
}

impl Shader {
    /// The SPIR-V as words.
    pub fn words(&self) -> Vec<u32> {
        self.spirv.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

/// A field of an argument block.
#[derive(Debug)]
pub struct ArgField {
    /// As in the shader.
    pub name: &'static str,
    /// Byte offset in the block.
    pub offset: u32,
    /// 8 for an address, 4 for a value.
    pub bytes: u32,
}

/// The shader of a name.
///
/// # Panics
/// If there is none: names come from code, not from users.
pub fn find(name: &str) -> &'static Shader {
    match SHADERS.binary_search_by(|s| s.name.cmp(name)) {
        Ok(index) => &SHADERS[index],
        Err(_) => panic!("no shader is called \"{name}\""),
    }
}

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shader_is_found_by_name_and_fits_every_driver() {
        for shader in SHADERS {
            assert_eq!(find(shader.name).name, shader.name);
            assert!(shader.push_bytes <= 128, "{} needs {} bytes", shader.name, shader.push_bytes);
            assert_eq!(shader.words()[0], 0x0723_0203, "{} is no SPIR-V", shader.name);
        }
    }
}
