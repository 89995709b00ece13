//! `ostinato inspect`: what a checkpoint contains, whether it can be run, and what memory it needs. It reads headers
//! and the tokenizer, and needs no device.

use super::chat::visible;
use super::{cache_directory, named};
use crate::config::{Bytes, KvFormat, Quantize};
use crate::gpu::build::limits::LEAST_CONTEXT_PAGES;
use crate::gpu::error::StartError;
use crate::kernels::attention::PAGE_TOKENS;
use crate::memory::pack::{Format, SourceFormat};
use crate::memory::plan::{
    HumanBytes, KvRequest, MemoryLimits, Pages, Plan, PlanEntry, PlanError, Purpose, Side, WindowRequest,
    default_reserve,
};
use crate::model::checkpoint::contents::{Contents, TensorKind};
use crate::model::checkpoint::{Checkpoint, CheckpointProblem, WeightSpec};
use crate::model::config::LayerKind;
use crate::model::decoder::cell_bytes;
use crate::model::demo;
use crate::model::draft;
use crate::model::embedding;
use crate::model::text::Text;
use crate::telemetry::with_causes;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::path::Path;

/// The context for which memory is stated if none is given, as a server plans it.
const CONTEXT: u32 = 32_768;

#[derive(Debug, clap::Args)]
pub(crate) struct Inspect {
    /// Folder of a checkpoint, a GGUF file, ORG/NAME on the Hugging Face hub (downloaded unless it is in the cache), or
    /// an embedded demo model.
    model: String,
    /// Context length for which memory is stated, in tokens. Default: the model's own, at most 32,768.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Memory of a device, such as 24GiB: say whether the model fits there, and with which context if --context names none.
    #[arg(long, value_name = "BYTES")]
    memory: Option<Bytes>,
    /// State memory as with this quantisation at load: int8 or int4.
    #[arg(long, value_name = "int8|int4")]
    quantize: Option<Quantize>,
    /// State memory with keys and values in this format: f16, f32 or int8. Default: f16.
    #[arg(long, value_name = "f16|f32|int8")]
    kv_format: Option<KvFormat>,
    /// State memory with this draft model or draft head too: given like the model.
    #[arg(long, value_name = "MODEL")]
    draft: Option<String>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The tensors of one purpose and element type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    count: u64,
    elements: u64,
    bytes: u64,
}

/// The memory that a model needs on every device, in bytes, as far as it does not depend on the device.
struct Needs {
    /// The context in tokens.
    context: u32,
    /// Whether the context was asked for. The model's own is reduced to what fits, as a server does.
    asked: bool,
    weights: u64,
    /// The weights of the draft model, whose keys and values are in `kv_per_token`.
    draft_weights: u64,
    kv_per_token: u64,
    /// The keys and values of one sequence in layers with a sliding window, if these are given back.
    window: u64,
    /// The recurrent state of one sequence.
    state: u64,
}

pub(super) fn run(args: &Inspect) -> anyhow::Result<()> {
    let path = named::find(&args.model, args.json)?;
    let path = demo::unpack(&path, cache_directory().as_deref())
        .map_err(|(path, source)| StartError::Demo { path, source })?;
    let mut contents = Contents::read(&path)?;
    if let (Ok(checkpoint), Some(to)) = (&mut contents.checkpoint, args.quantize) {
        checkpoint.quantize(to);
    }
    let text = Text::load(&path);
    let reasons = reasons(&contents, &text);
    let drafting = match (&args.draft, &contents.checkpoint) {
        (Some(given), Ok(checkpoint)) => Some(opened_draft(args, given, checkpoint)?),
        _ => None,
    };
    let needs = contents.checkpoint.as_ref().ok().map(|checkpoint| {
        let needs = Needs::of(checkpoint, args.context, args.kv_format);
        drafting.iter().fold(needs, |needs, draft| needs.with_draft(draft, args.kv_format))
    });
    let plan = needs.as_ref().zip(args.memory).map(|(needs, memory)| needs.plan(memory.0));
    let mut out = std::io::stdout().lock();
    let output = match args.json {
        true => format!("{}\n", object(&path, &contents, text.as_ref().ok(), &reasons, needs.as_ref(), plan.as_ref())),
        false => table(&path, &contents, text.as_ref().ok(), &reasons, needs.as_ref(), plan.as_ref()),
    };
    // JSON escapes most control characters itself.
    let output = if args.json && !out.is_terminal() { output.into() } else { visible(&output) };
    Ok(out.write_all(output.as_bytes())?)
}

