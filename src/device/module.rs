//! The requirements of a SPIR-V module on a device: capabilities, the size of workgroups and their shared memory. A
//! driver that is given a module with more than it promised may crash, so a pipeline is refused before. Not here: the
//! other rules of SPIR-V, which the build and the validation layer check.

use crate::device::capabilities::Capabilities;
use ash::vk::SubgroupFeatureFlags as Subgroup;
use std::collections::{BTreeSet, HashMap};

/// A SPIR-V capability that the program knows.
struct Known {
    number: u32,
    name: &'static str,
    /// Whether the device offers it. The features of [`super::features`]' baseline count as offered.
    offered: fn(&Capabilities) -> bool,
}

/// The capabilities that shaders may declare. A shader that declares another one is refused by every device, until
/// an entry here states the requirement that the capability puts on a device.
const KNOWN: [Known; 25] = [
    known(1, "Shader", |_| true),
    known(9, "Float16", |c| c.float16),
    known(11, "Int64", |c| c.int64),
    known(12, "Int64Atomics", |c| c.int64_atomics),
    known(22, "Int16", |c| c.int16),
    known(39, "Int8", |c| c.int8),
    known(61, "GroupNonUniform", |c| c.subgroup_operations.contains(Subgroup::BASIC)),
    known(62, "GroupNonUniformVote", |c| c.subgroup_operations.contains(Subgroup::VOTE)),
    known(63, "GroupNonUniformArithmetic", |c| c.subgroup_operations.contains(Subgroup::ARITHMETIC)),
    known(64, "GroupNonUniformBallot", |c| c.subgroup_operations.contains(Subgroup::BALLOT)),
    known(65, "GroupNonUniformShuffle", |c| c.subgroup_operations.contains(Subgroup::SHUFFLE)),
    known(66, "GroupNonUniformShuffleRelative", |c| c.subgroup_operations.contains(Subgroup::SHUFFLE_RELATIVE)),
    known(67, "GroupNonUniformClustered", |c| c.subgroup_operations.contains(Subgroup::CLUSTERED)),
    known(4433, "StorageBuffer16BitAccess", |c| c.storage_16),
    known(4448, "StorageBuffer8BitAccess", |c| c.storage_8),
    known(4464, "DenormPreserve", |c| c.denorm_preserve_16),
    known(5116, "BFloat16TypeKHR", |c| c.bfloat16),
    known(5118, "BFloat16CooperativeMatrixKHR", |c| c.bfloat16 && c.cooperative_matrix),
    known(5345, "VulkanMemoryModel", |_| true),
    known(5346, "VulkanMemoryModelDeviceScope", |c| c.device_scope),
    known(5347, "PhysicalStorageBufferAddresses", |_| true),
    known(6016, "DotProductInputAll", |c| c.int_dot),
    known(6018, "DotProductInput4x8BitPacked", |c| c.int_dot),
    known(6019, "DotProduct", |c| c.int_dot),
    known(6022, "CooperativeMatrixKHR", |c| c.cooperative_matrix),
];

const fn known(number: u32, name: &'static str, offered: fn(&Capabilities) -> bool) -> Known {
    Known { number, name, offered }
}

/// The capabilities that every path through the kernels needs, whatever the device has besides. A device without one of
/// them is refused before a model is loaded (`probe::lacks`); the further capabilities of single variants, such as
/// shuffles and votes, are checked when their pipelines are built. A test compares this list with the shaders
/// (`gpu::check`).
pub const NEEDED: [(&str, &str); 5] = [
    ("Shader", "compute shaders"),
    ("VulkanMemoryModel", "vulkanMemoryModel"),
    ("PhysicalStorageBufferAddresses", "bufferDeviceAddress"),
    ("GroupNonUniform", "basic subgroup operations in compute shaders"),
    ("GroupNonUniformArithmetic", "subgroup arithmetic in compute shaders"),
];

/// The number of invocations of a workgroup that every path through the kernels needs; Vulkan promises 128.
pub const NEEDED_INVOCATIONS: u32 = 256;

/// The shared memory of a workgroup, in bytes, that every path through the kernels needs; Vulkan promises half of it.
pub const NEEDED_SHARED_BYTES: u32 = 32 << 10;

/// Returns what a device lacks of [`NEEDED`], in words.
pub(super) fn lacking(capabilities: &Capabilities) -> Vec<&'static str> {
    let lacks = |name: &str| !KNOWN.iter().any(|known| known.name == name && (known.offered)(capabilities));
    NEEDED.iter().filter(|(name, _)| lacks(name)).map(|(_, words)| *words).collect()
}

