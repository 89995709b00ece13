//! The workgroup shapes that `ostinato tune` found for a device: a file beside the pipeline cache, and the selection of
//! the entries that apply to a model. A file that cannot be read, or that was written for another driver or other
//! shaders, is ignored.
//! Not here: the search for the shapes (`measure::tune`).

use crate::config::{KvFormat, file};
use crate::device::{Adapter, driver_key, write_atomically};
use crate::host::progress::Progress;
use crate::kernels::attention::{Heads, Scores, flash_decode};
use crate::kernels::gemm::matmul::{self, Arithmetic};
use crate::kernels::gemm::skinny::{MOST_AHEAD, Matrices};
use crate::kernels::shaders::SHADER_SET;
use crate::memory::pack::Format;
use crate::model::checkpoint::{Checkpoint, WeightSpec};
use crate::model::config::ModelConfig;
use crate::model::decoder::Tuning;
use crate::quant::number::Number;
use crate::quant::{Codes, Minimum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Entry name → value. The name consists of a tuning key and the shape that the value was found for, such as
/// `skinny.4096x1024` or `splits.16x8x128` (query heads, KV heads, head dimension).
pub(crate) type Entries = BTreeMap<String, String>;

/// The maximum number of row blocks of a `skinny` workgroup. Above this limit and that of [`MOST_AHEAD`], sums and
/// weights no longer fit in registers.
pub(crate) const MOST_TILES: u32 = 4;

/// The maximum number of rows of activations that `gemv` or `gemv_dots` may be chosen for.
const MOST_FEW_ROWS: u32 = 64;

/// The maximum numbers of rows of W of a group of `gemv_dots`, and of rows of x of its workgroups: its code is as many times as
/// long, and an invocation has as many sums as their product.
const MOST_DOTS_ROWS: u32 = 8;

/// The contents of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The device's name, for human readers.
    device: String,
    /// The driver's name and version, for human readers.
    driver: String,
    /// A hash of device, driver and shaders, in hexadecimal; the entries are only valid for these.
    key: String,
    /// The entries by kind of step (see [`variant`]); entries of one kind do not apply to another.
    shapes: BTreeMap<String, Entries>,
}

impl File {
    fn empty(adapter: &Adapter) -> File {
        File {
            device: adapter.name.clone(),
            driver: adapter.driver.clone(),
            key: format!("{:016x}", driver_key(adapter, SHADER_SET)),
            shapes: BTreeMap::new(),
        }
    }

    /// Parses a file. Returns the reason for which it is ignored if it is invalid or does not belong to the adapter.
    fn parse(text: &str, adapter: &Adapter) -> Result<File, String> {
        let file: File = serde_json::from_str(text).map_err(|error| format!("cannot be read ({error})"))?;
        let own = File::empty(adapter);
        if file.key == own.key {
            return Ok(file);
        }
        Err(if file.driver == own.driver && file.device == own.device {
            "is of other shaders than this build's".to_owned()
        } else {
            format!("is of \"{}\" with {}", file.device, file.driver)
        })
    }

    /// Adds entries that were found; `None` removes an entry.
    fn merge(&mut self, variant: &str, found: &BTreeMap<String, Option<String>>) {
        let entries = self.shapes.entry(variant.to_owned()).or_default();
        for (entry, value) in found {
            match value {
                Some(value) => entries.insert(entry.clone(), value.clone()),
                None => entries.remove(entry),
            };
        }
        self.shapes.retain(|_, entries| !entries.is_empty());
    }
}

/// Returns the name of the kind of step that a tuning results in: the layout of the weights, with row-major weights the
/// arithmetic of their products, and whether words are tagged.
pub(crate) fn variant(tuning: &Tuning) -> String {
    let kind = match (tuning.fragments, tuning.arithmetic) {
        (None, Arithmetic::F32) => "rows",
        (None, Arithmetic::F16) => "rows in f16",
        (None, Arithmetic::Matrices(_)) => "rows on matrix units",
        (Some(Matrices::Emulated), _) => "fragments, emulated",
        (Some(Matrices::Cooperative), _) => "fragments",
    };
    if tuning.tags { format!("{kind}, tagged") } else { kind.to_owned() }
}