/// Opens the checkpoint of a model or a draft head that is to draft for a model.
fn opened_draft(args: &Inspect, given: &str, own: &Checkpoint) -> anyhow::Result<Checkpoint> {
    let (path, mut checkpoint) = named::opened_draft(&named::find(given, args.json)?)?;
    draft::check(&checkpoint, own).map_err(|source| StartError::Draft { model: args.model.clone(), path, source })?;
    if let Some(to) = args.quantize {
        checkpoint.quantize(to);
    }
    Ok(checkpoint)
}

/// Returns why the model cannot be run; empty if it can.
fn reasons(contents: &Contents, text: &Result<Option<Text>, crate::model::text::TextError>) -> Vec<String> {
    match (&contents.checkpoint, text) {
        (Err(error), _) => error.problems.iter().map(ToString::to_string).collect(),
        (Ok(_), Err(error)) => vec![with_causes(error)],
        (Ok(checkpoint), Ok(_)) if checkpoint.config.draft_head.is_some() => {
            vec![CheckpointProblem::DraftHead(checkpoint.dir.clone()).to_string()]
        }
        (Ok(checkpoint), Ok(_)) => embedding::of(checkpoint).err().iter().map(ToString::to_string).collect(),
    }
}

impl Needs {
    fn of(checkpoint: &Checkpoint, context: Option<u32>, kv_format: Option<KvFormat>) -> Needs {
        let (config, format) = (&checkpoint.config, kv_format.unwrap_or(KvFormat::F16));
        // The block that drafts has keys and values of its own.
        let drafts = if checkpoint.has_mtp() { config.attention_kinds[0].kv_bytes(format) } else { 0 };
        let state = cell_bytes(config);
        let asked = context.is_some();
        let context = context.unwrap_or(config.context.min(CONTEXT));
        let window = config.recycled_window().filter(|window| *window < context);
        let windowed =
            config.cached_layers().filter(|layer| window.is_some() && config.attention(*layer).window.is_some());
        let windowed: u64 = windowed.map(|layer| config.attention(layer).kv_bytes(format)).sum();
        Needs {
            context,
            asked,
            weights: checkpoint.weight_bytes(),
            draft_weights: 0,
            kv_per_token: config.kv_bytes_per_token(format) - windowed + drafts,
            window: windowed * u64::from(window.unwrap_or(0)),
            state,
        }
    }

    /// Returns the needs with those of a draft model, whose keys and values are kept as long as the sequence.
    fn with_draft(self, draft: &Checkpoint, kv_format: Option<KvFormat>) -> Needs {
        let kv_per_token = draft.config.kv_bytes_per_token(kv_format.unwrap_or(KvFormat::F16));
        let weights = draft.weights_without_mtp().iter().map(WeightSpec::bytes).sum();
        Needs { draft_weights: weights, kv_per_token: self.kv_per_token + kv_per_token, ..self }
    }

