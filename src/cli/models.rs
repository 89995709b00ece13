//! `ostinato models`: lists, loads and unloads the models of a running server over gRPC. Not here: the server's side of
//! it.

use super::connect::{self, Client, Reach};
use super::generate::Refused;
use super::placement::placed;
use super::progress::Show;
use crate::host::progress::{Progress, Unit};
use crate::memory::plan::HumanBytes;
use crate::service::proto;
use anyhow::Context;
use proto::load_model_response::Event;
use std::io::Write;

#[derive(Debug, clap::Args)]
pub(crate) struct Models {
    /// The server's address: HOST:PORT or a URI. Default: 127.0.0.1:50051, where a server listens unless configured
    /// otherwise.
    #[arg(long, value_name = "ADDR", global = true)]
    server: Option<String>,
    /// Print JSON to standard output.
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// List the models of the server's configuration and their state.
    List,
    /// Load a model of the server's configuration, or reload it if it is loaded. If this command is interrupted, the
    /// server continues the load.
    Load {
        /// Name of the model.
        name: String,
        /// If the model is loaded, unload it first, so that memory does not have to hold both versions. The model is
        /// not served meanwhile.
        #[arg(long)]
        unload_first: bool,
    },
    /// Unload a model. New requests no longer find it; running requests continue for a grace period.
    Unload {
        /// Name of the model.
        name: String,
        /// How long running requests may continue; 0 ends them at once. Default: the server's drain time
        /// (server.drain_seconds).
        #[arg(long, value_name = "SECONDS")]
        grace: Option<f64>,
    },
}

pub(crate) fn run(args: &Models) -> anyhow::Result<()> {
    let usual = connect::usual();
    let server = args.server.as_deref().unwrap_or(&usual);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(async {
        let mut client = args.reach.connect(server).await?;
        match &args.action {
            None | Some(Action::List) => list(&mut client, args.json).await,
            Some(Action::Load { name, unload_first }) => load(&mut client, name, *unload_first, args.json).await,
            Some(Action::Unload { name, grace }) => {
                let request = proto::UnloadModelRequest { name: name.clone(), grace_seconds: *grace };
                let unloaded = client.unload_model(request).await.map_err(Refused::from)?.into_inner();
                let mut out = std::io::stdout().lock();
                if args.json {
                    let line = serde_json::json!({ "freed_bytes": unloaded.freed_bytes, "cut": unloaded.cut });
                    writeln!(out, "{line}")?;
                } else {
                    let cut = match unloaded.cut {
                        0 => String::new(),
                        cut => format!("; {cut} requests were ended"),
                    };
                    writeln!(
                        out,
                        "unloaded {name}: {} of device memory given back{cut}",
                        HumanBytes(unloaded.freed_bytes)
                    )?;
                }
                Ok(())
            }
        }
    })
}

/// Returns the name of a model's state.
fn state(model: &proto::Model) -> &'static str {
    match model.state() {
        proto::ModelState::Unspecified => "unknown",
        proto::ModelState::Unloaded => "unloaded",
        proto::ModelState::Loading => "loading",
        proto::ModelState::Serving => "serving",
        proto::ModelState::Unloading => "unloading",
    }
}

async fn list(client: &mut Client, json: bool) -> anyhow::Result<()> {
    let models = client.list_models(proto::ListModelsRequest {}).await.map_err(Refused::from)?.into_inner().models;
    let mut out = std::io::stdout().lock();
    for model in &models {
        if json {
            let line = serde_json::json!({
                "name": model.name,
                "state": state(model),
                "architecture": (!model.architecture.is_empty()).then_some(&model.architecture),
                "context": model.context,
                "weight_bytes": model.weight_bytes,
                "parameters": model.parameters,
                "embeddings_only": model.embeddings_only,
                "replicas": model.replicas.iter().map(|replica| &replica.name).collect::<Vec<_>>(),
                "endpoint": (!model.endpoint.is_empty()).then_some(&model.endpoint),
            });
            writeln!(out, "{line}")?;
            continue;
        }
        write!(out, "{:<24} {:<10}", model.name, state(model))?;
        if model.state() == proto::ModelState::Serving {
            let devices: Vec<String> = model.replicas.iter().filter_map(placed).collect();
            let (weights, context) = (HumanBytes(model.weight_bytes), model.context);
            let only = if model.embeddings_only { "embeddings only, " } else { "" };
            write!(out, " {}, {only}{weights}, {context} tokens, on {}", model.architecture, devices.join(", "))?;
        }
        if !model.endpoint.is_empty() {
            write!(out, ", alone at {}", model.endpoint)?;
        }
        if let Some(step) = &model.loading {
            write!(out, " {}: {:.0} %", step.what, 100.0 * step.done as f64 / step.total.max(1) as f64)?;
        }
        writeln!(out)?;
    }
    Ok(())
}

async fn load(client: &mut Client, name: &str, unload_first: bool, json: bool) -> anyhow::Result<()> {
    let replace = if unload_first { proto::Replace::UnloadFirst } else { proto::Replace::Beside };
    let request = proto::LoadModelRequest { name: name.to_owned(), replace: replace.into() };
    let mut events = client.load_model(request).await.map_err(Refused::from)?.into_inner();
    let show = Show::new(json);
    while let Some(message) = events.message().await.map_err(Refused::from)? {
        match message.event {
            Some(Event::Progress(step)) => {
                let unit = match step.unit() {
                    proto::load_progress::Unit::Bytes => Unit::Bytes,
                    _ => Unit::Count,
                };
                show.step(&step.what, step.done, step.total, unit);
            }
            Some(Event::Line(line)) => show.line(&line),
            Some(Event::Warning(warning)) => show.warning(&warning),
            Some(Event::Loaded(loaded)) => {
                drop(show);
                return loaded_line(name, &loaded, json);
            }
            None => {}
        }
    }
    anyhow::bail!("the server ended the load of \"{name}\" without saying how")
}

fn loaded_line(name: &str, loaded: &proto::LoadedModel, json: bool) -> anyhow::Result<()> {
    let seconds = |load: &proto::Load| load.end_ns.saturating_sub(load.begin_ns) as f64 / 1e9;
    let mut out = std::io::stdout().lock();
    if json {
        let loads = loaded.loads.iter().map(|load| {
            let seconds = seconds(load);
            serde_json::json!({
                "bytes": load.bytes_written,
                "seconds": seconds,
                "gb_per_second": load.bytes_written as f64 / 1e9 / seconds.max(1e-9),
                "workers": load.workers.len(),
            })
        });
        let line = serde_json::json!({ "loaded": name, "loads": loads.collect::<Vec<_>>() });
        writeln!(out, "{line}")?;
        return Ok(());
    }
    let loads = loaded.loads.iter().map(|load| {
        let seconds = seconds(load);
        let rate = load.bytes_written as f64 / 1e9 / seconds.max(1e-9);
        format!("{} in {seconds:.2} s ({rate:.1} GB/s)", HumanBytes(load.bytes_written))
    });
    let loads: Vec<String> = loads.collect();
    writeln!(out, "loaded {name}: {}", loads.join(", "))?;
    Ok(())
}
