//! GPU work as plain data: a flat list of kernel calls, copies and fills over named
//! buffers. Made without a GPU, printable as text, comparable in tests.
//! Deliberately absent: Vulkan objects, addresses, and the order of layers.

use std::fmt;

/// Index of a buffer in its [`Recording`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// A named buffer that a recording uses. The name is global to a replica: two recordings
/// that name `kv.0.k` mean the same memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferDecl {
    /// For example `layers.3.qkv.weight`, `kv.3.k`, `attention.output`.
    pub name: String,
    /// Least size in bytes; the memory behind the name has the largest that any recording asks for.
    pub bytes: u64,
}

/// What a call does to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
    /// Reads and writes (atomics too).
    ReadWrite,
}

impl Access {
    /// Whether the range is read.
    pub fn reads(self) -> bool {
        self != Access::Write
    }
    /// Whether the range is written.
    pub fn writes(self) -> bool {
        self != Access::Read
    }
}

/// A part of a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Range {
    /// The buffer.
    pub buffer: BufferId,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Range {
    /// The part of the range that starts `offset` bytes in and has `bytes`.
    pub fn part(self, offset: u64, bytes: u64) -> Range {
        debug_assert!(offset + bytes <= self.bytes, "a part of {bytes} at {offset} leaves {self:?}");
        Range { buffer: self.buffer, offset: self.offset + offset, bytes }
    }

    /// An address without bytes, for an argument that a variant does not touch.
    pub fn none(self) -> Range {
        Range { bytes: 0, ..self }
    }

    /// Whether two ranges share a byte; an empty one shares none.
    pub fn overlaps(&self, other: &Range) -> bool {
        self.buffer == other.buffer
            && self.bytes > 0
            && other.bytes > 0
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// One field of a kernel's argument block, in the block's order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// The address of a range.
    Buffer(Range, Access),
    /// As `Buffer`, of a range whose words carry their readiness (`tags.glsl`): who reads them waits for
    /// each word, so that no barrier need stand between the call that writes them and the one that reads.
    Carried(Range, Access),
    /// A 32-bit unsigned value.
    U32(u32),
    /// A 32-bit float.
    F32(f32),
}

impl Arg {
    /// The range of a buffer argument.
    ///
    /// # Panics
    /// If it is a value.
    pub fn range(self) -> Range {
        match self {
            Arg::Buffer(range, _) | Arg::Carried(range, _) => range,
            other => panic!("{other:?} is no buffer"),
        }
    }

    /// An unsigned value.
    ///
    /// # Panics
    /// If it is something else.
    pub fn u32(self) -> u32 {
        match self {
            Arg::U32(value) => value,
            other => panic!("{other:?} is no u32"),
        }
    }

    /// A float value.
    ///
    /// # Panics
    /// If it is something else.
    pub fn f32(self) -> f32 {
        match self {
            Arg::F32(value) => value,
            other => panic!("{other:?} is no f32"),
        }
    }
}

/// One dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The kernel and its variant, for example `gemv.bf16`; the name in `kernels::shaders`.
    pub kernel: &'static str,
    /// What the call computes in the model, for example `layers.3.qkv`: the span's name.
    pub label: String,
    /// Specialization constants, by index.
    pub constants: Vec<u32>,
    /// The argument block.
    pub args: Vec<Arg>,
    /// Workgroups in x, y, z.
    pub groups: [u32; 3],
}

impl Call {
    /// The call with its accesses to `range`'s buffer carried.
    pub fn carry(mut self, range: Range) -> Call {
        for arg in &mut self.args {
            if let Arg::Buffer(of, access) = *arg
                && of.buffer == range.buffer
            {
                *arg = Arg::Carried(of, access);
            }
        }
        self
    }
}

/// What an operation does to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// Where.
    pub range: Range,
    /// What.
    pub access: Access,
    /// Whether the words carry their readiness.
    pub carried: bool,
}

/// One operation of a recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// A dispatch.
    Call(Call),
    /// Copies `bytes` from one range to another.
    Copy {
        /// Source.
        from: Range,
        /// Target, of the same length.
        to: Range,
    },
    /// Fills a range with a repeated 32-bit word.
    Fill {
        /// Target; offset and length are multiples of 4.
        to: Range,
        /// The word.
        word: u32,
    },
}