    /// Plans one sequence of the context, and as many keys and values as fit.
    fn plan(&self, memory: u64) -> Result<Plan, PlanError> {
        let limits = MemoryLimits {
            device: format!("a device of {}", HumanBytes(memory)),
            free_bytes: memory,
            total_bytes: memory,
            limit_bytes: None,
            max_allocation_bytes: u64::MAX,
            unified: false,
            reserve_bytes: default_reserve(memory),
        };
        let entries = vec![
            PlanEntry::of_buffers(Purpose::Weights, Side::Device, [("weights", self.weights)]),
            PlanEntry::of_buffers(Purpose::DraftWeights, Side::Device, [("draft weights", self.draft_weights)]),
            PlanEntry::of_buffers(Purpose::Recurrent, Side::Device, [("state", self.state)]),
        ];
        let page_bytes = self.kv_per_token * u64::from(PAGE_TOKENS);
        let context_pages = u64::from(self.context.div_ceil(PAGE_TOKENS));
        let least = if self.asked { context_pages } else { context_pages.min(LEAST_CONTEXT_PAGES) };
        let window = (self.window > 0).then_some(WindowRequest {
            page_bytes: self.window,
            page_bytes_in_largest_buffer: 0,
            each: 1,
            least: 1,
            most: 1,
            typical: 0,
        });
        let kv = KvRequest { page_bytes, page_bytes_in_largest_buffer: 0, pages: Pages::All, least, window };
        Plan::new(limits, entries, (page_bytes > 0).then_some(kv))
    }

    /// Returns the largest context, in tokens, for which a plan has room.
    fn fitting(&self, plan: &Plan) -> u32 {
        match self.kv_per_token {
            0 => self.context,
            _ => u32::try_from(plan.kv_pages() * u64::from(PAGE_TOKENS)).unwrap_or(u32::MAX).min(self.context),
        }
    }
}

/// Sums the tensors by purpose and element type.
fn sums(contents: &Contents) -> BTreeMap<(TensorKind, &str), Sum> {
    let mut sums: BTreeMap<(TensorKind, &str), Sum> = BTreeMap::new();
    for tensor in &contents.tensors {
        let sum = sums.entry((TensorKind::of(&tensor.name), &tensor.dtype)).or_default();
        sum.count += 1;
        sum.elements = sum.elements.saturating_add(tensor.elements);
        sum.bytes = sum.bytes.saturating_add(tensor.bytes);
    }
    sums
}

/// Sums a checkpoint's weights by their format on a device, in the order of the formats' names. Matrix units round other
/// matrices beside codes to bfloat16.
fn packed(checkpoint: &Checkpoint) -> BTreeMap<String, Sum> {
    let mut sums: BTreeMap<String, Sum> = BTreeMap::new();
    for weight in checkpoint.weights() {
        let format = match weight.format {
            Format::Codes(codes) => codes.to_string(),
            number => format!("{number:?}").to_lowercase(),
        };
        let sum = sums.entry(format).or_default();
        sum.count += 1;
        sum.elements = sum.elements.saturating_add(weight.elements());
        sum.bytes = sum.bytes.saturating_add(weight.bytes());
    }
    sums
}

/// Sums the elements of a checkpoint's quantised weights by the format in which its files have them.
fn stored(checkpoint: &Checkpoint) -> BTreeMap<String, u64> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for source in checkpoint.weights().iter().flat_map(|weight| &weight.sources) {
        let format = match (&source.matrix, source.map.format) {
            (Some(of), _) => of.matrix.description.storage.to_string(),
            (None, SourceFormat::Blocks(blocks) | SourceFormat::ScaledBlocks(blocks, _)) => blocks.to_string(),
            _ => continue,
        };
        let elements = sums.entry(format).or_default();
        *elements = elements.saturating_add(u64::from(source.map.rows) * u64::from(source.map.cols));
    }
    sums
}