/// Returns the path of a device's file in a directory.
pub(crate) fn path(folder: &Path, adapter: &Adapter) -> PathBuf {
    folder.join(format!("{}.tuned.json", adapter.file_stem()))
}

/// Reads a device's file. Returns `Ok(None)` if there is no file, and `Err` with the reason if it is ignored.
fn read(folder: &Path, adapter: &Adapter) -> Result<Option<File>, String> {
    match file::read_text(&path(folder, adapter), file::SMALL) {
        Ok(text) => File::parse(&text, adapter).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("cannot be read ({error})")),
    }
}

/// Adds entries to a device's file, by kind of step (see [`variant`]), and returns its path. Replaces a file that is ignored.
pub(crate) fn keep(
    folder: &Path,
    adapter: &Adapter,
    found: &BTreeMap<String, BTreeMap<String, Option<String>>>,
) -> io::Result<PathBuf> {
    let mut file = read(folder, adapter).ok().flatten().unwrap_or_else(|| File::empty(adapter));
    found.iter().for_each(|(variant, found)| file.merge(variant, found));
    let path = path(folder, adapter);
    let text = serde_json::to_string_pretty(&file).map_err(io::Error::other)? + "\n";
    write_atomically(&path, text.as_bytes())?;
    Ok(path)
}

/// Returns the name of the entry that holds the value of tuning key `key` for a model; `None` for a key that `tune`
/// does not change.
pub(crate) fn entry(key: &str, config: &ModelConfig) -> Option<String> {
    match key {
        "flash_threads" | "splits" | "attention_threads" => {
            let of = &config.attention_kinds[0];
            Some(format!("{key}.{}x{}x{}", of.heads, of.kv_heads, of.head_dim))
        }
        "gemv_threads" | "gemv_most" | "dots" | "dots_batch" | "dots_most" => {
            Some(format!("{key}.{}x{}", config.hidden, config.intermediate))
        }
        key if ["skinny.", "codes.", "codes_ptx."].iter().any(|kind| key.starts_with(kind)) => Some(key.to_owned()),
        key => matmul_shape(key).map(|_| key.to_owned()),
    }
}

/// The limits that the workgroup shapes of a tuning must keep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TuningBounds {
    /// The maximum number of invocations of a workgroup.
    pub(crate) threads: u32,
    /// The size of the largest subgroups.
    pub(crate) subgroup: u32,
    /// The model's attention heads.
    pub(crate) heads: Heads,
}

impl TuningBounds {
    pub(crate) fn new(adapter: &Adapter, config: &ModelConfig) -> TuningBounds {
        let capabilities = &adapter.capabilities;
        let of = &config.attention_kinds[0];
        let heads = Heads {
            q: of.heads,
            kv: of.kv_heads,
            dim: of.head_dim,
            rot: of.rotary_dim(),
            qk_norm: config.qk_norm.of_heads(),
            v_norm: config.v_norm,
            gated: config.attention_gate,
            scores: Scores::default(),
            kv_format: KvFormat::F16,
        };
        let threads = capabilities.max_invocations.min(capabilities.max_workgroup_size[0]);
        TuningBounds { threads, subgroup: capabilities.subgroup_max, heads }
    }

