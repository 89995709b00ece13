//! Recordings: GPU work as plain data, a flat list of kernel calls, copies and fills over named buffers. A recording is
//! made without a GPU, printable as text, and comparable in tests. Not here: Vulkan objects, addresses, and the order
//! of a model's layers.

use std::collections::BTreeSet;
use std::fmt;

/// The index of a buffer in its [`Recording`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// A named buffer that a recording uses. Names are global to a replica: two recordings that name `kv.0.k` mean the same
/// memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferDecl {
    /// The name, for example `layers.3.qkv.weight`, `kv.3.k`, `attention.output`.
    pub name: String,
    /// The minimum size in bytes. The allocation has the largest size that any recording declares for the name.
    pub bytes: u64,
}

/// The kind of access of a call to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// The range is only read.
    Read,
    /// The range is only written.
    Write,
    /// The range is read and written (also by atomics).
    ReadWrite,
    /// Like `ReadWrite`, by a call that accesses other words of the range than the calls right before it that write there: one
    /// of several parts of a product, each of which computes some columns of several rows.
    Beside,
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
    /// The offset of the first byte.
    pub offset: u64,
    /// The length in bytes.
    pub bytes: u64,
}

impl Range {
    /// Returns the part of the range that starts `offset` bytes into it and is `bytes` long.
    pub fn part(self, offset: u64, bytes: u64) -> Range {
        debug_assert!(offset + bytes <= self.bytes, "a part of {bytes} at {offset} leaves {self:?}");
        Range { buffer: self.buffer, offset: self.offset + offset, bytes }
    }

    /// Returns an empty range at the same address, for an argument that a variant does not access.
    pub fn none(self) -> Range {
        Range { bytes: 0, ..self }
    }

    /// Whether two ranges share a byte. An empty range shares none.
    pub fn overlaps(&self, other: &Range) -> bool {
        self.buffer == other.buffer
            && self.bytes > 0
            && other.bytes > 0
            && self.offset < other.offset + other.bytes
            && other.offset < self.offset + self.bytes
    }
}

/// A field of a kernel's argument block (push constants), in the block's order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// The address of a range.
    Buffer(Range, Access),
    /// Like `Buffer`, for a range of tagged words (`tags.glsl`): its readers poll each word until it is ready, so that
    /// no barrier is needed between the call that writes the words and the call that reads them.
    Carried(Range, Access),
    /// Like `Buffer`, for a call that accesses only parts of the range that no other call of the recording does: no barrier
    /// follows from the access.
    Apart(Range, Access),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 32-bit float.
    F32(f32),
}

impl Arg {
    /// Returns the range of a buffer argument.
    ///
    /// # Panics
    /// If the argument is a value.
    pub fn range(self) -> Range {
        match self {
            Arg::Buffer(range, _) | Arg::Carried(range, _) | Arg::Apart(range, _) => range,
            other => panic!("{other:?} is no buffer"),
        }
    }

    /// Returns the range of a buffer argument and the kind of access; `None` for a value.
    pub fn access(self) -> Option<(Range, Access)> {
        match self {
            Arg::Buffer(range, access) | Arg::Carried(range, access) | Arg::Apart(range, access) => {
                Some((range, access))
            }
            Arg::U32(_) | Arg::F32(_) => None,
        }
    }

    /// Returns the unsigned integer.
    ///
    /// # Panics
    /// If the argument is something else.
    pub fn u32(self) -> u32 {
        match self {
            Arg::U32(value) => value,
            other => panic!("{other:?} is no u32"),
        }
    }

    /// Returns the float.
    ///
    /// # Panics
    /// If the argument is something else.
    pub fn f32(self) -> f32 {
        match self {
            Arg::F32(value) => value,
            other => panic!("{other:?} is no f32"),
        }
    }
}

/// A dispatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The kernel's variant name in `kernels::shaders`, for example `gemv.bf16`.
    pub kernel: &'static str,
    /// The name of the call's result in the model, for example `layers.3.qkv`; also the name of its span.
    pub label: String,
    /// The specialization constants, by index.
    pub constants: Vec<u32>,
    /// The argument block (push constants).
    pub args: Vec<Arg>,
    /// The number of workgroups in x, y and z.
    pub groups: [u32; 3],
}