impl Op {
    /// Every range that the operation touches, with what it does to it.
    pub fn touches(&self) -> Vec<Touch> {
        let plain = |range: &Range, access| Touch { range: *range, access, carried: false };
        match self {
            Op::Call(call) => call
                .args
                .iter()
                .filter_map(|arg| match arg {
                    Arg::Buffer(range, access) => Some(plain(range, *access)),
                    Arg::Carried(range, access) => Some(Touch { carried: true, ..plain(range, *access) }),
                    Arg::U32(_) | Arg::F32(_) => None,
                })
                .collect(),
            Op::Copy { from, to } => vec![plain(from, Access::Read), plain(to, Access::Write)],
            Op::Fill { to, .. } => vec![plain(to, Access::Write)],
        }
    }
}

/// A flat list of operations over named buffers, executed in order by somebody else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// For example `decode.1` or `prefill.256`.
    pub name: String,
    /// The buffers that operations name.
    pub buffers: Vec<BufferDecl>,
    /// The operations in order.
    pub ops: Vec<Op>,
}

impl Recording {
    /// An empty recording.
    pub fn new(name: impl Into<String>) -> Recording {
        Recording { name: name.into(), ..Recording::default() }
    }

    /// The whole buffer of that name, declared on first use; a later use may ask for more bytes.
    pub fn buffer(&mut self, name: &str, bytes: u64) -> Range {
        let index = match self.buffers.iter().position(|b| b.name == name) {
            Some(index) => {
                let decl = &mut self.buffers[index];
                decl.bytes = decl.bytes.max(bytes);
                index
            }
            None => {
                self.buffers.push(BufferDecl { name: name.to_owned(), bytes });
                self.buffers.len() - 1
            }
        };
        Range { buffer: BufferId(index as u32), offset: 0, bytes }
    }

    /// The declaration of a buffer.
    pub fn decl(&self, id: BufferId) -> &BufferDecl {
        &self.buffers[id.0 as usize]
    }

    /// The same calls with a barrier for every dependency, in which no workgroup waits for another. Words are tagged
    /// as before, so that results have the same bits.
    pub fn with_barriers(&self) -> Recording {
        let mut plain = self.clone();
        for op in &mut plain.ops {
            let Op::Call(call) = op else { continue };
            for arg in &mut call.args {
                if let Arg::Carried(range, access) = *arg {
                    *arg = Arg::Buffer(range, access);
                }
            }
            let constants = super::shaders::find(call.kernel).constants;
            for (value, (_, name)) in call.constants.iter_mut().zip(constants) {
                if *name == "waits" {
                    *value = 0;
                }
            }
        }
        plain
    }

    /// The operations before the first dispatch of `kernel`, and those from it on, each as a recording of this name with
    /// `.body` or `.draw` behind it: to be run one after the other.
    ///
    /// # Panics
    /// If there is no such dispatch.
    pub fn split(&self, kernel: &str) -> (Recording, Recording) {
        let at = self.ops.iter().position(|op| matches!(op, Op::Call(call) if call.kernel == kernel));
        let at = at.unwrap_or_else(|| panic!("\"{}\" has no {kernel}", self.name));
        let part = |suffix: &str, ops: &[Op]| Recording {
            name: format!("{}.{suffix}", self.name),
            buffers: self.buffers.clone(),
            ops: ops.to_vec(),
        };
        (part("body", &self.ops[..at]), part("draw", &self.ops[at..]))
    }

    /// Appends a dispatch.
    pub fn call(&mut self, call: Call) {
        self.ops.push(Op::Call(call));
    }
}

impl fmt::Display for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "recording {}", self.name)?;
        let range = |r: &Range| format!("{}[{}+{}]", self.decl(r.buffer).name, r.offset, r.bytes);
        for op in &self.ops {
            match op {
                Op::Call(call) => {
                    write!(f, "  {} = {}{:?} x{:?} (", call.label, call.kernel, call.constants, call.groups)?;
                    for (i, arg) in call.args.iter().enumerate() {
                        if i > 0 {
                            write!(f, ", ")?;
                        }
                        match arg {
                            Arg::Buffer(r, access) => write!(f, "{access:?} {}", range(r))?,
                            Arg::Carried(r, access) => write!(f, "{access:?} carried {}", range(r))?,
                            Arg::U32(v) => write!(f, "{v}")?,
                            Arg::F32(v) => write!(f, "{v}")?,
                        }
                    }
                    writeln!(f, ")")?;
                }
                Op::Copy { from, to } => writeln!(f, "  copy {} -> {}", range(from), range(to))?,
                Op::Fill { to, word } => writeln!(f, "  fill {} with {word:#x}", range(to))?,
            }
        }
        Ok(())
    }
}