    /// Returns the tuning with one change, or `None` if the change is invalid or the device cannot run it.
    pub(crate) fn changed(&self, tuning: &Tuning, key: &str, value: &str) -> Option<Tuning> {
        let mut changed = tuning.clone();
        if !changed.set(&format!("{key}={value}")) {
            return None;
        }
        let most = self.threads;
        let fits = match key {
            "flash_threads" => {
                let (threads, matrices) = (changed.flash_threads, tuning.fragments?);
                threads > 0
                    && threads.is_multiple_of(32)
                    && threads <= most
                    && flash_decode::shared_bytes(self.heads, threads, 1, matrices) <= tuning.shared_bytes
            }
            "splits" => (1..=flash_decode::MOST_SPLITS.min(most)).contains(&changed.splits),
            "attention_threads" => {
                let threads = changed.attention_threads;
                threads.is_power_of_two()
                    && (16..=most).contains(&threads)
                    && self.heads.shared_bytes(1, threads) <= tuning.shared_bytes
            }
            "gemv_threads" => changed.gemv_threads.is_power_of_two() && (4..=most).contains(&changed.gemv_threads),
            "gemv_most" => (1..=MOST_FEW_ROWS).contains(&changed.gemv_most),
            "dots_most" => (1..=MOST_FEW_ROWS).contains(&changed.dots_most),
            "dots" | "dots_batch" => {
                let dots = changed.dots?;
                dots.groups * dots.lanes <= most
                    && dots.lanes.is_multiple_of(self.subgroup.max(1))
                    && dots.weight_rows.max(dots.batch) <= MOST_DOTS_ROWS
                    && dots.fits()
            }
            key if key.starts_with("matmul.") => {
                let (tokens, rows, cols) = matmul_shape(key)?;
                let config = changed.matmul_shapes.get(&(rows, cols, tokens))?;
                config.splits <= matmul::MOST_SPLITS
                    && config.threads(tuning.arithmetic) <= most
                    && config.shared_bytes(tuning.arithmetic) <= tuning.shared_bytes
            }
            // A shape that does not fit in shared memory is not used.
            key if key.starts_with("codes_ptx.") => tuning.ptx,
            key if key.starts_with("codes.") => {
                let shape = codes_shape(key)?;
                let (config, (bits, _, cols, tokens)) = (changed.codes.get(&shape)?, shape);
                // The format whose units take most memory.
                let group = if bits.is_multiple_of(2) { 128 } else { 64 };
                let widest = Codes { bits, group, number: Number::Affine, minimum: Minimum::Stored };
                let shared = config.shared_bytes(Format::Codes(widest), cols, tokens, tuning.fragments?);
                config.threads <= most && config.tiles <= MOST_TILES && shared <= tuning.shared_bytes
            }
            key => {
                let (rows, cols) = key.strip_prefix("skinny.")?.split_once('x')?;
                let config = changed.skinny.get(&(rows.parse().ok()?, cols.parse().ok()?))?;
                config.threads <= most
                    && config.tiles <= MOST_TILES
                    && config.ahead <= MOST_AHEAD
                    && config.shared_bytes(1, tuning.fragments?) <= tuning.shared_bytes
            }
        };
        fits.then_some(changed)
    }
}

/// The entries of a device's file that apply to the shapes of a model.
#[derive(Clone, Debug)]
pub struct Tuned {
    bounds: TuningBounds,
    /// By kind of step: pairs of tuning key and value.
    changes: BTreeMap<String, Vec<(String, String)>>,
}

impl Tuned {
    /// Returns no entries.
    pub fn none(adapter: &Adapter, checkpoint: &Checkpoint) -> Tuned {
        Tuned { bounds: TuningBounds::new(adapter, &checkpoint.config), changes: BTreeMap::new() }
    }

    /// Reads the entries for a model from a directory. If the file is ignored, reports the reason as a line of
    /// progress.
    pub fn of_model(
        folder: Option<&Path>,
        adapter: &Adapter,
        checkpoint: &Checkpoint,
        progress: &dyn Progress,
    ) -> Tuned {
        let mut tuned = Tuned::none(adapter, checkpoint);
        let Some(folder) = folder else { return tuned };
        match read(folder, adapter) {
            Ok(file) => {
                let shapes = file.map(|file| file.shapes).unwrap_or_default();
                let of_model = |entries: Entries| entries.into_iter().filter_map(|e| occurs(e, checkpoint)).collect();
                tuned.changes = shapes.into_iter().map(|(variant, entries)| (variant, of_model(entries))).collect();
            }
            Err(why) => progress.line(&format!(
                "{} {why} and is not used: `ostinato tune` writes it anew",
                path(folder, adapter).display()
            )),
        }
        tuned
    }

