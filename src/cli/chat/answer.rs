//! Answers of a model: from this process or from a server, as one stream that an interrupt ends.

use super::{Chat, embeds_only, print, without_template};
use crate::cli::arrivals::speed;
use crate::cli::connect::Client;
use crate::cli::generate::Refused;
use crate::cli::placement::placed;
use crate::cli::{cache_directory, named, progress};
use crate::config::{Config, DEMO_PATH, Model};
use crate::gpu::devices::start;
use crate::host::Host;
use crate::service::convert;
use crate::service::generation::{Delivery, Generation};
use crate::service::prepare::prepare;
use crate::service::proto;
use crate::service::proto::generate_response::Event;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;
use tokio::signal::unix::Signal;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Capacity of the event buffer: enough for all events of a long output if the terminal is slow.
const BUFFER: usize = 1 << 16;

/// The messages of one answer.
type Messages = Pin<Box<dyn Stream<Item = Result<proto::GenerateResponse, Status>> + Send>>;

/// The source of answers: a server or a replica of this process.
pub(super) enum Answers {
    /// A model in this process.
    Here { host: Arc<Host>, name: String },
    /// A model on a server.
    There { client: Box<Client>, address: String, name: String, device: String },
}

/// An answer that has ended, or was ended.
pub(super) struct Outcome {
    pub(super) text: String,
    /// A line about its speed.
    pub(super) summary: String,
}

impl Answers {
    /// Loads the model, or connects to the server and finds it there.
    pub(super) async fn open(args: &Chat) -> anyhow::Result<Answers> {
        match &args.server {
            Some(address) => Answers::there(args, address).await,
            None => Answers::here(args),
        }
    }

    fn here(args: &Chat) -> anyhow::Result<Answers> {
        let given = args.model.as_deref().unwrap_or(DEMO_PATH);
        let placement = args.devices.replica()?;
        let name = named::served_as(given);
        let mut model = Model::new(&name, named::find(given, false)?, None);
        model.replicas = vec![placement];
        model.slots = Some(1);
        model.context = args.context;
        model.memory_limit = args.memory_limit;
        model.quantize = args.quantize;
        let mut config = Config { models: vec![model], ..Config::default() };
        config.runtime.cache_directory = cache_directory();
        config.runtime.self_test = args.self_test.wanted();
        let show = progress::Show::brief(false);
        args.quantize.iter().for_each(|to| show.notice(&format!("quantised to {to}")));
        let host = Arc::new(start(&config, &show)?);
        if !host.models().iter().all(|model| model.draws()) {
            return Err(embeds_only().into());
        }
        let chats = host.models().iter().all(|model| model.text.as_ref().is_some_and(|text| text.has_chat()));
        if !chats {
            return Err(without_template(&name).into());
        }
        Ok(Answers::Here { host, name })
    }

    async fn there(args: &Chat, address: &str) -> anyhow::Result<Answers> {
        let device = args.devices.of_request()?;
        let mut client = args.reach.connect(address).await?;
        let models = client.list_models(proto::ListModelsRequest {}).await.map_err(Refused::from)?.into_inner().models;
        let mut serving = models.iter().filter(|model| model.state() == proto::ModelState::Serving);
        let found = match &args.model {
            Some(name) => serving.find(|model| model.name == *name),
            // If there are several, the server's refusal of an empty name lists them.
            None => serving.next().filter(|_| serving.next().is_none()),
        };
        if found.is_some_and(|model| model.embeddings_only) {
            return Err(embeds_only().into());
        }
        if let Some(model) = found.filter(|model| !model.has_chat_template) {
            return Err(without_template(&model.name).into());
        }
        let served = || models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ");
        let name = match (found, &args.model) {
            (Some(model), _) => model.name.clone(),
            (None, Some(name)) => {
                let why = format!("model \"{name}\" is not served at {address}; its models are {}", served());
                return Err(Refused::from(Status::not_found(why)).into());
            }
            (None, None) => {
                let why = format!("{address} serves several models or none, name one: {}", served());
                return Err(Refused::from(Status::invalid_argument(why)).into());
            }
        };
        Ok(Answers::There { client: Box::new(client), address: address.to_owned(), name, device })
    }

    /// Says who answers.
    pub(super) fn describe(&self) -> String {
        match self {
            Answers::Here { host, name } => {
                let models: Vec<proto::Model> = host.models().iter().map(|model| convert::model(model)).collect();
                let replicas = models.iter().flat_map(|model| &model.replicas);
                let devices: Vec<String> = replicas.filter_map(placed).collect();
                format!("{name} on {}", devices.join(", "))
            }
            Answers::There { address, name, .. } => format!("{name} at {address}"),
        }
    }

    /// The model's name for a request.
    pub(super) fn model(&self) -> String {
        match self {
            Answers::Here { .. } => String::new(),
            Answers::There { name, .. } => name.clone(),
        }
    }

    /// The device's name for a request.
    pub(super) fn device(&self) -> String {
        match self {
            // An empty selector means the only replica.
            Answers::Here { .. } => String::new(),
            Answers::There { device, .. } => device.clone(),
        }
    }