fn table(
    path: &Path,
    contents: &Contents,
    text: Option<&Option<Text>>,
    reasons: &[String],
    needs: Option<&Needs>,
    plan: Option<&Result<Plan, PlanError>>,
) -> String {
    let mut out = String::new();
    let bytes: u64 = contents.files.iter().map(|(_, bytes)| bytes).sum();
    let files = contents.files.len();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{}: {}, {files} {}, {}",
        path.display(),
        contents.format,
        if files == 1 { "file" } else { "files" },
        HumanBytes(bytes)
    );
    // A name of the file cannot begin a line of its own.
    let one_line = |text: &str| text.replace('\n', "\u{FFFD}");
    let mut line = |key: &str, value: String| {
        let _ = writeln!(out, "  {key:<14} {}", one_line(&value));
    };
    let is_head = contents.checkpoint.as_ref().is_ok_and(|checkpoint| checkpoint.config.draft_head.is_some());
    line("architecture", contents.architecture.clone().unwrap_or_else(|| "not named".to_owned()));
    if let Ok(checkpoint) = &contents.checkpoint {
        let config = &checkpoint.config;
        let (windowed, of) = (&config.attention_kinds, &config.attention_kinds[0]);
        let recurrent =
            config.layers_of(LayerKind::GatedDelta).count() + config.layers_of(LayerKind::ShortConv).count();
        let kinds = if recurrent > 0 { format!(" ({recurrent} recurrent)") } else { String::new() };
        let experts = config.experts.map_or(String::new(), |experts| {
            format!(", {} of {} experts of {}", experts.chosen, experts.count, experts.inner)
        });
        let inner = if config.intermediate > 0 { format!(", MLP {}", config.intermediate) } else { String::new() };
        line(
            "shape",
            format!(
                "{} layer{}{kinds}, hidden {}, {} heads of {}, {} of keys and values{inner}{experts}",
                config.layers,
                if config.layers == 1 { "" } else { "s" },
                config.hidden,
                of.heads,
                of.head_dim,
                of.kv_heads
            ),
        );
        if let Some(window) = windowed.iter().find_map(|kind| kind.window) {
            let layers = config.layers_of(LayerKind::Attention);
            let layers = layers.filter(|layer| config.attention(*layer).window.is_some()).count();
            let each = if config.causal { "" } else { " on either side" };
            line("window", format!("{window} tokens{each} in {layers} of {} layers", config.layers));
        }
        if !config.causal {
            line("attention", "not causal, a token sees later ones: gives embeddings only".to_owned());
        }
        if let Some(head) = &config.draft_head {
            let layers = match &head.layers {
                Some(layers) => {
                    let layers: Vec<String> = layers.iter().map(u32::to_string).collect();
                    format!(", the inputs of layers {}", layers.join(", "))
                }
                None => String::new(),
            };
            line(
                "draft head",
                format!(
                    "EAGLE-3, drafts {} of {} tokens from {} hidden states of {}{layers}",
                    config.vocab,
                    head.target_vocab,
                    head.feature_count(),
                    head.target_hidden
                ),
            );
        }
        let (all, active) = (checkpoint.parameters(), checkpoint.active_parameters());
        let active = if active < all { format!(", {} for a token", millions(active)) } else { String::new() };
        line("parameters", format!("{}{active}", millions(all)));
        for (index, (format, elements)) in stored(checkpoint).iter().enumerate() {
            line(if index == 0 { "quantised" } else { "" }, format!("{} in {format}", millions(*elements)));
        }
        let quantised = checkpoint.weights().iter().any(|weight| weight.format.codes().is_some());
        for (index, (format, sum)) in packed(checkpoint).iter().enumerate().filter(|_| quantised) {
            let bits = sum.bytes as f64 * 8.0 / sum.elements.max(1) as f64;
            let key = if index == 0 { "on the device" } else { "" };
            line(key, format!("{} in {format}, {bits:.2} bits each", millions(sum.elements)));
        }
        line("vocabulary", format!("{} tokens", config.vocab));
    }
    if let Some(context) = contents.context {
        line("context", format!("{context} tokens"));
    }
    // A draft head uses that of its model.
    if !is_head {
        line(
            "tokenizer",
            match text {
                Some(Some(text)) if text.has_chat() => "yes, with a chat template".to_owned(),
                Some(Some(_)) => "yes, without a chat template".to_owned(),
                Some(None) => "none: it serves token ids only".to_owned(),
                None => "cannot be read".to_owned(),
            },
        );
    }
    match reasons {
        [] => line("runs", "yes".to_owned()),
        [first, rest @ ..] => {
            line("runs", format!("no: {first}"));
            rest.iter().take(MOST_REASONS).for_each(|reason| line("", reason.clone()));
            if rest.len() > MOST_REASONS {
                line("", format!("and {} more", rest.len() - MOST_REASONS));
            }
        }
    }
    let _ = writeln!(
        out,
        "\n  {:<10} {:<8} {:>8} {:>16} {:>11} {:>6}",
        "tensors", "type", "count", "elements", "bytes", "bits"
    );
    for ((kind, dtype), sum) in sums(contents) {
        let bits = sum.bytes as f64 * 8.0 / sum.elements.max(1) as f64;
        let (dtype, bytes) = (one_line(dtype), HumanBytes(sum.bytes).to_string());
        let _ = writeln!(out, "  {kind:<10} {dtype:<8} {:>8} {:>16} {bytes:>11} {bits:>6.2}", sum.count, sum.elements);
    }
    if let Some(needs) = needs {
        let (weights, token) = (HumanBytes(needs.weights), HumanBytes(needs.kv_per_token));
        let kv = HumanBytes(needs.kv_per_token * u64::from(needs.context));
        let draft = match needs.draft_weights {
            0 => String::new(),
            bytes => format!(" and {} of the draft model", HumanBytes(bytes)),
        };
        let of_sequence = |what: &str, bytes: u64| match bytes {
            0 => String::new(),
            bytes => format!(", {what} {} a sequence", HumanBytes(bytes)),
        };
        let _ = writeln!(
            out,
            "\nmemory: weights {weights}{draft}, keys and values {token} a token, {kv} for {} tokens{}{}",
            needs.context,
            of_sequence("windows", needs.window),
            of_sequence("recurrent state", needs.state)
        );
    }
    match needs.zip(plan) {
        None => {}
        Some((needs, Ok(plan))) => {
            let reduced = match needs.fitting(plan) {
                tokens if tokens < needs.context => format!(" with a context of at most {tokens} tokens"),
                _ => String::new(),
            };
            let _ = writeln!(out, "{plan}\nit fits{reduced}, if working memory ({WORKING}) does too");
        }
        Some((_, Err(error))) => {
            let _ = writeln!(out, "it does not fit: {error}");
        }
    }
    out
}