    /// Applies the entries for the tuning's kind of step that the device can run. Returns their number.
    pub fn apply(&self, tuning: &mut Tuning) -> usize {
        let mut applied = 0;
        for (key, value) in self.changes.get(&variant(tuning)).into_iter().flatten() {
            if let Some(changed) = self.bounds.changed(tuning, key, value) {
                *tuning = changed;
                applied += 1;
            }
        }
        applied
    }

    /// Returns the value of a tuning key for a kind of step.
    pub(crate) fn value(&self, variant: &str, key: &str) -> Option<&str> {
        let (_, value) = self.changes.get(variant)?.iter().find(|(of, _)| of == key)?;
        Some(value)
    }
}

/// Returns the bits of a code, the rows and columns of W and the rows of x of a key `codes.BITSxROWSxCOLUMNS` or
/// `codes_ptx.BITSxROWSxCOLUMNS`, with one row of x, or `codes.BITSxROWSxCOLUMNSxTOKENS`.
fn codes_shape(key: &str) -> Option<(u32, u32, u32, u32)> {
    let shape = key.strip_prefix("codes.").or_else(|| key.strip_prefix("codes_ptx."))?;
    let numbers: Result<Vec<u32>, _> = shape.split('x').map(str::parse).collect();
    match numbers.ok()?[..] {
        [bits, rows, cols] => Some((bits, rows, cols, 1)),
        [bits, rows, cols, tokens] if tokens > 1 => Some((bits, rows, cols, tokens)),
        _ => None,
    }
}

/// Returns the rows of x and the rows and columns of W of a key `matmul.TOKENSxROWSxCOLUMNS`.
pub(crate) fn matmul_shape(key: &str) -> Option<(u32, u32, u32)> {
    let numbers: Result<Vec<u32>, _> = key.strip_prefix("matmul.")?.split('x').map(str::parse).collect();
    let &[tokens, rows, cols] = &numbers.ok()?[..] else { return None };
    Some((tokens, rows, cols))
}

