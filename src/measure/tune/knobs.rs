//! The choices of a step's workgroups that a search changes, and the values that are worth trying for each. Pure.
//! Not here: which value is the fastest (`search`), and whether a device can run it (`gpu::tuned::TuningBounds`).

use crate::gpu::tuned;
use crate::gpu::tuned::{MOST_TILES, TuningBounds};
use crate::kernels::attention::PAGE_TOKENS;
use crate::kernels::codes_of;
use crate::kernels::gemm::matmul::{Arithmetic, MatmulConfig};
use crate::kernels::gemm::skinny::MOST_AHEAD;
use crate::kernels::recording::{Call, Op};
use crate::kernels::shaders::{
    MatmulArgs, MatmulConstants, SkinnyArgs, SkinnyCodesArgs, SkinnyCodesConstants, SkinnyConstants,
};
use crate::memory::pack::codes::unit_cols;
use crate::model::decoder::{Decoder, StepShape, Tuning};
use std::collections::BTreeSet;

/// The key of the choice from how many rows on products use `matmul`.
pub(super) const GEMV_MOST: &str = "gemv_most";

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
        key == self.key || of_all
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

/// Returns the choice from how many rows on `matmul` is used, as a decode step of `rows` rows can move it; `rule` is its
/// default value.
pub(super) fn gemv_most(decoder: &Decoder<'_>, rule: u32, candidate: u32) -> Option<Knob> {
    Some(Knob {
        key: GEMV_MOST.to_owned(),
        entry: tuned::entry(GEMV_MOST, decoder.config)?,
        rule: rule.to_string(),
        candidates: vec![candidate.to_string()],
        bytes: 0,
        room: 0,
    })
}

/// Returns the maximum number of rows of `gemv` with which a step of `rows` rows uses the other kernel; `None` if that would
/// change the kernel of a step of fewer rows that was searched before, of `earlier` rows. The number leaves as many other steps
/// as they are as it can.
pub(super) fn other_gemv_most(current: u32, rows: u32, earlier: &[u32]) -> Option<u32> {
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
            _ => {}
        }
    }

    fn add_codes(&mut self, call: &Call, rows: u32) {
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
    use crate::model::checkpoint::Checkpoint;
    use crate::model::decoder::RingLayout;
    use crate::model::decoder::stage::LayerStage;
    use crate::model::demo;
    use std::collections::BTreeMap;
    use std::path::Path;

    fn of_demo(fragments: Option<Matrices>, depth: u32) -> Vec<Knob> {
        of_step(fragments, depth, StepShape::Decode { rows: 1 })
    }

    fn of_step(fragments: Option<Matrices>, depth: u32, shape: StepShape) -> Vec<Knob> {
        with_changes(fragments, depth, shape, &[])
    }

    fn with_changes(fragments: Option<Matrices>, depth: u32, shape: StepShape, changes: &[&str]) -> Vec<Knob> {
        let mut adapter = Adapter::made_up(0, "Some GPU", AdapterKind::Discrete);
        adapter.capabilities.max_invocations = 512;
        adapter.capabilities.max_workgroup_size = [1024; 3];
        adapter.capabilities.max_shared_bytes = 32 << 10;
        let checkpoint =
            Checkpoint::open(&demo::unpack(Path::new(DEMO_PATH), None).expect("a folder")).expect("the demo model");
        let mut rules = Tuning { fragments, splits: 8, ..tuning(&adapter, None, 4, 1024) };
        assert!(changes.iter().all(|change| rules.set(change)));
        let decoder = Decoder {
            input_tags: BTreeMap::new(),
            config: &checkpoint.config,
            weights: checkpoint.weights(),
            stage: LayerStage::whole(&checkpoint.config),
            max_buffer_bytes: 1 << 30,
            state: StateLayout {
                slots: 64,
                rows: 64,
                chunk: 512,
                prompts: 1,
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
            tuning: rules.clone(),
        };
        let bounds = TuningBounds::new(&adapter, &checkpoint.config);
        let knobs = knobs(&decoder, &rules, bounds, depth, shape);
        for knob in &knobs {
            assert!(knob.candidates.iter().all(|value| bounds.changed(&rules, &knob.key, value).is_some()));
        }
        knobs
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
        let others = ["matmul.128=16/64/1/4/1", "matmul.64x256x512=16/64/1/4/1", "gemv_most=3", "tags=0"];
        assert!(!others.iter().any(|change| knob.is_set_by(change)));
    }

    #[test]
    fn a_step_moves_the_rows_of_gemv_only_where_no_step_before_it_is_moved() {
        // Steps of up to 16 rows use `gemv`.
        assert_eq!(other_gemv_most(16, 1, &[]), None);
        assert_eq!(other_gemv_most(16, 4, &[]), Some(3));
        assert_eq!(other_gemv_most(16, 16, &[4]), Some(15));
        assert_eq!(other_gemv_most(16, 4, &[8]), None);
        // Steps of more than 3 rows use `matmul`, as was found for 4.
        assert_eq!(other_gemv_most(3, 16, &[4]), None);
        assert_eq!(other_gemv_most(7, 16, &[4]), Some(16));
        assert_eq!(other_gemv_most(7, 64, &[4, 16]), None);
    }
}