/// The reasons that are listed after the first one.
const MOST_REASONS: usize = 8;
/// The memory that the plan leaves out because it depends on the device.
const WORKING: &str = "activations and state of sequences, usually some hundred MiB";

fn millions(count: u64) -> String {
    match count {
        0..1_000_000_000 => format!("{:.1} M", count as f64 / 1e6),
        _ => format!("{:.2} B", count as f64 / 1e9),
    }
}

/// Formats everything as one JSON object. Scripts rely on this format.
fn object(
    path: &Path,
    contents: &Contents,
    text: Option<&Option<Text>>,
    reasons: &[String],
    needs: Option<&Needs>,
    plan: Option<&Result<Plan, PlanError>>,
) -> Value {
    let config = contents.checkpoint.as_ref().ok().map(|checkpoint| &checkpoint.config);
    let checkpoint = contents.checkpoint.as_ref().ok();
    let tensors: Vec<Value> = sums(contents)
        .into_iter()
        .map(|((kind, dtype), sum)| {
            json!({
                "kind": kind.to_string(),
                "type": dtype,
                "count": sum.count,
                "elements": sum.elements,
                "bytes": sum.bytes,
            })
        })
        .collect();
    let on_device = checkpoint.map(|checkpoint| {
        let formats = packed(checkpoint).into_iter();
        let value = |(format, sum): (String, Sum)| {
            json!({"format": format, "count": sum.count, "elements": sum.elements, "bytes": sum.bytes})
        };
        formats.map(value).collect::<Vec<Value>>()
    });
    let quantised = checkpoint.map(|checkpoint| {
        let formats = stored(checkpoint).into_iter();
        formats.map(|(format, elements)| json!({"format": format, "elements": elements})).collect::<Vec<Value>>()
    });
    let files: Vec<Value> = contents.files.iter().map(|(path, bytes)| json!({"path": path, "bytes": bytes})).collect();
    json!({
        "path": path,
        "format": contents.format,
        "files": files,
        "architecture": contents.architecture,
        "context": contents.context,
        "layers": config.map(|config| config.layers),
        "hidden": config.map(|config| config.hidden),
        "embeddings_only": config.map(|config| !config.causal),
        "draft_head": config.map(|config| config.draft_head.is_some()),
        "vocabulary": config.map(|config| config.vocab),
        "parameters": checkpoint.map(Checkpoint::parameters),
        "active_parameters": checkpoint.map(Checkpoint::active_parameters),
        "tensors": tensors,
        "quantised": quantised,
        "on_device": on_device,
        "tokenizer": text.map(Option::is_some),
        "chat_template": text.map(|text| text.as_ref().is_some_and(Text::has_chat)),
        "runs": reasons.is_empty(),
        "reasons": reasons,
        "weight_bytes": needs.map(|needs| needs.weights),
        "draft_weight_bytes": needs.map(|needs| needs.draft_weights),
        "kv_bytes_per_token": needs.map(|needs| needs.kv_per_token),
        "window_bytes_per_sequence": needs.map(|needs| needs.window),
        "state_bytes_per_sequence": needs.map(|needs| needs.state),
        "memory": needs.zip(plan).map(|(needs, plan)| match plan {
            Ok(plan) => json!({
                "fits": true,
                "kv_tokens": plan.kv_pages() * u64::from(PAGE_TOKENS),
                "context": needs.fitting(plan),
            }),
            Err(error) => json!({"fits": false, "reason": error.to_string()}),
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_without_a_device_says_both_sizes_or_what_fits() {
        let gib = 1 << 30;
        let needs = Needs {
            context: 1024,
            asked: true,
            weights: 10 * gib,
            draft_weights: 0,
            kv_per_token: 1 << 17,
            window: 0,
            state: 0,
        };
        let plan = needs.plan(16 * gib).expect("it fits");
        assert_eq!(plan.bytes(Purpose::Weights), 10 * gib);
        // The memory after the reserve and the weights holds this many pages of 16 tokens.
        let left = 16 * gib - default_reserve(16 * gib) - 10 * gib;
        assert_eq!(plan.kv_pages(), left / (16 << 17));
        let drafting = Needs { draft_weights: 2 * gib, ..needs }.plan(16 * gib).expect("it fits");
        assert_eq!(drafting.kv_pages(), (left - 2 * gib) / (16 << 17), "a draft model takes the place of pages");
        let error = needs.plan(8 * gib).expect_err("it does not fit").to_string();
        assert!(error.contains("10.0 GiB for weights") && error.contains("a device of 8.0 GiB"), "{error}");
        // The weights fit, and one sequence of the context does not.
        let long = Needs { context: 1 << 16, ..needs };
        let error = long.plan(16 * gib).expect_err("it does not fit").to_string();
        assert!(error.contains("8.0 GiB for kv pages"), "{error}");
        // A context that nobody asked for is reduced, as when the model is loaded.
        let own = Needs { asked: false, ..long };
        assert_eq!(u64::from(own.fitting(&own.plan(16 * gib).expect("it fits"))), left / (16 << 17) * 16);
        // A fiftieth is kept back.
        let error = own.plan((10 * gib + (1 << 20)) * 50 / 49).expect_err("256 tokens do not fit");
        assert!(error.to_string().contains("32.0 MiB for kv pages"), "{error}");
    }
}
