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
        self.wait_counting(at, phase, "%polls", "%p0");
    }

    /// Like [`PtxText::wait`], with other registers that change: a word and a predicate.
    pub fn wait_counting(&mut self, at: &str, phase: &str, count: &str, predicate: &str) {
        let label = self.label();
        self.out += &format!(
            "mov.u32 {count}, 0;
POLL{label}:
mbarrier.try_wait.parity.shared::cta.b64 {predicate}, [{at}], {phase};
@{predicate} bra POLLED{label};
add.u32 {count}, {count}, 1;
setp.lt.u32 {predicate}, {count}, {MOST_POLLS};
@{predicate} bra POLL{label};
trap;
POLLED{label}:
"
        );
    }

    /// Waits for a phase that other lanes of the workgroup end, all of whose own waits are bounded: its time has no bound of
    /// its own, since theirs may be longer than a copy takes. The register `predicate` changes.
    pub fn wait_for_group(&mut self, at: &str, phase: &str, predicate: &str) {
        let label = self.label();
        self.out += &format!(
            "AWAIT{label}:
mbarrier.try_wait.parity.shared::cta.b64 {predicate}, [{at}], {phase};
@!{predicate} bra AWAIT{label};
"
        );
    }

    /// Sets the register `of` to its squared ReLU (`glu.glsl`).
    pub fn squared_relu(&mut self, of: &str) {
        self.out += &format!("max.f32 {of}, {of}, {zero};\nmul.f32 {of}, {of}, {of};\n", zero = float(0.0));
    }

    /// Sets the register `to` to the gated linear unit of the registers `gate` and `up`, which change (`glu.glsl`); `kind` is
    /// its code. The registers `product` and `power` change too.
    pub fn glu(&mut self, kind: u32, [gate, up]: [&str; 2], to: &str, [product, power]: [&str; 2]) {
        const LOG2_E: f32 = std::f32::consts::LOG2_E;
        // `power`: the sigmoid that the gate is multiplied by is 1 / (1 + 2^power).
        self.out += &match kind {
            3 => {
                // gelu(x) = x · sigmoid(2 · sqrt(2 / pi) · (x + 0.044715 x³))
                let scale = 2.0 * (2.0 / std::f32::consts::PI).sqrt();
                format!(
                    "mul.f32 {product}, {gate}, {gate};
fma.rn.f32 {product}, {product}, {cubic}, {one};
mul.f32 {product}, {product}, {gate};
mul.f32 {power}, {product}, {scale};
",
                    cubic = float(0.044715),
                    one = float(1.0),
                    scale = float(-scale * LOG2_E),
                )
            }
            clamped if clamped & 0xff == 4 => {
                let limit = f32::from_bits(clamped & !0xff);
                format!(
                    "min.f32 {gate}, {gate}, {most};
min.f32 {up}, {up}, {most};
max.f32 {up}, {up}, {least};
add.f32 {up}, {up}, {one};
mul.f32 {power}, {gate}, {scale};
",
                    most = float(limit),
                    least = float(-limit),
                    one = float(1.0),
                    scale = float(-1.702 * LOG2_E),
                )
            }
            _ => format!("mul.f32 {power}, {gate}, {};\n", float(-LOG2_E)),
        };
        self.out += &format!(
            "ex2.approx.f32 {power}, {power};
add.f32 {power}, {power}, {one};
mul.f32 {product}, {gate}, {up};
div.full.f32 {to}, {product}, {power};
",
            one = float(1.0)
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
