//! `ostinato check-device`: prints what a device gets and lacks, what its driver makes of every pipeline of a model, and
//! what came of the tests at start. Not here: the checks (`gpu::check`).

use super::chat::visible;
use super::progress::Show;
use super::{cache_directory, devices, manual, named};
use crate::config::{self, Selector};
use crate::device::{Adapter, Component, DeviceError, Executable, Instance, InstanceOptions, choose};
use crate::gpu::abilities::Missing;
use crate::gpu::build::defaults::check_tuning;
use crate::gpu::check::{Check, CheckOptions, Outcome, check, missing, registers, spills};
use crate::kernels::region::BuiltPipeline;
use crate::memory::plan::HumanBytes;
use crate::model::checkpoint::Checkpoint;
use crate::telemetry::with_causes;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub(crate) struct CheckDevice {
    /// The device: UUID, PCI address, name, index, or `cpu`. Default: the only GPU.
    #[arg(long, value_name = "SEL")]
    device: Option<Selector>,
    /// Folder of a checkpoint, a GGUF file, ORG/NAME on the Hugging Face hub, or an embedded demo model: `demo` or
    /// `demo-hybrid`.
    #[arg(long, default_value = "demo", value_name = "MODEL")]
    model: String,
    /// Build the pipelines and submit no work to the device: no weights are loaded and no test runs.
    #[arg(long)]
    compile_only: bool,
    /// Changes of the device tuning, for experiments: KEY=VALUE, separated by commas.
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',')]
    tune: Vec<String>,
    /// Load the Khronos validation layer; a message of it fails the check.
    #[arg(long)]
    validation: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Everything that is printed.
struct Report<'a> {
    adapter: &'a Adapter,
    /// The model as named on the command line.
    model: &'a str,
    checkpoint: &'a Checkpoint,
    compile_only: bool,
    missing: Vec<Missing>,
    /// `None` if the device is refused.
    check: Option<&'a Check>,
    /// The messages of the validation layer; `None` without it.
    validation: Option<Vec<String>>,
}

/// Checks a device and prints the report. Returns whether nothing failed.
pub(crate) fn run(args: &CheckDevice) -> anyhow::Result<bool> {
    let instance = Instance::new(&InstanceOptions { validation: args.validation })?;
    let adapters = instance.adapters();
    let adapter = match choose(&adapters, args.device.as_ref()) {
        // A refused device is what this command is for.
        Err(DeviceError::Refused { name, reason }) => adapters
            .iter()
            .find(|adapter| adapter.name == name && adapter.refused.as_ref() == Some(&reason))
            .ok_or(DeviceError::Refused { name, reason })?,
        chosen => chosen?,
    };
    check_tuning(adapter, &args.tune)?;
    let (path, checkpoint) = named::opened(&named::find(&args.model, args.json)?)?;
    let model = config::Model::new(&named::served_as(&args.model), path, Some(adapter.selector()));
    let cache = cache_directory();
    let options = CheckOptions {
        model: &model,
        checkpoint: &checkpoint,
        tune: &args.tune,
        compile_only: args.compile_only,
        cache: cache.as_deref(),
    };
    let found = match adapter.usable() {
        true => Some(check(&instance, adapter, options, &Show::brief(args.json))?),
        false => None,
    };
    let report = Report {
        adapter,
        model: &args.model,
        checkpoint: &checkpoint,
        compile_only: args.compile_only,
        missing: if adapter.described() { missing(adapter) } else { Vec::new() },
        check: found.as_ref(),
        validation: args.validation.then(|| instance.validation_messages()),
    };
    let output = if args.json { format!("{:#}\n", report.object()) } else { visible(&report.text()).into_owned() };
    std::io::stdout().lock().write_all(output.as_bytes())?;
    Ok(report.passed())
}