    async fn stream(&mut self, request: proto::GenerateRequest) -> anyhow::Result<Messages> {
        match self {
            Answers::Here { host, .. } => {
                let prepared = prepare(host, request, None).map_err(Refused::from)?;
                let delivery = Delivery {
                    buffer: BUFFER,
                    rpc: tracing::Span::none(),
                    grpc: false,
                    stop: CancellationToken::new(),
                    places: None,
                    logits: None,
                };
                Ok(Box::pin(Generation::start(prepared, delivery).map_err(Refused::from)?))
            }
            Answers::There { client, .. } => {
                Ok(Box::pin(client.generate(request).await.map_err(Refused::from)?.into_inner()))
            }
        }
    }

    /// Prints an answer while it arrives. An interrupt ends it; the text that has arrived is then the answer.
    pub(super) async fn answer(
        &mut self,
        request: proto::GenerateRequest,
        interrupts: &mut Signal,
    ) -> anyhow::Result<Outcome> {
        let begun = Instant::now();
        let mut arrived = Arrived::default();
        let stream = tokio::select! {
            stream = self.stream(request) => Some(stream?),
            _ = interrupts.recv() => None,
        };
        let mut stopped = stream.is_none();
        if let Some(mut stream) = stream {
            loop {
                // Dropping the stream frees the row on the device.
                let message = tokio::select! {
                    biased;
                    _ = interrupts.recv() => {
                        stopped = true;
                        break;
                    }
                    message = stream.next() => message,
                };
                match message {
                    None => break,
                    Some(Ok(message)) => arrived.take(message.event)?,
                    Some(Err(status)) => {
                        arrived.end_line()?;
                        return Err(Refused::from(status).into());
                    }
                }
            }
        }
        arrived.end_line()?;
        let summary = arrived.summary(begun, stopped);
        Ok(Outcome { text: arrived.text, summary })
    }
}

/// The part of an answer that has arrived.
#[derive(Default)]
struct Arrived {
    text: String,
    tokens: u32,
    first: Option<Instant>,
    last: Option<Instant>,
    finished: Option<proto::Finished>,
}

impl Arrived {
    fn take(&mut self, event: Option<Event>) -> std::io::Result<()> {
        match event {
            Some(Event::Delta(delta)) => {
                let now = Instant::now();
                self.first.get_or_insert(now);
                self.last = Some(now);
                self.tokens += delta.token_ids.len() as u32;
                self.text.push_str(&delta.text);
                print(&delta.text)
            }
            Some(Event::Finished(finished)) => {
                self.finished = Some(finished);
                Ok(())
            }
            Some(Event::Started(_) | Event::Prompt(_)) | None => Ok(()),
        }
    }

    fn end_line(&self) -> std::io::Result<()> {
        if self.text.ends_with('\n') { Ok(()) } else { print("\n") }
    }

    /// Returns a line such as `[42 tokens, 31.2 tokens/s, the first after 0.12 s]`.
    fn summary(&self, begun: Instant, stopped: bool) -> String {
        let mut parts = Vec::new();
        let usage = self.finished.as_ref().and_then(|finished| finished.usage);
        let tokens = usage.map_or(self.tokens, |usage| usage.output_tokens);
        parts.push(format!("{tokens} token{}", if tokens == 1 { "" } else { "s" }));
        // The first token is the prompt's.
        let own = self.finished.as_ref().and_then(|finished| finished.timings).map(|timings| timings.decode_seconds);
        let clock = self.first.zip(self.last).map(|(first, last)| (last - first).as_secs_f64());
        if let Some(speed) = own.or(clock).and_then(|seconds| speed(tokens.saturating_sub(1), seconds)) {
            parts.push(format!("{speed:.1} tokens/s"));
        }
        if let Some(first) = self.first {
            parts.push(format!("the first after {:.2} s", (first - begun).as_secs_f64()));
        }
        let reason = self.finished.as_ref().map(proto::Finished::reason);
        if stopped {
            parts.push("stopped".to_owned());
        } else if reason == Some(proto::FinishReason::Length) {
            parts.push("cut at its maximum length".to_owned());
        }
        format!("[{}]", parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_after_an_answer_counts_its_tokens() {
        let begun = Instant::now();
        let mut arrived = Arrived { tokens: 3, ..Arrived::default() };
        assert_eq!(arrived.summary(begun, true), "[3 tokens, stopped]");
        // They came in one piece, which is no speed.
        arrived.last = Some(begun + std::time::Duration::from_micros(36));
        arrived.first = Some(begun);
        assert_eq!(arrived.summary(begun, true), "[3 tokens, the first after 0.00 s, stopped]");
        assert_eq!(Arrived { tokens: 1, ..Arrived::default() }.summary(begun, true), "[1 token, stopped]");
        let finished = proto::Finished {
            reason: proto::FinishReason::Length.into(),
            usage: Some(proto::Usage { output_tokens: 11, ..proto::Usage::default() }),
            timings: Some(proto::Timings { decode_seconds: 2.0, ..proto::Timings::default() }),
            ..proto::Finished::default()
        };
        (arrived.finished, arrived.first) = (Some(finished), Some(begun));
        let line = arrived.summary(begun, false);
        assert_eq!(line, "[11 tokens, 5.0 tokens/s, the first after 0.00 s, cut at its maximum length]");
    }
}
