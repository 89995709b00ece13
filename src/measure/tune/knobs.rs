//! The choices of a step's workgroups that a search changes, and the values that are worth trying for each. Pure.
//! Not here: which value is the fastest (`search`), and whether a device can run it (`gpu::tuned::TuningBounds`).

use crate::gpu::tuned;
use crate::gpu::tuned::{MOST_TILES, TuningBounds};
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::codes_of;
use crate::kernels::gemm::codes_ptx::CodesPtxConfig;
use crate::kernels::gemm::gemv_dots::DotsConfig;
use crate::kernels::gemm::matmul::{Arithmetic, MatmulConfig};
use crate::kernels::gemm::skinny::MOST_AHEAD;
use crate::kernels::recording::{Call, Op};
use crate::kernels::shaders::{
    self, MatmulArgs, MatmulConstants, SkinnyArgs, SkinnyCodesArgs, SkinnyCodesConstants, SkinnyConstants,
};
use crate::memory::pack::codes::unit_cols;
use crate::model::decoder::{Decoder, StepShape, Tuning};
use std::collections::BTreeSet;

/// The keys of the limits of rows that choose the kernels of row-major products: up to the first one, those of affine codes use
/// `gemv_dots`; of the others, those of up to the second one use `gemv` and those of more `matmul`.
pub(super) const LIMITS: [&str; 2] = ["dots_most", "gemv_most"];

/// The key of the workgroups of `gemv_dots` for all numbers of rows, and of their rows of x alone.
const DOTS: &str = "dots";
const DOTS_BATCH: &str = "dots_batch";

/// The context length from which fewer splits and threads of attention than the default are tried. On a shorter context
/// most splits are idle, and its times do not show what a long context would lose with fewer.
const LONG: u32 = 2048;

/// A choice that the search can change.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Knob {
    /// The key for [`Tuning::set`].
    pub(super) key: String,
    /// The entry's name in the file of results.
    pub(super) entry: String,
    /// The default value.
    pub(super) rule: String,
    /// The values that the device can run.
    pub(super) candidates: Vec<String>,
    /// The number of weight bytes that a step reads with the kernel that the choice configures; 0 for attention.
    pub(super) bytes: u64,
    /// The largest size in bytes of the partial sums that a value needs.
    pub(super) room: u64,
}

impl Knob {
    /// Whether a given change of the tuning keeps the choice as it is.
    pub(super) fn is_set_by(&self, change: &str) -> bool {
        let key = change.split('=').next().unwrap_or(change);
        let from = key.strip_prefix("matmul.").and_then(|rows| rows.parse::<u32>().ok());
        let of_all = from.zip(tuned::matmul_shape(&self.key)).is_some_and(|(from, (tokens, ..))| tokens >= from);
        key == self.key || of_all || key == DOTS && self.key == DOTS_BATCH
    }
}

/// Returns the choices for a step of a model, those that concern most bytes first. Choices that steps of all numbers of
/// rows share are those of the decode step of one row.
pub(super) fn knobs(
    decoder: &Decoder<'_>,
    tuning: &Tuning,
    bounds: TuningBounds,
    depth: u32,
    shape: StepShape,
) -> Vec<Knob> {
    let step = Decoder { tuning: tuning.clone(), ..decoder.clone() }.record(shape);
    let mut all = Knobs { knobs: Vec::new(), decoder, tuning, bounds };
    for op in &step.ops {
        let Op::Call(call) = op else { continue };
        match shape {
            StepShape::Decode { rows: 1 } => all.add_of_one_row(call, depth),
            _ => all.add_of_rows(call, shape.rows()),
        }
    }
    all.knobs.sort_by_key(|knob| std::cmp::Reverse(knob.bytes));
    all.knobs
}

/// Returns the values of [`LIMITS`].
pub(super) fn limits(tuning: &Tuning) -> [u32; 2] {
    [tuning.dots_most, tuning.gemv_most]
}

/// Returns the choice of one of [`LIMITS`], whose values depend on the step ([`other_limits`]); `rule` is its default value.
pub(super) fn limit(decoder: &Decoder<'_>, key: &str, rule: u32) -> Option<Knob> {
    let entry = tuned::entry(key, decoder.config)?;
    Some(Knob { key: key.to_owned(), entry, rule: rule.to_string(), candidates: Vec::new(), bytes: 0, room: 0 })
}