impl Report<'_> {
    fn passed(&self) -> bool {
        self.check.is_some_and(Check::passed) && self.validation.as_ref().is_none_or(Vec::is_empty)
    }

    fn text(&self) -> String {
        let mut out = String::new();
        self.device(&mut out);
        if self.adapter.described() {
            section(&mut out, "what it lacks, and what that costs");
            if self.missing.is_empty() {
                let _ = writeln!(out, "  nothing");
            }
            for Missing { what, cost } in &self.missing {
                let _ = writeln!(out, "  {what}\n    {cost}");
            }
        }
        if let Some(check) = self.check {
            tests(&mut out, check);
            if !check.pipelines.is_empty() {
                pipelines(&mut out, &check.pipelines);
            }
        }
        if let Some(messages) = &self.validation {
            section(&mut out, &format!("the validation layer has {} messages", messages.len()));
            messages.iter().for_each(|message| {
                let _ = writeln!(out, "  {message}");
            });
        }
        let _ = writeln!(
            out,
            "\n{}",
            match (self.passed(), self.compile_only) {
                (true, true) => "passed: every pipeline was built, nothing was run",
                (true, false) => "passed",
                (false, _) => "failed",
            }
        );
        out
    }

    fn device(&self, out: &mut String) {
        let (adapter, c) = (self.adapter, &self.adapter.capabilities);
        let mut line = |key: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{key:<11} {value}");
        };
        let (major, minor, patch) = adapter.api;
        line("ostinato", format!("{} on {} {}", manual::version(), std::env::consts::OS, std::env::consts::ARCH));
        let pci = adapter.pci.as_ref().map(|pci| format!(", pci {pci}")).unwrap_or_default();
        line("device", format!("{}: {} ({}{pci})", adapter.index, adapter.name, adapter.kind));
        line("driver", format!("{}, Vulkan {major}.{minor}.{patch}", adapter.driver));
        if let Some(reason) = &adapter.refused {
            line("refused", reason.clone());
        }
        if !self.adapter.described() {
            return;
        }
        if let Some(check) = self.check {
            let paths: Vec<String> = check.paths.iter().map(|path| path.words()).collect();
            line("path", paths.join("; or, if a test fails that was not run, "));
        }
        let sizes = if c.subgroup_size_control {
            format!(", {} to {} on request", c.subgroup_min, c.subgroup_max)
        } else {
            String::new()
        };
        line("subgroups", format!("{}{sizes}", c.subgroup_size));
        line(
            "workgroups",
            format!("{} invocations, {} of shared memory", c.max_invocations, HumanBytes(c.max_shared_bytes.into())),
        );
        let shapes: Vec<String> = c
            .matrix_shapes
            .iter()
            .map(|s| format!("{}x{}x{} {} to {}", s.m, s.n, s.k, component(s.input), component(s.accumulator)))
            .collect();
        line("matrices", if shapes.is_empty() { "none".to_owned() } else { shapes.join(", ") });
        for heap in &adapter.memory_heaps {
            let place = if heap.device_local { "of the device" } else { "of the host" };
            let mapped = if heap.host_visible { ", written by the host" } else { "" };
            line("memory", format!("{} {place}{mapped}", HumanBytes(heap.bytes)));
        }
        let (allocation, buffer) = (HumanBytes(c.max_allocation_bytes), HumanBytes(c.max_buffer_bytes));
        line("limits", format!("allocations of {allocation}, buffers of {buffer}"));
        line("features", c.optional().join(", "));
        line("model", format!("{}, {}", self.model, self.checkpoint.config.architecture.name()));
    }

    /// Formats everything as one object. Scripts rely on this format.
    fn object(&self) -> Value {
        let config = &self.checkpoint.config;
        json!({
            "program": manual::version(),
            "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            "device": devices::row(self.adapter),
            "model": {"given": self.model, "architecture": config.architecture.name()},
            "compile_only": self.compile_only,
            "missing": self.missing.iter().map(|Missing { what, cost }| json!({"what": what, "cost": cost})).collect::<Vec<_>>(),
            "paths": self.check.map(|check| check.paths.iter().map(|path| path.name()).collect::<Vec<_>>()),
            "tests": self.check.map(|check| check.tests.iter().map(|test| {
                let (result, detail) = outcome(&test.outcome);
                json!({"name": test.name, "result": result, "detail": detail})
            }).collect::<Vec<_>>()),
            "pipelines": self.check.map(|check| check.pipelines.iter().map(pipeline).collect::<Vec<_>>()),
            "validation": self.validation,
            "passed": self.passed(),
        })
    }
}