/// Returns the tuning key and value of an entry if the model has the entry's shape.
fn occurs((name, value): (String, String), checkpoint: &Checkpoint) -> Option<(String, String)> {
    let (key, shape) = name.split_once('.')?;
    if ["codes", "codes_ptx"].contains(&key) {
        let (bits, rows, cols, _) = codes_shape(&name)?;
        let fits = |w: &WeightSpec| {
            w.cols == cols && w.rows >= rows && w.format.codes().is_some_and(|codes| codes.bits == bits)
        };
        return checkpoint.weights().iter().any(fits).then_some((name, value));
    }
    if key == "matmul" {
        let (_, rows, cols) = matmul_shape(&name)?;
        // Of experts, the rows are those of one.
        return checkpoint.weights().iter().any(|w| w.cols == cols && w.rows >= rows).then_some((name, value));
    }
    if key != "skinny" {
        return (entry(key, &checkpoint.config)? == name).then(|| (key.to_owned(), value));
    }
    let (rows, cols) = shape.split_once('x')?;
    let (rows, cols): (u32, u32) = (rows.parse().ok()?, cols.parse().ok()?);
    // A weight may be stored in parts with fewer rows.
    checkpoint.weights().iter().any(|w| w.cols == cols && w.rows >= rows).then_some((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DEMO_PATH;
    use crate::device::AdapterKind;
    use crate::gpu::build::defaults::tuning;
    use crate::model::decoder::most_gemv_rows;
    use crate::model::demo;

    fn found(entries: &[(&str, Option<&str>)]) -> BTreeMap<String, Option<String>> {
        entries.iter().map(|(entry, value)| ((*entry).to_owned(), value.map(str::to_owned))).collect()
    }

    fn of(variant: &str, entries: &[(&str, Option<&str>)]) -> BTreeMap<String, BTreeMap<String, Option<String>>> {
        [(variant.to_owned(), found(entries))].into()
    }

    fn demo_model() -> Checkpoint {
        Checkpoint::open(&demo::unpack(Path::new(DEMO_PATH), None).expect("a folder")).expect("the demo model")
    }

    fn adapter() -> Adapter {
        let mut adapter = Adapter::made_up(0, "Some GPU", AdapterKind::Discrete);
        adapter.capabilities.max_invocations = 1024;
        adapter.capabilities.max_workgroup_size = [1024; 3];
        adapter.capabilities.max_shared_bytes = 48 << 10;
        (adapter.capabilities.subgroup_min, adapter.capabilities.subgroup_max) = (32, 32);
        adapter
    }

    fn emulated(adapter: &Adapter) -> Tuning {
        Tuning { fragments: Some(Matrices::Emulated), ..tuning(adapter, None, 4, 1024) }
    }

    #[test]
    fn what_is_found_joins_what_is_kept() {
        let mut file = File::empty(&adapter());
        file.merge("rows", &found(&[("splits.8x4x32", Some("8")), ("gemv_threads.256x512", Some("64"))]));
        file.merge("fragments", &found(&[("skinny.512x256", Some("128/1/2"))]));
        file.merge("rows", &found(&[("splits.8x4x32", None), ("gemv_threads.256x512", Some("32"))]));
        assert_eq!(file.shapes["rows"], Entries::from([("gemv_threads.256x512".to_owned(), "32".to_owned())]));
        file.merge("rows", &found(&[("gemv_threads.256x512", None)]));
        assert_eq!(file.shapes.keys().collect::<Vec<_>>(), ["fragments"]);
    }

    #[test]
    fn a_file_holds_for_one_driver_and_one_set_of_shaders() {
        let adapter = adapter();
        let mut file = File::empty(&adapter);
        file.merge("rows", &found(&[("splits.8x4x32", Some("8"))]));
        let text = serde_json::to_string_pretty(&file).expect("text");
        assert_eq!(File::parse(&text, &adapter).as_ref(), Ok(&file));
        let mut newer = adapter.clone();
        newer.driver = "test 2.0".to_owned();
        assert_eq!(File::parse(&text, &newer), Err("is of \"Some GPU\" with test 1.0".to_owned()));
        let other = text.replace(&file.key, "0000000000000000");
        assert_eq!(File::parse(&other, &adapter), Err("is of other shaders than this build's".to_owned()));
        for bad in ["", "{", "[]", "{\"device\": 1}", &text.replace("shapes", "forms")] {
            let why = File::parse(bad, &adapter).expect_err(bad);
            assert!(why.starts_with("cannot be read"), "{why}");
        }
    }

    #[test]
    fn a_model_uses_the_entries_of_its_shapes_and_variant() {
        let (folder, adapter, model) = (tempfile::tempdir().expect("a folder"), adapter(), demo_model());
        let entries = [
            ("skinny.512x256", Some("128/2/4")),
            ("skinny.512x999", Some("128/2/4")),
            ("flash_threads.8x4x32", Some("64")),
            ("splits.8x2x32", Some("3")),
            // Entries that the device cannot run, that cannot be parsed, or that `tune` does not write.
            ("skinny.1024x256", Some("64000/2/4")),
            ("skinny.256x256", Some("many")),
            ("tags.8x4x32", Some("1")),
            ("nonsense", Some("1")),
        ];
        keep(folder.path(), &adapter, &of("fragments, emulated", &entries)).expect("kept");
        struct Silent;
        impl Progress for Silent {
            fn line(&self, text: &str) {
                panic!("{text}");
            }
            fn warning(&self, text: &str) {
                panic!("{text}");
            }
            fn step(&self, _: &str, _: u64, _: u64, _: crate::host::progress::Unit) {}
        }
        let tuned = Tuned::of_model(Some(folder.path()), &adapter, &model, &Silent);
        let plain = emulated(&adapter);
        let mut changed = plain.clone();
        assert_eq!(tuned.apply(&mut changed), 2);
        let mut wanted = plain.clone();
        assert!(wanted.set("skinny.512x256=128/2/4") && wanted.set("flash_threads=64"));
        assert_eq!(changed, wanted);
        assert_eq!(tuned.value("fragments, emulated", "flash_threads"), Some("64"));
        let mut rows = Tuning { fragments: None, ..plain };
        assert_eq!(tuned.apply(&mut rows), 0);
    }

    #[test]
    fn what_exceeds_the_device_is_no_change() {
        let (adapter, model) = (adapter(), demo_model());
        let bounds = TuningBounds::new(&adapter, &model.config);
        let mut tuning = emulated(&adapter);
        assert!(tuning.set("integer_dots=1"));
        for (key, good, bad) in [
            ("skinny.512x256", "256/1/2", ["2048/1/2", "1024/4/8", "256/5/2", "256/1/9"]),
            ("flash_threads", "128", ["0", "48", "2048", "x"]),
            ("splits", "8", ["0", "65", "-1", ""]),
            ("attention_threads", "64", ["0", "48", "2048", "x"]),
            ("gemv_threads", "64", ["0", "48", "2048", "x"]),
            ("gemv_most", "3", ["0", "65", "-1", ""]),
            ("dots_most", "3", ["0", "65", "-1", ""]),
            // More invocations than a workgroup has, groups of half a subgroup, too many rows of W and of x; too much shared
            // memory; and what is no shape.
            ("dots", "8/64/4/2/3", ["32/64/2/2/2", "8/16/2/2/2", "8/64/16/2/2", "8/64/2/16/2"]),
            ("dots", "8/128/2/4/1", ["4/256/2/1/1", "8/64/3/2/2", "8/64/2/2/0", "65536/65536/2/2/2"]),
            ("dots", "1/32/2/1/1", ["8/64/2/2", "8/64/2/2/2/2", "0/64/2/2/2", ""]),
            ("dots_batch", "4", ["0", "9", "4096", "x"]),
            // Other tiles, more splits, sums and shared memory than a device runs.
            ("matmul.16x512x256", "16/64/1/4/2", ["16/64/1/3/2", "16/64/1/4/64", "8/8/1/2", "512/256/8/64/1"]),
        ] {
            assert!(bounds.changed(&tuning, key, good).is_some(), "{key}={good}");
            for bad in bad {
                assert!(bounds.changed(&tuning, key, bad).is_none(), "{key}={bad}");
            }
        }
        assert!(bounds.changed(&tuning, "nonsense", "1").is_none());
        // A device without integer dot products has no workgroups for them.
        let without = Tuning { dots: None, ..tuning.clone() };
        for (key, value) in [("dots", "8/64/4/2/3"), ("dots_batch", "4")] {
            assert!(bounds.changed(&without, key, value).is_none(), "{key}");
        }
        // Several rows of x take more shared memory.
        let codes = |tokens: u32| format!("codes.4x512x256x{tokens}");
        assert!(bounds.changed(&tuning, &codes(2), "64/1/1/4").is_some());
        assert!(bounds.changed(&tuning, &codes(4096), "64/1/1/4").is_none());
    }

    #[test]
    fn shapes_of_matmul_are_set_one_by_one_or_all_from_a_number_of_rows_on() {
        let mut tuning = Tuning { fragments: None, arithmetic: Arithmetic::F32, ..emulated(&adapter()) };
        let before = tuning.clone();
        for bad in
            ["16x512=16/32/1/4/1", "16x512x256x2=16/32/1/4/1", "x=16/32/1/4/1", "16x512x256=16/32/1/4", "16=0/32/1/4/1"]
        {
            assert!(!tuning.set(&format!("matmul.{bad}")), "{bad}");
        }
        assert_eq!(tuning, before);
        assert!(tuning.set("matmul.16x512x256=16/32/1/4/2") && tuning.set("matmul.64x512x256=32/32/1/4/2"));
        assert!(tuning.set("matmul.32=64/64/2/4/1"));
        // From 32 rows on, the last change counts.
        let tokens = |tuning: &Tuning, rows| tuning.matmul_of(rows, 512, 256).map(|config| config.tokens);
        assert_eq!([16, 64].map(|rows| tokens(&tuning, rows)), [Some(16), None]);
        assert!(tuning.set("matmul.64x512x256=32/32/1/4/2"));
        assert_eq!(tokens(&tuning, 64), Some(32));
    }

    #[test]
    fn an_arithmetic_that_is_set_again_leaves_the_rows_of_gemv() {
        let mut tuning = emulated(&adapter());
        tuning.set_arithmetic(Arithmetic::F32);
        assert!(tuning.set("gemv_most=3") && tuning.set("dots_most=2") && tuning.set("arithmetic=0"));
        assert_eq!((tuning.gemv_most, tuning.dots_most), (3, 2));
        assert!(tuning.set("arithmetic=1"));
        assert_eq!((tuning.arithmetic, tuning.gemv_most), (Arithmetic::F16, most_gemv_rows(Arithmetic::F16)));
    }

    #[test]
    fn the_rows_of_integer_dots_are_set_after_their_workgroups() {
        let (folder, adapter, model) = (tempfile::tempdir().expect("a folder"), adapter(), demo_model());
        let entries = [
            ("dots_batch.256x512", Some("4")),
            ("dots.256x512", Some("4/64/4/1/3")),
            ("dots_most.256x512", Some("6")),
            ("dots_most.4096x12288", Some("8")),
        ];
        let plain = Tuning { fragments: None, tags: false, arithmetic: Arithmetic::F32, ..emulated(&adapter) };
        keep(folder.path(), &adapter, &of("rows", &entries)).expect("kept");
        let tuned = Tuned::of_model(Some(folder.path()), &adapter, &model, &crate::host::progress::Quiet);
        let mut rows = plain.clone();
        assert!(rows.set("integer_dots=1"));
        assert_eq!(tuned.apply(&mut rows), 3);
        let dots = rows.dots.expect("integer dots");
        assert_eq!((dots.groups, dots.lanes, dots.weight_rows, dots.batch), (4, 64, 4, 4));
        assert_eq!((dots.workgroups, rows.dots_most), (3 * rows.processors, 6));
        // Without integer dots only the number of rows is set, which changes nothing.
        let mut without = plain;
        assert_eq!((tuned.apply(&mut without), without.dots), (1, None));
    }

    #[test]
    fn batches_and_prompts_have_entries_for_their_rows_and_arithmetic() {
        let (folder, adapter, model) = (tempfile::tempdir().expect("a folder"), adapter(), demo_model());
        let entries = [
            ("gemv_most.256x512", Some("3")),
            ("matmul.16x512x256", Some("16/32/1/4/2")),
            ("matmul.512x512x256", Some("64/64/1/8/1")),
            // Another model's, and those that cannot be parsed or do not fit.
            ("matmul.16x4096x4096", Some("16/32/1/4/2")),
            ("gemv_most.4096x12288", Some("7")),
            ("matmul.16", Some("16/32/1/4/2")),
            ("matmul.64x512x256", Some("7/32/1/4/2")),
        ];
        let rows = Tuning { fragments: None, tags: false, arithmetic: Arithmetic::F32, ..emulated(&adapter) };
        assert_eq!(variant(&rows), "rows");
        keep(folder.path(), &adapter, &of("rows", &entries)).expect("kept");
        let tuned = Tuned::of_model(Some(folder.path()), &adapter, &model, &crate::host::progress::Quiet);
        let mut changed = rows.clone();
        assert_eq!(tuned.apply(&mut changed), 3);
        assert_eq!(changed.gemv_most, 3);
        let tokens = |rows: u32| changed.matmul_of(rows, 512, 256).map(|config| config.tokens);
        let wanted = [(8, None), (16, Some(16)), (31, Some(16)), (32, None), (511, None), (512, Some(64))];
        assert_eq!(wanted.map(|(rows, _)| tokens(rows)), wanted.map(|(_, tokens)| tokens));
        assert_eq!((tokens(4096), changed.matmul_of(16, 256, 512)), (Some(64), None));
        // Products in another arithmetic have entries of their own.
        let mut halves = Tuning { arithmetic: Arithmetic::F16, ..rows };
        assert_eq!((variant(&halves).as_str(), tuned.apply(&mut halves)), ("rows in f16", 0));
    }
}