/// Returns the names of the kernels of a step's row-major products, in the order of the products.
pub(super) fn product_kernels(decoder: &Decoder<'_>, tuning: &Tuning, shape: StepShape) -> Vec<&'static str> {
    let step = Decoder { tuning: tuning.clone(), ..decoder.clone() }.record(shape);
    let name = |op: &Op| if let Op::Call(call) = op { Some(call.kernel) } else { None };
    let is_product = |name: &&str| ["gemv", "matmul"].iter().any(|start| name.starts_with(start));
    step.ops.iter().filter_map(name).filter(is_product).collect()
}

/// Returns the values of [`LIMITS`] with which products of a step of `rows` rows may use other kernels than with the current
/// values: with the first limit on the other side of the step's rows, with the second one, and with both. Steps of `earlier`
/// rows, which were searched before, keep their kernels.
pub(super) fn other_limits(current: [u32; 2], rows: u32, earlier: &[u32]) -> Vec<[u32; 2]> {
    let [dots, gemv] = current.map(|limit| other_limit(limit, rows, earlier));
    let pairs = [(dots, Some(current[1])), (Some(current[0]), gemv), (dots, gemv)];
    pairs.into_iter().filter_map(|(dots, gemv)| Some([dots?, gemv?])).collect()
}

/// Returns the value of a limit that is on the other side of a step's `rows` rows; `None` if a step of `earlier` rows would be on
/// another side too. Of these values, it is the one next to the step's rows.
fn other_limit(current: u32, rows: u32, earlier: &[u32]) -> Option<u32> {
    let among = |from: u32, to: u32| earlier.iter().any(|rows| *rows > from && *rows <= to);
    match rows {
        0..=1 => None,
        _ if rows <= current => (!among(rows - 1, current)).then_some(rows - 1),
        _ => (!among(current, rows)).then_some(rows),
    }
}

/// The choices of a step that are known so far.
struct Knobs<'a> {
    knobs: Vec<Knob>,
    decoder: &'a Decoder<'a>,
    tuning: &'a Tuning,
    bounds: TuningBounds,
}