fn section(out: &mut String, title: &str) {
    let _ = writeln!(out, "\n{title}");
}

fn tests(out: &mut String, check: &Check) {
    section(out, "tests");
    for test in &check.tests {
        let (result, detail) = outcome(&test.outcome);
        let between = if detail.is_empty() { "" } else { ": " };
        let _ = writeln!(out, "  {:<18} {}{between}{detail}", test.name, result.replace('_', " "));
    }
}

/// Writes the pipelines by kernel.
fn pipelines(out: &mut String, pipelines: &[BuiltPipeline]) {
    let total: Duration = pipelines.iter().map(|pipeline| pipeline.took).sum();
    let failed = pipelines.iter().filter(|pipeline| pipeline.result.is_err()).count();
    let failures = if failed > 0 { format!(", {failed} failed") } else { String::new() };
    section(out, &format!("{} pipelines built in {:.2} s{failures}", pipelines.len() - failed, total.as_secs_f64()));
    let mut kernels: BTreeMap<&str, Vec<&BuiltPipeline>> = BTreeMap::new();
    for pipeline in pipelines {
        kernels.entry(pipeline.planned.kernel).or_default().push(pipeline);
    }
    let _ = writeln!(
        out,
        "  {:<26} {:>5} {:>11} {:>9} {:>12} {:>9} {:>8}",
        "kernel", "built", "slowest ms", "in all ms", "shared bytes", "registers", "spills"
    );
    let shown = |number: Option<u64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    for (kernel, built) in kernels {
        let ok = || built.iter().filter_map(|pipeline| pipeline.result.as_deref().ok());
        let _ = writeln!(
            out,
            "  {kernel:<26} {:>5} {:>11.1} {:>9.1} {:>12} {:>9} {:>8}",
            ok().count(),
            built.iter().map(|pipeline| millis(pipeline.took)).fold(0.0, f64::max),
            built.iter().map(|pipeline| millis(pipeline.took)).sum::<f64>(),
            shown(built.iter().filter_map(|pipeline| pipeline.planned.module.shared_bytes).max().map(u64::from)),
            shown(ok().filter_map(registers).max()),
            shown(ok().filter_map(spills).max()),
        );
        for pipeline in built.iter() {
            if let Err(error) = &pipeline.result {
                let _ = writeln!(out, "    {} failed: {}", constants(pipeline), with_causes(error));
            }
        }
    }
}

/// Returns an outcome's name for programs and its text.
fn outcome(outcome: &Outcome) -> (&'static str, &str) {
    match outcome {
        Outcome::Passed(detail) => ("passed", detail),
        Outcome::Failed(why) => ("failed", why),
        Outcome::NotRun(why) => ("not_run", why),
    }
}

fn pipeline(built: &BuiltPipeline) -> Value {
    let planned = &built.planned;
    let constants: Map<String, Value> = planned.named().map(|(name, value)| (name.to_owned(), value.into())).collect();
    let executables = built.result.as_deref().ok();
    json!({
        "kernel": planned.kernel,
        "constants": constants,
        "workgroup": planned.module.group,
        "shared_bytes": planned.module.shared_bytes,
        "ms": millis(built.took),
        "cpu_ms": millis(built.cpu),
        "registers": executables.and_then(registers),
        "spills": executables.and_then(spills),
        "programs": executables.map(|programs| programs.iter().map(program).collect::<Vec<_>>()),
        "error": built.result.as_ref().err().map(|error| with_causes(error)),
    })
}

fn program(executable: &Executable) -> Value {
    let statistics: Map<String, Value> =
        executable.statistics.iter().map(|statistic| (statistic.name.clone(), number(statistic.value))).collect();
    json!({"name": executable.name, "subgroup_size": executable.subgroup_size, "statistics": statistics})
}

/// Returns a number without a fraction if it has none.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

fn constants(built: &BuiltPipeline) -> String {
    built.planned.named().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

fn component(component: Component) -> String {
    format!("{component:?}").to_lowercase()
}

fn millis(took: Duration) -> f64 {
    took.as_secs_f64() * 1e3
}
