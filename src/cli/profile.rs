//! `ostinato profile`: shows where a server spent the time of its last steps, or of its next ones with every kernel
//! timed: a table on standard output, and a trace file. Not here: the format of the file (`perfetto`).

use super::connect::{self, Reach};
use super::generate::Refused;
use super::{Usage, perfetto};
use crate::engine::variants::stage;
use crate::service::proto;
use anyhow::Context;
use prost::Message;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

/// Limit of the received message: far more than a profile of 256 plans with kernels, which has some tens of megabytes.
const MESSAGE_BYTES: usize = 512 << 20;

#[derive(Debug, clap::Args)]
pub(crate) struct Profile {
    /// The server's address: HOST:PORT or a URI. Default: 127.0.0.1:50051, where a server listens unless configured
    /// otherwise.
    #[arg(long, value_name = "ADDR")]
    server: Option<String>,
    #[command(flatten)]
    reach: Reach,
    /// Name of the served model. Default: the server's only model.
    #[arg(long)]
    model: Option<String>,
    /// The replica's name, or its device's UUID, PCI address, index or name. Default: the least loaded replica.
    #[arg(long, value_name = "SEL")]
    device: Option<String>,
    /// Number of plans to profile: the last ones, or with --kernels the next ones. A plan is one prompt step or several
    /// decode steps that are submitted together.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    steps: u32,
    /// Time every kernel in one step of each plan.
    #[arg(long)]
    kernels: bool,
    /// With --kernels: how long to wait for the next plans, 0.1 to 60 seconds.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    wait: f64,
    /// Also include the load of the weights in the trace, however long ago it was.
    #[arg(long, requires = "out")]
    load: bool,
    /// Write a trace file, which ui.perfetto.dev displays.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &Profile) -> anyhow::Result<()> {
    if args.kernels && args.steps > 256 {
        return Err(Usage(format!("--steps is {}, at most 256 with --kernels", args.steps)).into());
    }
    if !(0.1..=60.0).contains(&args.wait) {
        return Err(Usage(format!("--wait is {}, must be from 0.1 to 60", args.wait)).into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the threads of the client")?;
    let server = args.server.clone().unwrap_or_else(connect::usual);
    let profile = runtime.block_on(async {
        let client = args.reach.connect(&server).await?;
        let request = proto::ProfileRequest {
            model: args.model.clone().unwrap_or_default(),
            device: args.device.clone().unwrap_or_default(),
            last: args.steps,
            kernels: args.kernels,
            wait_seconds: if args.kernels { args.wait } else { 0.0 },
        };
        let answer = client.max_decoding_message_size(MESSAGE_BYTES).profile(request).await;
        Ok::<_, anyhow::Error>(answer.map_err(Refused::from)?.into_inner())
    })?;
    if profile.steps.is_empty() {
        return Err(
            Usage(format!("\"{}\" has run nothing to profile; send it a request meanwhile", profile.replica)).into()
        );
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{}", table(&profile))?;
    if let Some(path) = &args.out {
        let bytes = perfetto::trace(&profile, args.load).encode_to_vec();
        std::fs::write(path, &bytes).with_context(|| format!("cannot write {}", path.display()))?;
        writeln!(out, "{} bytes in {}: open it at https://ui.perfetto.dev", bytes.len(), path.display())?;
    }
    Ok(())
}

/// The summed time of one region or kernel over the profile.
#[derive(Default)]
struct Sum {
    runs: u32,
    us: f64,
}

/// The runs of a region whose kernels were timed: their total time, and the kernels by stage and shader.
#[derive(Default)]
struct Timed<'a> {
    whole: Sum,
    kernels: BTreeMap<(String, &'a str), Sum>,
}

fn us(begin: u64, end: u64) -> f64 {
    end.saturating_sub(begin) as f64 / 1e3
}

/// Formats a summary: the regions, and the kernels of each region that was timed inside.
fn table(profile: &proto::ProfileResponse) -> String {
    let mut regions: BTreeMap<&str, Sum> = BTreeMap::new();
    // The runs with timed kernels, by region.
    let mut timed: BTreeMap<&str, Timed<'_>> = BTreeMap::new();
    let all = profile.steps.iter().flat_map(|step| &step.submissions).flat_map(|submission| &submission.regions);
    for region in all {
        let took = us(region.begin_ns, region.end_ns);
        if region.kernels.is_empty() {
            let sum = regions.entry(&region.name).or_default();
            (sum.runs, sum.us) = (sum.runs + region.runs, sum.us + took);
            continue;
        }
        let Timed { whole, kernels } = timed.entry(&region.name).or_default();
        (whole.runs, whole.us) = (whole.runs + 1, whole.us + took);
        for kernel in &region.kernels {
            let sum = kernels.entry((stage(&kernel.label), &kernel.kernel)).or_default();
            (sum.runs, sum.us) = (sum.runs + 1, sum.us + us(kernel.begin_ns, kernel.end_ns));
        }
    }
    let plans = profile.steps.len();
    let mut text = format!("{}: {plans} plans\n\n{:<24} {:>8} {:>12}\n", profile.replica, "region", "runs", "us each");
    for (name, sum) in &regions {
        text += &format!("{name:<24} {:>8} {:>12.1}\n", sum.runs, sum.us / f64::from(sum.runs.max(1)));
    }
    for (name, Timed { whole, kernels }) in &timed {
        let runs = f64::from(whole.runs);
        let inside: f64 = kernels.values().map(|sum| sum.us).sum::<f64>() / runs;
        let each = whole.us / runs;
        text += &format!(
            "\n{name} with every kernel timed, {} runs of {each:.1} us: kernels {inside:.1}, before and behind them {:.1}\n",
            whole.runs,
            each - inside,
        );
        if let Some(other) = regions.get(name) {
            let without = other.us / f64::from(other.runs.max(1));
            text += &format!("without stamps between its kernels it takes {without:.1} us\n");
        }
        text += &format!(
            "{:<24} {:<24} {:>6} {:>10} {:>10} {:>7}\n",
            "stage", "shader", "calls", "us each", "us a run", "share"
        );
        let mut rows: Vec<_> = kernels.iter().collect();
        rows.sort_by(|a, b| b.1.us.total_cmp(&a.1.us));
        for ((stage, kernel), sum) in rows {
            text += &format!(
                "{stage:<24} {kernel:<24} {:>6.0} {:>10.2} {:>10.1} {:>6.1}%\n",
                f64::from(sum.runs) / runs,
                sum.us / f64::from(sum.runs),
                sum.us / runs,
                100.0 * sum.us / whole.us.max(f64::MIN_POSITIVE),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_summed_over_layers() {
        let kernel = |label: &str, begin_ns, end_ns| proto::KernelRun {
            label: label.to_owned(),
            kernel: "skinny".to_owned(),
            begin_ns,
            end_ns,
        };
        let kernels = vec![kernel("layers.0.qkv", 0, 3_000), kernel("layers.1.qkv", 3_000, 7_000)];
        let timed = proto::RegionRun { name: "decode.1".into(), runs: 1, begin_ns: 0, end_ns: 8_000, kernels };
        let plain = proto::RegionRun {
            name: "decode.1".into(),
            runs: 15,
            begin_ns: 8_000,
            end_ns: 98_000,
            kernels: Vec::new(),
        };
        let submission = proto::Submission { regions: vec![timed, plain], ..Default::default() };
        let step = proto::Step { submissions: vec![submission], ..Default::default() };
        let profile = proto::ProfileResponse { replica: "m/0".into(), steps: vec![step], ..Default::default() };
        let text = table(&profile);
        let row = text.lines().find(|line| line.starts_with("qkv")).unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>(),
            ["qkv", "skinny", "2", "3.50", "7.0", "87.5%"],
            "{text}"
        );
        assert!(text.contains("kernels 7.0, before and behind them 1.0"), "{text}");
        assert!(text.contains("without stamps between its kernels it takes 6.0 us"), "{text}");
    }
}