impl Knobs<'_> {
    fn add(&mut self, key: String, rule: String, values: Vec<String>, bytes: u64) {
        if let Some(knob) = self.knobs.iter_mut().find(|knob| knob.key == key) {
            knob.bytes += bytes;
            return;
        }
        let Some(entry) = tuned::entry(&key, self.decoder.config) else { return };
        let fits = |value: &String| self.bounds.changed(self.tuning, &key, value).is_some();
        let candidates = values.into_iter().filter(fits).collect();
        self.knobs.push(Knob { key, entry, rule, candidates, bytes, room: 0 });
    }

    /// Adds the choices of a call of a decode step of one row, behind `depth` tokens.
    fn add_of_one_row(&mut self, call: &Call, depth: u32) {
        let rules = self.tuning;
        let powers = |from: u32, to: u32| (from..=to).filter(|n| n.is_power_of_two()).map(|n| n.to_string()).collect();
        let pages = depth.div_ceil(PAGE_TOKENS).max(rules.splits);
        let least = if depth < LONG { rules.splits } else { 1 };
        let splits = [1, 2, 4, 6, 8, 12, 16, 20, 24, 32].into_iter().filter(|n| (least..=pages).contains(n));
        let splits: Vec<String> = splits.map(|n| n.to_string()).collect();
        match family(call) {
            "skinny" => {
                let (args, constants) =
                    (SkinnyArgs::from_args(&call.args), SkinnyConstants::from_values(&call.constants));
                let rule = format!("{}/{}/{}", constants.threads, constants.tiles, constants.ahead);
                let values = skinny_values(args.n, constants.chunks, rules.processors);
                self.add(format!("skinny.{}x{}", args.n, args.k), rule, values, args.weight.bytes);
            }
            "skinny_codes" => self.add_codes(call, 1),
            "gemv" => {
                let bytes = call.args[0].range().bytes;
                let values = powers(rules.gemv_threads.min(32), 256);
                self.add("gemv_threads".to_owned(), rules.gemv_threads.to_string(), values, bytes);
            }
            "gemv_dots" => {
                let Some(dots) = rules.dots else { return };
                let (own, values) = (dots_value(dots, rules.processors), dots_values(dots, rules.processors));
                self.add(DOTS.to_owned(), own, values, call.args[0].range().bytes);
            }
            "flash_decode" => {
                let least = if depth < LONG { rules.flash_threads } else { 32 };
                let values = [32, 64, 96, 128, 192, 256, 384, 512].into_iter().filter(|n| *n >= least);
                let values = values.map(|n| n.to_string()).collect();
                self.add("flash_threads".to_owned(), rules.flash_threads.to_string(), values, 0);
                self.add("splits".to_owned(), rules.splits.to_string(), splits, 0);
            }
            "attention" => {
                let rule = rules.attention_threads.to_string();
                self.add("attention_threads".to_owned(), rule, powers(32, 512), 0);
                self.add("splits".to_owned(), rules.splits.to_string(), splits, 0);
            }
            _ => {}
        }
    }

    /// Adds the choices of a call of a step of several rows.
    fn add_of_rows(&mut self, call: &Call, rows: u32) {
        match family(call) {
            "skinny_codes" => self.add_codes(call, rows),
            "matmul" => self.add_matmul(call, rows),
            "gemv_dots" => {
                let Some(dots) = self.tuning.dots else { return };
                // Rows of x beyond those of the step are none.
                let values = [1, 2, 4].into_iter().filter(|batch| *batch <= rows).map(|batch| batch.to_string());
                let bytes = call.args[0].range().bytes;
                self.add(DOTS_BATCH.to_owned(), dots.batch.to_string(), values.collect(), bytes);
            }
            _ => {}
        }
    }

    fn add_codes(&mut self, call: &Call, rows: u32) {
        if shaders::find(call.kernel).is_ptx() {
            // Several rows have the rule's shapes.
            if rows == 1 {
                self.add_codes_ptx(call);
            }
            return;
        }
        let (args, c) = (SkinnyCodesArgs::from_args(&call.args), SkinnyCodesConstants::from_values(&call.constants));
        let (codes, processors) = (codes_of(c.codes), self.tuning.processors);
        let tiles = args.n.div_ceil(16 * c.tiles);
        let each = tiles.min(call.groups[0] * call.groups[2]).div_ceil(processors);
        let rule = format!("{}/{}/{}/{each}", c.threads, c.tiles, c.ahead);
        // The 16-byte words of codes in a lane count like those of bfloat16, of which a chunk has two.
        let words = unit_cols(codes) * codes.bits / 256;
        let mut values = codes_values(args.n, c.units, words, processors);
        // Four lane groups for several rows of so few units have given NaN: see `Decoder::codes_config`.
        values.retain(|value| rows == 1 || !(3..=4).contains(&c.units) || !value.starts_with("128/"));
        let of_rows = if rows > 1 { format!("x{rows}") } else { String::new() };
        self.add(format!("codes.{}x{}x{}{of_rows}", codes.bits, args.n, args.k), rule, values, args.weight.bytes);
    }

    fn add_codes_ptx(&mut self, call: &Call) {
        let (args, c) = (SkinnyCodesArgs::from_args(&call.args), SkinnyCodesConstants::from_values(&call.constants));
        let key = format!("codes_ptx.{}x{}x{}", codes_of(c.codes).bits, args.n, args.k);
        let each = call.groups[0].div_ceil(self.tuning.processors);
        let groups = c.threads / 32 - 1;
        let rule = format!("{groups}/{}/{each}", c.ahead);
        let possible = |groups: u32| {
            let fitting = [2, 3, 4].map(|slots| CodesPtxConfig { groups, slots, workgroups: self.tuning.processors });
            fitting.into_iter().filter(|config| config.fits(codes_of(c.codes), (args.n, c.units), 1))
        };
        let values = BTreeSet::from([12, 16, 20, 24, groups]).into_iter().flat_map(possible);
        let values = values.map(|config| format!("{}/{}/1", config.groups, config.slots)).collect();
        self.add(key, rule, values, args.weight.bytes);
    }

    fn add_matmul(&mut self, call: &Call, rows: u32) {
        let (args, c) = (MatmulArgs::from_args(&call.args), MatmulConstants::from_values(&call.constants));
        let arithmetic = self.tuning.arithmetic;
        // Weights of f32 are multiplied in f32, whose tiles are others.
        if call.kernel == "matmul.f32" && arithmetic != Arithmetic::F32 {
            return;
        }
        let of_call = |cols: &u32| cols.div_ceil(8) == args.chunks;
        let Some(cols) = self.decoder.weights.iter().map(|w| w.cols).find(of_call) else { return };
        // Of rows sorted by expert, the rule sees those of one expert.
        let sorted = self.decoder.config.experts.filter(|_| c.experts == 1);
        let rows = sorted.map_or(rows, |of| Decoder::rows_of_expert(rows, of.chosen, of.count));
        let rule =
            MatmulConfig { tokens: c.tokens, features: c.features, words: c.words, each: c.each, splits: c.splits };
        let possible =
            MatmulConfig::possible(arithmetic, rows, (args.n, cols), self.tuning.processors, self.tuning.shared_bytes);
        // Both products of experts have tiles of the same number of rows, which are not split.
        let fits = |config: &&MatmulConfig| sorted.is_none() || (config.tokens, config.splits) == (rule.tokens, 1);
        let possible: Vec<&MatmulConfig> = possible.iter().filter(fits).collect();
        let room = possible.iter().map(|config| config.scratch_bytes(rows, args.n)[0]).max().unwrap_or(0);
        let room = room.max(rule.scratch_bytes(rows, args.n)[0]);
        let values = possible.into_iter().map(value_of).collect();
        let key = format!("matmul.{rows}x{}x{cols}", args.n);
        self.add(key.clone(), value_of(&rule), values, args.weight.bytes);
        if let Some(knob) = self.knobs.iter_mut().find(|knob| knob.key == key) {
            knob.room = knob.room.max(room);
        }
    }
}

