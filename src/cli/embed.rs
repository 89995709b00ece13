//! `ostinato embed`: vectors of texts, in this process or on a server. Both answer the same message.

use super::generate::Refused;
use super::placement::DeviceArgs;
use super::{cache_directory, named, progress};
use crate::config::{Bytes, Config, DEMO_PATH, Model};
use crate::gpu::devices::start;
use crate::service::proto;
use crate::service::proto::embed_input::Input;
use crate::service::proto::ostinato_server::Ostinato;
use crate::service::rpc::Rpc;
use serde_json::json;
use std::io::Write;
use std::sync::Arc;

#[derive(Debug, clap::Args)]
pub(crate) struct Embed {
    /// The texts.
    #[arg(required = true, value_name = "TEXT")]
    texts: Vec<String>,
    /// Folder of a checkpoint, a GGUF file, ORG/NAME on the Hugging Face hub, or an embedded demo model. With --server,
    /// the name of a served model. Default: `demo`, or the server's only model.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    #[command(flatten)]
    devices: DeviceArgs,
    /// Send the texts to this server (HOST:PORT or a URI) instead of loading the model.
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["split", "memory_limit"])]
    server: Option<String>,
    #[command(flatten)]
    reach: super::connect::Reach,
    /// Put the text that the model's files have under this name before each text, such as `query`.
    #[arg(long, value_name = "NAME")]
    prompt_name: Option<String>,
    /// Cut vectors to this many values. Only models that were trained for it (Matryoshka) have useful shorter vectors.
    #[arg(long, value_name = "N")]
    dimensions: Option<u32>,
    /// Print one JSON object per text, with all values.
    #[arg(long)]
    json: bool,
    /// Maximum device memory to use, such as 8GiB.
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<Bytes>,
    #[command(flatten)]
    self_test: super::SelfTestArgs,
}

/// The first values of a vector that are shown without --json.
const SHOWN: usize = 6;

pub(crate) fn run(args: &Embed) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let text = |text: &String| proto::EmbedInput { input: Some(Input::Text(text.clone())) };
    let request = proto::EmbedRequest {
        model: args.model.clone().unwrap_or_default(),
        device: String::new(),
        inputs: args.texts.iter().map(text).collect(),
        prompt_name: args.prompt_name.clone(),
        dimensions: args.dimensions,
        ..Default::default()
    };
    let response = match &args.server {
        Some(address) => runtime.block_on(async {
            let request = proto::EmbedRequest { device: args.devices.of_request()?, ..request };
            // A vector of 8,192 values for each of the most texts of a call.
            let mut client = args.reach.connect(address).await?.max_decoding_message_size(128 << 20);
            Ok::<_, anyhow::Error>(client.embed(request).await.map_err(Refused::from)?.into_inner())
        })?,
        None => {
            let placement = args.devices.replica()?;
            let given = args.model.as_deref().unwrap_or(DEMO_PATH);
            let path = named::find(given, args.json)?;
            let mut model = Model::new(&named::served_as(given), path, None);
            model.replicas = vec![placement];
            model.memory_limit = args.memory_limit;
            let mut config = Config { models: vec![model], ..Config::default() };
            config.runtime.cache_directory = cache_directory();
            config.runtime.self_test = args.self_test.wanted();
            let host = Arc::new(start(&config, &progress::Show::brief(args.json))?);
            let request = proto::EmbedRequest { model: String::new(), ..request };
            let rpc = Rpc::alone(host);
            let answer = runtime.block_on(Ostinato::embed(&rpc, tonic::Request::new(request)));
            answer.map_err(Refused::from)?.into_inner()
        }
    };
    print(args, &response)
}

fn print(args: &Embed, response: &proto::EmbedResponse) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let cosine = |a: &[f32], b: &[f32]| {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    for (index, embedding) in response.embeddings.iter().enumerate() {
        let values = &embedding.values;
        if args.json {
            let object = json!({
                "index": index, "prompt_tokens": embedding.prompt_tokens, "cached_tokens": embedding.cached_tokens,
                "embedding": values,
            });
            writeln!(out, "{object}")?;
            continue;
        }
        let first: Vec<String> = values.iter().take(SHOWN).map(|value| format!("{value:.4}")).collect();
        let more = if values.len() > SHOWN { " …" } else { "" };
        let to_first = match index {
            0 => String::new(),
            _ => format!("cosine with the first {:.4}, ", cosine(&response.embeddings[0].values, values)),
        };
        let (tokens, count) = (embedding.prompt_tokens, values.len());
        writeln!(out, "{tokens} tokens, {to_first}{count} values: {}{more}", first.join(" "))?;
    }
    Ok(())
}
