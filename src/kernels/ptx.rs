//! What the generators of programs in PTX share: the parts of a program, and pieces of its text. Not here: the generators
//! (`gemm::wgmma`, `attention::flash_wgmma`), which program a call has (`programs`), and how a device compiles and launches
//! one (`device::ptx`).

/// The number of polls after which a wait is given up: at least a tenth of a second, as each takes more than ten cycles.
const MOST_POLLS: u32 = 1 << 24;

/// A program for the constants of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PtxProgram {
    /// The text.
    pub text: String,
    /// The name of the entry.
    pub entry: &'static str,
    /// The number of threads of a workgroup.
    pub threads: u32,
    /// The shared memory of a workgroup in bytes.
    pub shared_bytes: u32,
}

/// The text of a program while it is written.
#[derive(Debug, Default)]
pub struct PtxText {
    /// The text so far.
    pub out: String,
    labels: u32,
}

/// Appends a line of formatted text to the [`PtxText`] in `$program.ptx`.
macro_rules! line {
    ($program:expr, $($format:tt)*) => {{
        use std::fmt::Write as _;
        let _ = writeln!($program.ptx.out, $($format)*);
    }};
}
pub(crate) use line;

impl PtxText {
    /// Begins a program for compute capability 9.0, up to its body: its entry has an argument block of `args_bytes` bytes and
    /// workgroups of `threads` threads.
    pub fn head(&mut self, entry: &str, args_bytes: u32, threads: u32) {
        self.out += &format!(
            "
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry {entry}(.param .align 8 .b8 args[{args_bytes}])
.maxntid {threads}, 1, 1
.minnctapersm 1
{{
"
        );
    }

    /// Returns a label that no other has.
    pub fn label(&mut self) -> u32 {
        self.labels += 1;
        self.labels
    }

    /// Waits for the phase with parity `phase` of the barrier at `at` to end. The registers %polls and %p0 change. A wait that
    /// is given up ends the program with a trap, which loses the device.
    pub fn wait(&mut self, at: &str, phase: &str) {
        let label = self.label();
        self.out += &format!(
            "mov.u32 %polls, 0;
POLL{label}:
mbarrier.try_wait.parity.shared::cta.b64 %p0, [{at}], {phase};
@%p0 bra POLLED{label};
add.u32 %polls, %polls, 1;
setp.lt.u32 %p0, %polls, {MOST_POLLS};
@%p0 bra POLL{label};
trap;
POLLED{label}:
"
        );
    }
}

/// Returns a float as PTX writes it.
pub fn float(value: f32) -> String {
    format!("0f{:08x}", value.to_bits())
}

/// Returns the names of consecutive registers, separated by commas.
pub fn registers(name: &str, range: std::ops::Range<u32>) -> String {
    range.map(|i| format!("%{name}{i}")).collect::<Vec<String>>().join(", ")
}