/// Returns the part of a kernel's name before its format.
fn family(call: &Call) -> &str {
    call.kernel.split('.').next().unwrap_or(call.kernel)
}

/// Returns the value of a choice of `matmul`'s workgroups, `tokens/features/words/each/splits`.
fn value_of(config: &MatmulConfig) -> String {
    let MatmulConfig { tokens, features, words, each, splits } = config;
    format!("{tokens}/{features}/{words}/{each}/{splits}")
}

/// Returns the value of a choice of the workgroups of `gemv_dots`, `groups/lanes/weight_rows/batch/each`.
fn dots_value(config: DotsConfig, processors: u32) -> String {
    let DotsConfig { groups, lanes, weight_rows, batch, workgroups, .. } = config;
    format!("{groups}/{lanes}/{weight_rows}/{batch}/{}", workgroups.div_ceil(processors))
}

/// Returns the workgroups of `gemv_dots` that are worth trying for steps of one row: half and twice as many groups, groups twice
/// as large, and more rows of W; the rows of x of a workgroup, of which such a step has one, stay.
fn dots_values(config: DotsConfig, processors: u32) -> Vec<String> {
    let mut values = Vec::new();
    for groups in [config.groups / 2, config.groups, config.groups * 2].into_iter().filter(|groups| *groups > 0) {
        for lanes in [config.lanes, config.lanes * 2] {
            for weight_rows in [2, 4] {
                for each in 1..=4 {
                    let config = DotsConfig { groups, lanes, weight_rows, workgroups: each * processors, ..config };
                    values.push(dots_value(config, processors));
                }
            }
        }
    }
    values
}

/// Returns the `skinny` workgroup shapes that are worth trying for a matrix with `rows` rows and `chunks` chunks of 32
/// columns.
fn skinny_values(rows: u32, chunks: u32, processors: u32) -> Vec<String> {
    let mut values = Vec::new();
    for threads in [128, 192, 256, 320, 384, 448, 512, 576, 640, 768, 1024] {
        let groups = threads / 32;
        // Rounds of equal lengths.
        let lengths: BTreeSet<u32> = (1..=chunks).map(|rounds| chunks.div_ceil(groups * rounds)).collect();
        for tiles in 1..=MOST_TILES {
            for &ahead in lengths.range(..=MOST_AHEAD) {
                // If the round reaches past the last chunk in every group, the group multiplies zeros.
                let wasted = ahead > 1 && (ahead - 1) * groups >= chunks;
                // The weights in flight take eight registers per chunk and tile.
                let heavy = ahead * tiles > 8 || ahead * tiles * 8 * threads > 40 << 10;
                let few = tiles > 1 && rows.div_ceil(16 * tiles) < processors / 2;
                if !(wasted || heavy || few) {
                    values.push(format!("{threads}/{tiles}/{ahead}"));
                }
            }
        }
    }
    values
}

/// Like [`skinny_values`], for `skinny_codes` and a matrix with `units` units of columns, of which a lane loads `words` 16-byte words.
fn codes_values(rows: u32, units: u32, words: u32, processors: u32) -> Vec<String> {
    let mut values = Vec::new();
    for threads in [64, 128, 192, 256, 384, 512, 768] {
        for tiles in 1..=MOST_TILES {
            for ahead in [1, 2, 3, 4, 6] {
                let groups = threads / 32;
                let wasted = ahead > 1 && (ahead - 1) * groups >= units;
                // Two steps are in flight.
                let heavy = ahead * tiles * words > 8 || ahead * tiles * words * 8 * threads > 32 << 10;
                let few = tiles > 1 && rows.div_ceil(16 * tiles) < processors / 2;
                if !(wasted || heavy || few) {
                    let each = (1..=4).filter(|each| each * threads <= 1024);
                    values.extend(each.map(|each| format!("{threads}/{tiles}/{ahead}/{each}")));
                }
            }
        }
    }
    values
}