impl Call {
    /// Returns the call with its accesses to `range`'s buffer marked as `Carried`.
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

    /// Returns the call with its writes to `range`'s buffer as [`Access::Beside`].
    pub fn beside(mut self, range: Range) -> Call {
        for arg in &mut self.args {
            if let Arg::Buffer(of, access) | Arg::Carried(of, access) = arg
                && of.buffer == range.buffer
                && access.writes()
            {
                *access = Access::Beside;
            }
        }
        self
    }

    /// Returns the call with its accesses to `range`'s buffer as reads, for a variant that writes nothing there.
    pub fn reads(mut self, range: Range) -> Call {
        for arg in &mut self.args {
            if let Arg::Buffer(of, access) | Arg::Carried(of, access) = arg
                && of.buffer == range.buffer
            {
                *access = Access::Read;
            }
        }
        self
    }

    /// Returns the call with its accesses to `range`'s buffer marked as `Apart`.
    pub fn apart(mut self, range: Range) -> Call {
        for arg in &mut self.args {
            if let Arg::Buffer(of, access) = *arg
                && of.buffer == range.buffer
            {
                *arg = Arg::Apart(of, access);
            }
        }
        self
    }
}

/// An access of an operation to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The accessed range.
    pub range: Range,
    /// The kind of access.
    pub access: Access,
    /// Whether the words are tagged, so that their readers poll for them.
    pub carried: bool,
}

/// An operation of a recording.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// A dispatch.
    Call(Call),
    /// Copies one range to another.
    Copy {
        /// The source.
        from: Range,
        /// The destination, of the same length.
        to: Range,
    },
    /// Fills a range with a repeated 32-bit word.
    Fill {
        /// The destination; its offset and length are multiples of 4.
        to: Range,
        /// The word.
        word: u32,
    },
}

impl Op {
    /// Returns every range that the operation accesses and may share with others, with the kind of access.
    pub fn touches(&self) -> Vec<Touch> {
        let plain = |range: &Range, access| Touch { range: *range, access, carried: false };
        match self {
            Op::Call(call) => call
                .args
                .iter()
                .filter_map(|arg| match arg {
                    Arg::Buffer(range, access) => Some(plain(range, *access)),
                    Arg::Carried(range, access) => Some(Touch { carried: true, ..plain(range, *access) }),
                    Arg::Apart(..) | Arg::U32(_) | Arg::F32(_) => None,
                })
                .collect(),
            Op::Copy { from, to } => vec![plain(from, Access::Read), plain(to, Access::Write)],
            Op::Fill { to, .. } => vec![plain(to, Access::Write)],
        }
    }

    /// Returns every range that the operation accesses, with the kind of access.
    pub fn accesses(&self) -> Vec<(Range, Access)> {
        match self {
            Op::Call(call) => call.args.iter().filter_map(|arg| arg.access()).collect(),
            Op::Copy { from, to } => vec![(*from, Access::Read), (*to, Access::Write)],
            Op::Fill { to, .. } => vec![(*to, Access::Write)],
        }
    }
}

/// A flat list of operations over named buffers, to be executed in order by a [`super::region::Region`] or by the
/// interpreter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// The name, for example `decode.1` or `prefill.256`.
    pub name: String,
    /// The buffers that the operations use.
    pub buffers: Vec<BufferDecl>,
    /// The operations in order.
    pub ops: Vec<Op>,
    /// The buffers that hold tagged words when the recording begins, with the tag of these words (`kernels::tags`).
    pub tagged_inputs: Vec<(BufferId, u32)>,
}

impl Recording {
    /// Creates an empty recording.
    pub fn new(name: impl Into<String>) -> Recording {
        Recording { name: name.into(), ..Recording::default() }
    }

    /// Returns the whole buffer with that name. The first use declares it; a later use may need more bytes.
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