/// The requirements of one module with given specialization constants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// The capabilities that the module declares: the names of known ones, the numbers of others.
    pub capabilities: BTreeSet<String>,
    /// The size of a workgroup in x, y and z.
    pub group: [u32; 3],
    /// The shared memory of a workgroup in bytes, without padding that a driver may add; `None` if a size depends on an
    /// instruction that is not evaluated here.
    pub shared_bytes: Option<u32>,
}

impl Module {
    /// Reads a module. `constants` are the values of the specialization constants with ids from 0 on.
    pub fn read(words: &[u32], constants: &[u32]) -> Module {
        let mut reader = Reader { constants, ..Reader::default() };
        instructions(words).for_each(|(op, operands)| reader.instruction(op, operands));
        let group = reader.group.map(|size| size.and_then(|size| reader.value_of(size)).unwrap_or(1));
        let shared = reader.shared.iter().map(|kind| reader.size(*kind)).sum();
        Module { capabilities: reader.capabilities, group, shared_bytes: shared }
    }

    /// Returns the number of invocations of a workgroup.
    pub fn invocations(&self) -> u32 {
        self.group.iter().product()
    }

    /// Returns the declared capabilities that a device does not offer.
    pub fn lacks(&self, capabilities: &Capabilities) -> Vec<&str> {
        let offered = |name: &str| KNOWN.iter().any(|known| known.name == name && (known.offered)(capabilities));
        self.capabilities.iter().map(String::as_str).filter(|name| !offered(name)).collect()
    }
}

/// The instructions of a module: opcode and operands.
fn instructions(words: &[u32]) -> impl Iterator<Item = (u16, &[u32])> {
    let mut rest = words.get(HEADER_WORDS..).unwrap_or_default();
    std::iter::from_fn(move || {
        let first = *rest.first()?;
        let (instruction, after) = rest.split_at_checked((first >> 16).max(1) as usize)?;
        rest = after;
        Some((first as u16, &instruction[1..]))
    })
}

/// The words before the first instruction.
const HEADER_WORDS: usize = 5;
/// The bytes of a boolean in shared memory.
const BOOL_BYTES: u32 = 4;
/// The storage class of shared memory.
const WORKGROUP: u32 = 4;

/// A type, as far as its size is concerned.
#[derive(Clone, Debug)]
enum Type {
    Bytes(u32),
    /// A number of elements of a type.
    Elements(u32, Count),
    Struct(Vec<u32>),
}

#[derive(Clone, Copy, Debug)]
enum Count {
    Literal(u32),
    Id(u32),
}

/// The size of a workgroup in one dimension.
#[derive(Clone, Copy, Debug)]
enum Size {
    Literal(u32),
    Id(u32),
}

#[derive(Default)]
struct Reader<'a> {
    constants: &'a [u32],
    capabilities: BTreeSet<String>,
    /// The specialization ids, by result id.
    spec_ids: HashMap<u32, u32>,
    /// The values of constants, by result id.
    values: HashMap<u32, u32>,
    /// The members of composite constants, by result id.
    composites: HashMap<u32, Vec<u32>>,
    types: HashMap<u32, Type>,
    /// The types that pointers to shared memory point to, by the pointer type's id.
    pointees: HashMap<u32, u32>,
    /// The types of the variables in shared memory.
    shared: Vec<u32>,
    group: [Option<Size>; 3],
    /// The constant that the built-in `WorkgroupSize` names.
    group_constant: Option<u32>,
}