/// Returns the candidates by their distance from `current`, which is left out; `first` comes before all others.
pub(super) fn nearest_first(candidates: &[String], current: &str, first: Option<&str>) -> Vec<String> {
    let numbers = |value: &str| -> Vec<f64> { value.split('/').filter_map(|n| n.parse().ok()).collect() };
    let own = numbers(current);
    let distance = |value: &str| -> f64 { numbers(value).iter().zip(&own).map(|(a, b)| (a / b).ln().abs()).sum() };
    let mut values: Vec<String> = candidates.iter().filter(|value| *value != current).cloned().collect();
    values.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
    if let Some(first) = first.filter(|first| *first != current) {
        values.retain(|value| value != first);
        values.insert(0, first.to_owned());
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DEMO_PATH, KvFormat};
    use crate::device::{Adapter, AdapterKind};
    use crate::gpu::build::defaults::tuning;
    use crate::kernels::gemm::skinny::Matrices;
    use crate::kernels::layout::StateLayout;
    use crate::memory::pack::Format;
    use crate::model::checkpoint::{Checkpoint, WeightKind, WeightSpec};
    use crate::model::decoder::RingLayout;
    use crate::model::decoder::stage::LayerStage;
    use crate::model::demo;
    use crate::quant::number::Number;
    use crate::quant::{Codes, Minimum};
    use std::collections::BTreeMap;
    use std::path::Path;

    fn of_demo(fragments: Option<Matrices>, depth: u32) -> Vec<Knob> {
        of_step(fragments, depth, StepShape::Decode { rows: 1 })
    }

    fn of_step(fragments: Option<Matrices>, depth: u32, shape: StepShape) -> Vec<Knob> {
        with_changes(fragments, depth, shape, &[])
    }

    fn with_changes(fragments: Option<Matrices>, depth: u32, shape: StepShape, changes: &[&str]) -> Vec<Knob> {
        with_weights(
            fragments,
            |_| None,
            changes,
            |decoder, bounds| {
                let knobs = knobs(decoder, &decoder.tuning, bounds, depth, shape);
                for knob in &knobs {
                    let fits = |value: &String| bounds.changed(&decoder.tuning, &knob.key, value).is_some();
                    assert!(knob.candidates.iter().all(fits), "{knob:?}");
                }
                knobs
            },
        )
    }

    /// Calls a function with a decoder of the demo model whose matrices have other formats, where `format` returns one.
    fn with_weights<T>(
        fragments: Option<Matrices>,
        format: impl Fn(&WeightSpec) -> Option<Format>,
        changes: &[&str],
        with: impl FnOnce(&Decoder<'_>, TuningBounds) -> T,
    ) -> T {
        let mut adapter = Adapter::made_up(0, "Some GPU", AdapterKind::Discrete);
        adapter.capabilities.max_invocations = 512;
        adapter.capabilities.max_workgroup_size = [1024; 3];
        adapter.capabilities.max_shared_bytes = 32 << 10;
        let checkpoint =
            Checkpoint::open(&demo::unpack(Path::new(DEMO_PATH), None).expect("a folder")).expect("the demo model");
        let mut weights = checkpoint.weights().to_vec();
        for weight in weights.iter_mut().filter(|weight| weight.kind == WeightKind::Matrix) {
            weight.format = format(weight).unwrap_or(weight.format);
        }
        let mut rules = Tuning { fragments, splits: 8, ..tuning(&adapter, None, 4, 1024) };
        assert!(changes.iter().all(|change| rules.set(change)));
        let decoder = Decoder {
            input_tags: BTreeMap::new(),
            config: &checkpoint.config,
            weights: &weights,
            stage: LayerStage::whole(&checkpoint.config),
            max_buffer_bytes: 1 << 30,
            state: StateLayout {
                slots: 64,
                rows: 64,
                chunk: 512,
                prompts: 1,
                sequences: 1,
                max_pages: 64,
                cells: false,
                windows: false,
            },
            cells: 64,
            drafts: 0,
            drafter: None,
            pages: 64,
            window_pages: None,
            kv_format: KvFormat::F16,
            ring: RingLayout { steps: 16, rows: 64 },
            context: 1024,
            tuning: rules,
        };
        with(&decoder, TuningBounds::new(&adapter, &checkpoint.config))
    }

    /// Affine codes of 4 bits, as `gemv_dots` multiplies them, and codes of other numbers.
    const AFFINE: Format =
        Format::Codes(Codes { bits: 4, group: 32, number: Number::Affine, minimum: Minimum::Stored });
    const OTHERS: Format = Format::Codes(Codes { bits: 4, group: 32, number: Number::E2m1, minimum: Minimum::Stored });

    fn of_codes(shape: StepShape, changes: &[&str]) -> Vec<Knob> {
        with_weights(
            None,
            |_| Some(AFFINE),
            changes,
            |decoder, bounds| knobs(decoder, &decoder.tuning, bounds, 256, shape),
        )
    }

    fn named<'a>(knobs: &'a [Knob], key: &str) -> &'a Knob {
        knobs.iter().find(|knob| knob.key == key).unwrap_or_else(|| panic!("no {key} in {knobs:?}"))
    }

    #[test]
    fn a_step_on_fragments_has_a_choice_a_shape_and_those_of_attention() {
        let knobs = of_demo(Some(Matrices::Emulated), 256);
        let mut keys: Vec<&str> = knobs.iter().map(|knob| knob.key.as_str()).collect();
        keys.sort_unstable();
        let skinny = ["1024x256", "2048x256", "256x256", "256x512", "512x256"].map(|shape| format!("skinny.{shape}"));
        let wanted: Vec<&str> = ["flash_threads"].into_iter().chain(skinny.iter().map(String::as_str)).collect();
        assert_eq!(keys, [wanted, vec!["splits"]].concat());
        assert!(knobs.windows(2).all(|pair| pair[0].bytes >= pair[1].bytes));
        let gate_up = named(&knobs, "skinny.1024x256");
        assert_eq!((gate_up.bytes, gate_up.entry.as_str()), (7 * 1024 * 256 * 2, "skinny.1024x256"));
        assert!(gate_up.candidates.iter().any(|value| value == "128/2/2"), "{gate_up:?}");
        // The device's workgroups cannot have this many threads.
        assert!(gate_up.candidates.iter().all(|value| !value.starts_with("768/") && !value.starts_with("1024/")));
        assert_eq!(named(&knobs, "flash_threads").entry, "flash_threads.8x4x32");
    }

    #[test]
    fn a_step_on_rows_has_choices_of_its_own() {
        let knobs = of_demo(None, 256);
        let keys: Vec<&str> = knobs.iter().map(|knob| knob.key.as_str()).collect();
        assert_eq!(keys, ["gemv_threads", "attention_threads", "splits"]);
        assert_eq!(knobs[0].entry, "gemv_threads.256x512");
    }

    #[test]
    fn short_contexts_do_not_take_splits_from_long_ones() {
        assert_eq!(named(&of_demo(Some(Matrices::Emulated), 256), "splits").candidates, ["8", "12", "16"]);
        let long = of_demo(Some(Matrices::Emulated), LONG);
        assert_eq!(named(&long, "splits").candidates.first().map(String::as_str), Some("1"));
        assert_eq!(named(&long, "splits").candidates.last().map(String::as_str), Some("32"));
    }

    #[test]
    fn shapes_that_waste_or_cannot_fill_the_device_are_not_tried() {
        // With 32 chunks, each of the 16 groups of a workgroup of 512 threads takes two.
        let values = skinny_values(4096, 32, 132);
        assert!(values.contains(&"512/1/2".to_owned()) && !values.contains(&"512/1/3".to_owned()));
        assert!(values.contains(&"128/3/2".to_owned()) && !values.contains(&"128/4/1".to_owned()));
        // With 64 row blocks, two per workgroup would leave most of the 132 processors idle.
        assert!(skinny_values(1024, 96, 132).iter().all(|value| value.split('/').nth(1) == Some("1")));
        assert!(skinny_values(1 << 17, 128, 132).iter().all(|value| {
            let n: Vec<u32> = value.split('/').filter_map(|n| n.parse().ok()).collect();
            n[1] * n[2] <= 8 && n[0] * n[1] * n[2] * 8 <= 40 << 10
        }));
    }

    #[test]
    fn near_values_come_first_and_a_kept_one_before_them() {
        let candidates: Vec<String> = ["128/1/2", "256/1/2", "512/1/2", "512/1/4", "1024/4/8"].map(String::from).into();
        assert_eq!(nearest_first(&candidates, "512/1/2", None), ["256/1/2", "512/1/4", "128/1/2", "1024/4/8"]);
        let kept = nearest_first(&candidates, "512/1/2", Some("1024/4/8"));
        assert_eq!(kept, ["1024/4/8", "256/1/2", "512/1/4", "128/1/2"]);
        assert_eq!(nearest_first(&candidates, "512/1/2", Some("512/1/2")).len(), 4);
    }

    #[test]
    fn a_step_of_several_rows_has_a_choice_a_shape_of_matmul_and_no_others() {
        let shapes = |shape: StepShape| {
            let knobs = of_step(None, 256, shape);
            let keys: std::collections::BTreeSet<String> = knobs.iter().map(|knob| knob.key.clone()).collect();
            assert_eq!(keys.len(), knobs.len());
            for knob in &knobs {
                assert_eq!(knob.entry, knob.key);
                assert!(knob.candidates.len() > 4 && knob.candidates.contains(&knob.rule), "{knob:?}");
                let split = knob.candidates.iter().any(|value| !value.ends_with("/1"));
                assert!(!split || knob.room > 0, "{knob:?}");
            }
            keys
        };
        let of = |rows: u32, shapes: &[&str]| shapes.iter().map(|shape| format!("matmul.{rows}x{shape}")).collect();
        let layers = ["1024x256", "256x256", "256x512", "512x256"];
        assert_eq!(shapes(StepShape::Decode { rows: 64 }), of(64, &[&layers[..], &["2048x256"]].concat()));
        // The LM head is no part of a prompt's step.
        assert_eq!(shapes(StepShape::Prefill { rows: 512 }), of(512, &layers));
        // Few rows use `gemv`, whose choices are those of a step of one row.
        assert!(shapes(StepShape::Decode { rows: 4 }).is_empty());
        assert!(of_step(Some(Matrices::Emulated), 256, StepShape::Decode { rows: 64 }).is_empty());
    }

    #[test]
    fn a_value_that_is_set_is_what_the_steps_of_its_rows_use() {
        let used = |shape: StepShape, change: &str| {
            let knobs = with_changes(None, 256, shape, &["gemv_most=3", change]);
            let key = format!("matmul.{}x512x256", shape.rows());
            (named(&knobs, &key).rule.clone(), named(&knobs, &key.replace("512x256", "256x256")).rule.clone())
        };
        let (value, decode) = ("16/32/1/8/3", |rows| StepShape::Decode { rows });
        let (prompt, change) = (|rows| StepShape::Prefill { rows }, format!("matmul.16x512x256={value}"));
        for shape in [decode(16), prompt(16), prompt(31)] {
            let (own, other) = used(shape, &change);
            assert_eq!(own, value, "{shape:?}");
            assert_ne!(other, value, "{shape:?} of another weight");
        }
        for shape in [decode(4), decode(8), decode(32), prompt(32), prompt(512)] {
            assert_ne!(used(shape, &change).0, value, "{shape:?}");
        }
        let change = change.replace("matmul.16x", "matmul.512x");
        assert_eq!(used(prompt(512), &change).0, value);
        assert_ne!(used(prompt(511), &change).0, value);
    }

    #[test]
    fn given_changes_keep_their_choice_and_those_that_they_cover() {
        let knobs = of_step(None, 256, StepShape::Decode { rows: 64 });
        let knob = named(&knobs, "matmul.64x512x256");
        let covers = ["matmul.64x512x256=16/64/1/4/1", "matmul.64=16/64/1/4/1", "matmul.16=16/64/1/4/1"];
        assert!(covers.iter().all(|change| knob.is_set_by(change)));
        let dots = named(&of_codes(StepShape::Decode { rows: 2 }, &["integer_dots=1"]), "dots_batch").clone();
        assert!(["dots=1/64/2/2/1", "dots_batch=1"].iter().all(|change| dots.is_set_by(change)));
        assert!(!["dots_most=4", "integer_dots=1"].iter().any(|change| dots.is_set_by(change)));
        let others = ["matmul.128=16/64/1/4/1", "matmul.64x256x512=16/64/1/4/1", "gemv_most=3", "tags=0"];
        assert!(!others.iter().any(|change| knob.is_set_by(change)));
    }

    #[test]
    fn a_step_moves_a_limit_only_where_no_step_before_it_is_moved() {
        // Steps of up to 16 rows use `gemv`.
        assert_eq!(other_limit(16, 1, &[]), None);
        assert_eq!(other_limit(16, 4, &[]), Some(3));
        assert_eq!(other_limit(16, 16, &[4]), Some(15));
        assert_eq!(other_limit(16, 4, &[8]), None);
        // Steps of more than 3 rows use `matmul`, as was found for 4.
        assert_eq!(other_limit(3, 16, &[4]), None);
        assert_eq!(other_limit(7, 16, &[4]), Some(16));
        assert_eq!(other_limit(7, 64, &[4, 16]), None);
        // One limit, the other one, both; or what can be moved.
        assert_eq!(other_limits([4, 7], 4, &[]), [[3, 7], [4, 3], [3, 3]]);
        assert_eq!(other_limits([4, 7], 16, &[4]), [[16, 7], [4, 16], [16, 16]]);
        assert_eq!(other_limits([3, 7], 16, &[4]), [[3, 16]]);
        assert!(other_limits([4, 7], 1, &[]).is_empty());
    }

    #[test]
    fn a_step_of_one_row_of_codes_has_a_choice_of_integer_dots_and_one_of_several_that_of_their_rows() {
        let changes = ["integer_dots=1", "processors=8", "dots=2/64/2/2/2", "dots_most=4"];
        let keys = |knobs: &[Knob]| knobs.iter().map(|knob| knob.key.clone()).collect::<Vec<String>>();
        let one = of_codes(StepShape::Decode { rows: 1 }, &changes);
        assert_eq!(keys(&one), ["dots", "attention_threads", "splits"]);
        let dots = named(&one, "dots");
        assert_eq!((dots.rule.as_str(), dots.entry.as_str()), ("2/64/2/2/2", "dots.256x512"));
        assert!(dots.bytes > 0);
        for value in
            ["1/64/2/2/2", "4/64/2/2/2", "2/128/2/2/2", "2/64/4/2/2", "2/64/2/2/1", "2/64/2/2/4", "4/128/4/2/4"]
        {
            assert!(dots.candidates.contains(&value.to_owned()), "{value}: {dots:?}");
        }
        // The rows of x are a choice of steps of several rows.
        assert!(dots.candidates.iter().all(|value| value.split('/').nth(3) == Some("2")), "{dots:?}");
        // The device's workgroups have up to 512 invocations.
        let many = of_codes(StepShape::Decode { rows: 1 }, &["integer_dots=1", "dots=8/64/2/2/2"]);
        assert!(
            named(&many, "dots")
                .candidates
                .iter()
                .all(|value| !value.starts_with("16/") && !value.starts_with("8/128"))
        );

        let rows = |rows, changes: &[&str]| of_codes(StepShape::Decode { rows }, changes);
        for (count, values) in [(2, &["1", "2"][..]), (4, &["1", "2", "4"])] {
            let knobs = rows(count, &changes);
            assert_eq!(keys(&knobs), ["dots_batch"]);
            assert_eq!((knobs[0].rule.as_str(), knobs[0].entry.as_str()), ("2", "dots_batch.256x512"));
            assert_eq!(knobs[0].candidates, values);
        }
        // More rows, devices without integer dots and other weights have no such choice.
        assert!(keys(&rows(8, &changes)).iter().all(|key| !key.starts_with("dots")));
        assert!(keys(&rows(4, &changes[1..2])).is_empty());
        assert_eq!(keys(&of_codes(StepShape::Decode { rows: 1 }, &[]))[0], "gemv_threads");
        let plain = with_changes(None, 256, StepShape::Decode { rows: 1 }, &changes);
        assert_eq!(keys(&plain), ["gemv_threads", "attention_threads", "splits"]);
    }

    #[test]
    fn limits_choose_the_kernels_of_the_weights_that_they_concern() {
        let of = |format: fn(&WeightSpec) -> Option<Format>, changes: &[&str]| -> Vec<Vec<&'static str>> {
            with_weights(None, format, &[&["arithmetic=0"], changes].concat(), |decoder, _| {
                let (tuning, shape) = (&decoder.tuning, StepShape::Decode { rows: 4 });
                let mut all = vec![limits(tuning)];
                all.extend(other_limits(limits(tuning), 4, &[]));
                let kernels = |[dots_most, gemv_most]: [u32; 2]| {
                    let mut names = product_kernels(decoder, &Tuning { dots_most, gemv_most, ..tuning.clone() }, shape);
                    names.sort_unstable();
                    names.dedup();
                    names
                };
                all.into_iter().map(kernels).collect()
            })
        };
        let dots = ["integer_dots=1", "dots_most=4", "gemv_most=7"];
        let (affine, plain) = (|_: &WeightSpec| Some(AFFINE), |_: &WeightSpec| None);
        let head = |weight: &WeightSpec| (weight.name != "embed").then_some(AFFINE);
        let pairs =
            |kernels: &[Vec<&'static str>]| kernels.iter().map(|names| names.join(" ")).collect::<Vec<String>>();
        // As it is, with the first limit below 4, with the second one, with both.
        assert_eq!(pairs(&of(affine, &dots)), ["gemv_dots", "gemv.codes", "gemv_dots", "matmul.codes"]);
        assert_eq!(pairs(&of(|_| Some(OTHERS), &dots)), ["gemv.codes", "gemv.codes", "matmul.codes", "matmul.codes"]);
        assert_eq!(pairs(&of(plain, &dots)), ["gemv.bf16", "gemv.bf16", "matmul.bf16", "matmul.bf16"]);
        let mixed =
            ["gemv.bf16 gemv_dots", "gemv.bf16 gemv.codes", "gemv_dots matmul.bf16", "matmul.bf16 matmul.codes"];
        assert_eq!(pairs(&of(head, &dots)), mixed);
        // Without integer dots, the first limit changes nothing.
        assert_eq!(pairs(&of(affine, &dots[1..])), ["gemv.codes", "gemv.codes", "matmul.codes", "matmul.codes"]);
    }
}