    /// Returns the names of the buffers that operations write. An empty range counts only in a buffer of which nothing is read: some
    /// calls write without a barrier, and others have no use for an output and get an empty range of an input.
    pub fn written(&self) -> BTreeSet<&str> {
        let accesses: Vec<(Range, Access)> = self.ops.iter().flat_map(Op::accesses).collect();
        let reads = |(range, access): &&(Range, Access)| range.bytes > 0 && access.reads();
        let read: BTreeSet<BufferId> = accesses.iter().filter(reads).map(|(range, _)| range.buffer).collect();
        let writes =
            |(range, access): &&(Range, Access)| access.writes() && (range.bytes > 0 || !read.contains(&range.buffer));
        accesses.iter().filter(writes).map(|(range, _)| &*self.decl(range.buffer).name).collect()
    }

    /// Returns the declaration of a buffer.
    pub fn decl(&self, id: BufferId) -> &BufferDecl {
        &self.buffers[id.0 as usize]
    }

    /// Returns the same calls with a barrier for every dependency, so that no call waits for another's words.
    /// The words carry the same tags as before, so that the results have the same bits.
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

    /// Returns the same calls with barriers and without tags. A call of this recording can be timed alone: it waits for
    /// no other call's words.
    pub fn without_tags(&self) -> Recording {
        let mut plain = self.with_barriers();
        for op in &mut plain.ops {
            let Op::Call(call) = op else { continue };
            let constants = super::shaders::find(call.kernel).constants;
            for (value, (_, name)) in call.constants.iter_mut().zip(constants) {
                if *name == "tagged" {
                    *value = 0;
                }
            }
        }
        plain
    }

    /// Splits the recording before the first dispatch of `kernel`. Returns the operations before it and those from it
    /// on, as recordings named like this one with the suffix `.body` or `.draw`, to be run one after the other.
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
            tagged_inputs: self.tagged_inputs.clone(),
        };
        (part("body", &self.ops[..at]), part("draw", &self.ops[at..]))
    }

    /// Returns the parts of the recording that end before the operations with these indices, in ascending order, and the
    /// rest. The first part has the recording's name.
    pub fn cut(&self, at: &[usize]) -> Vec<Recording> {
        let bounds: Vec<usize> = [0].into_iter().chain(at.iter().copied()).chain([self.ops.len()]).collect();
        let part = |(index, bounds): (usize, &[usize])| Recording {
            name: if index == 0 { self.name.clone() } else { format!("{}.{index}", self.name) },
            buffers: self.buffers.clone(),
            ops: self.ops[bounds[0]..bounds[1]].to_vec(),
            tagged_inputs: self.tagged_inputs.clone(),
        };
        bounds.windows(2).enumerate().map(part).collect()
    }

    /// Returns the dispatches that are `wanted`, in a recording with the buffers of these alone.
    pub fn calls(&self, name: &str, mut wanted: impl FnMut(&Call) -> bool) -> Recording {
        let mut found = Recording::new(name);
        for op in &self.ops {
            let Op::Call(call) = op else { continue };
            if !wanted(call) {
                continue;
            }
            let mut call = call.clone();
            for arg in &mut call.args {
                if let Arg::Buffer(range, _) | Arg::Carried(range, _) | Arg::Apart(range, _) = arg {
                    let decl = self.decl(range.buffer);
                    range.buffer = found.buffer(&decl.name, decl.bytes).buffer;
                }
            }
            found.call(call);
        }
        found
    }

    /// Appends the operations of another recording, whose buffers get the names that `rename` returns.
    pub fn append(&mut self, other: Recording, rename: impl Fn(&str) -> String) {
        let ids: Vec<BufferId> =
            other.buffers.iter().map(|decl| self.buffer(&rename(&decl.name), decl.bytes).buffer).collect();
        let renamed = |range: &mut Range| range.buffer = ids[range.buffer.0 as usize];
        for mut op in other.ops {
            match &mut op {
                Op::Call(call) => call.args.iter_mut().for_each(|arg| match arg {
                    Arg::Buffer(range, _) | Arg::Carried(range, _) | Arg::Apart(range, _) => renamed(range),
                    Arg::U32(_) | Arg::F32(_) => {}
                }),
                Op::Copy { from, to } => {
                    renamed(from);
                    renamed(to);
                }
                Op::Fill { to, .. } => renamed(to),
            }
            self.ops.push(op);
        }
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
                            Arg::Apart(r, access) => write!(f, "{access:?} apart {}", range(r))?,
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