impl Reader<'_> {
    fn instruction(&mut self, op: u16, operands: &[u32]) {
        match (op, operands) {
            // OpCapability
            (17, [number, ..]) => {
                let name = KNOWN.iter().find(|known| known.number == *number).map(|known| known.name.to_owned());
                self.capabilities.insert(name.unwrap_or_else(|| number.to_string()));
            }
            // OpExecutionMode LocalSize, OpExecutionModeId LocalSizeId
            (16, [_, 17, x, y, z]) => self.group = [*x, *y, *z].map(|size| Some(Size::Literal(size))),
            (331, [_, 38, x, y, z]) => self.group = [*x, *y, *z].map(|size| Some(Size::Id(size))),
            // OpDecorate SpecId, OpDecorate BuiltIn WorkgroupSize
            (71, [id, 1, number, ..]) => {
                self.spec_ids.insert(*id, *number);
            }
            (71, [id, 11, 25, ..]) => self.group_constant = Some(*id),
            // OpTypeBool, OpTypeInt and OpTypeFloat
            (20, [id, ..]) => {
                self.types.insert(*id, Type::Bytes(BOOL_BYTES));
            }
            (21 | 22, [id, bits, ..]) => {
                self.types.insert(*id, Type::Bytes(bits / 8));
            }
            // OpTypeVector and OpTypeMatrix, OpTypeArray, OpTypeStruct
            (23 | 24, [id, of, count, ..]) => {
                self.types.insert(*id, Type::Elements(*of, Count::Literal(*count)));
            }
            (28, [id, of, count, ..]) => {
                self.types.insert(*id, Type::Elements(*of, Count::Id(*count)));
            }
            (30, [id, members @ ..]) => {
                self.types.insert(*id, Type::Struct(members.to_vec()));
            }
            // OpTypePointer, OpVariable
            (32, [id, WORKGROUP, of, ..]) => {
                self.pointees.insert(*id, *of);
            }
            (59, [pointer, _, WORKGROUP, ..]) => self.shared.extend(self.pointees.get(pointer)),
            _ => self.constant(op, operands),
        }
    }

    fn constant(&mut self, op: u16, operands: &[u32]) {
        let value = match (op, operands) {
            // OpConstantTrue, OpConstantFalse, OpConstant
            (41, [_, id, ..]) => Some((*id, 1)),
            (42, [_, id, ..]) => Some((*id, 0)),
            (43, [_, id, value, ..]) => Some((*id, *value)),
            // OpSpecConstantTrue, OpSpecConstantFalse, OpSpecConstant
            (48, [_, id, ..]) => Some((*id, self.given(*id).unwrap_or(1))),
            (49, [_, id, ..]) => Some((*id, self.given(*id).unwrap_or(0))),
            (50, [_, id, value, ..]) => Some((*id, self.given(*id).unwrap_or(*value))),
            // OpSpecConstantOp
            (52, [_, id, of, values @ ..]) => self.evaluated(*of, values).map(|value| (*id, value)),
            // OpConstantComposite, OpSpecConstantComposite
            (44 | 51, [_, id, members @ ..]) => {
                if self.group_constant == Some(*id)
                    && let [x, y, z] = *members
                {
                    self.group = [x, y, z].map(|size| Some(Size::Id(size)));
                }
                self.composites.insert(*id, members.to_vec());
                None
            }
            _ => None,
        };
        self.values.extend(value);
    }

    /// Returns the value that a specialization constant is given.
    fn given(&self, id: u32) -> Option<u32> {
        self.constants.get(*self.spec_ids.get(&id)? as usize).copied()
    }

    /// Evaluates an operation on constants; `None` if it is not known here.
    fn evaluated(&self, op: u32, operands: &[u32]) -> Option<u32> {
        if let (81, [of, index]) = (op, operands) {
            // OpCompositeExtract; its indices are literals.
            return self.values.get(self.composites.get(of)?.get(*index as usize)?).copied();
        }
        let values: Vec<u32> = operands.iter().map(|id| self.values.get(id).copied()).collect::<Option<_>>()?;
        let truth = |truth: bool| Some(u32::from(truth));
        match (op, &values[..]) {
            (124, [a]) => Some(*a),
            (126, [a]) => Some(a.wrapping_neg()),
            (128, [a, b]) => Some(a.wrapping_add(*b)),
            (130, [a, b]) => Some(a.wrapping_sub(*b)),
            (132, [a, b]) => Some(a.wrapping_mul(*b)),
            (134, [a, b]) => a.checked_div(*b),
            (135, [a, b]) => a.cast_signed().checked_div(b.cast_signed()).map(i32::cast_unsigned),
            (137, [a, b]) => a.checked_rem(*b),
            (164, [a, b]) => truth((*a != 0) == (*b != 0)),
            (165, [a, b]) => truth((*a != 0) != (*b != 0)),
            (166, [a, b]) => truth(*a != 0 || *b != 0),
            (167, [a, b]) => truth(*a != 0 && *b != 0),
            (168, [a]) => truth(*a == 0),
            (169, [condition, a, b]) => Some(if *condition != 0 { *a } else { *b }),
            (170, [a, b]) => truth(a == b),
            (171, [a, b]) => truth(a != b),
            (172, [a, b]) => truth(a > b),
            (173, [a, b]) => truth(a.cast_signed() > b.cast_signed()),
            (174, [a, b]) => truth(a >= b),
            (175, [a, b]) => truth(a.cast_signed() >= b.cast_signed()),
            (176, [a, b]) => truth(a < b),
            (177, [a, b]) => truth(a.cast_signed() < b.cast_signed()),
            (178, [a, b]) => truth(a <= b),
            (179, [a, b]) => truth(a.cast_signed() <= b.cast_signed()),
            (194, [a, b]) => a.checked_shr(*b),
            (196, [a, b]) => a.checked_shl(*b),
            (197, [a, b]) => Some(a | b),
            (198, [a, b]) => Some(a ^ b),
            (199, [a, b]) => Some(a & b),
            (200, [a]) => Some(!a),
            _ => None,
        }
    }

    fn value_of(&self, size: Size) -> Option<u32> {
        match size {
            Size::Literal(value) => Some(value),
            Size::Id(id) => self.values.get(&id).copied(),
        }
    }

    /// Returns the size of a type in bytes.
    fn size(&self, kind: u32) -> Option<u32> {
        match self.types.get(&kind)? {
            Type::Bytes(bytes) => Some(*bytes),
            Type::Elements(of, Count::Literal(count)) => self.size(*of)?.checked_mul(*count),
            Type::Elements(of, Count::Id(id)) => self.size(*of)?.checked_mul(*self.values.get(id)?),
            Type::Struct(members) => members.iter().map(|member| self.size(*member)).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instruction(op: u32, operands: &[u32]) -> Vec<u32> {
        [&[(operands.len() as u32 + 1) << 16 | op], operands].concat()
    }

    /// A module whose workgroups have `constant 0` invocations and twice as many floats of shared memory, 64 and 128 by
    /// default.
    fn module(capabilities: &[u32]) -> Vec<u32> {
        let mut words = vec![0x0723_0203, 0x0001_0600, 0, 20, 0];
        for capability in capabilities {
            words.extend(instruction(17, &[*capability]));
        }
        for (op, operands) in [
            (331, &[1, 38, 5, 6, 6][..]),
            (71, &[5, 1, 0]),
            (21, &[2, 32, 0]),
            (22, &[3, 32]),
            (50, &[2, 5, 64]),
            (43, &[2, 6, 1]),
            (43, &[2, 7, 2]),
            (52, &[2, 8, 132, 5, 7]),
            (28, &[9, 3, 8]),
            (32, &[10, 4, 9]),
            (59, &[10, 11, 4]),
        ] {
            words.extend(instruction(op, operands));
        }
        words
    }

    #[test]
    fn a_modules_needs_follow_its_specialization_constants() {
        let read = Module::read(&module(&[1, 65]), &[]);
        assert_eq!((read.group, read.invocations(), read.shared_bytes), ([64, 1, 1], 64, Some(512)));
        let read = Module::read(&module(&[1, 65]), &[256]);
        assert_eq!((read.group, read.shared_bytes), ([256, 1, 1], Some(2048)));
        assert_eq!(
            read.capabilities.iter().map(String::as_str).collect::<Vec<_>>(),
            ["GroupNonUniformShuffle", "Shader"]
        );
    }

    #[test]
    fn what_a_device_does_not_offer_is_named_and_the_unknown_is_never_offered() {
        let read = Module::read(&module(&[1, 65, 6022, 9999]), &[]);
        let mut capabilities = Capabilities { cooperative_matrix: true, ..Capabilities::default() };
        assert_eq!(read.lacks(&capabilities), ["9999", "GroupNonUniformShuffle"]);
        capabilities.subgroup_operations = Subgroup::SHUFFLE;
        assert_eq!(read.lacks(&capabilities), ["9999"]);
        assert_eq!(
            lacking(&capabilities),
            ["basic subgroup operations in compute shaders", "subgroup arithmetic in compute shaders"]
        );
    }

    #[test]
    fn every_needed_capability_is_known() {
        for (name, _) in NEEDED {
            assert!(KNOWN.iter().any(|known| known.name == name), "{name}");
        }
    }

    #[test]
    fn words_that_are_cut_off_end_the_module() {
        let words = module(&[1]);
        for length in 0..words.len() {
            Module::read(&words[..length], &[]);
        }
    }
}
