//! `ostinato chat`: a conversation in the terminal, with a model in this process or on a server. Not here: the words of
//! the user, with line editing and commands (`input`), and the answers' source (`answer`).

mod answer;
mod input;

use super::connect::Reach;
use super::generate::Refused;
use super::placement::DeviceArgs;
use super::progress::{Verbosity, verbosity};
use super::sampling::SamplingArgs;
use super::{Usage, cache_directory};
use crate::config::{Bytes, Quantize, file};
use crate::engine::request::RequestError;
use crate::service::proto;
use crate::service::proto::ChatMessage;
use answer::{Answers, Outcome};
use anyhow::Context;
use input::{Input, Said};
use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Debug, clap::Args)]
pub(crate) struct Chat {
    /// Folder of a checkpoint, a GGUF file, ORG/NAME on the Hugging Face hub (downloaded unless it is in the cache), or
    /// an embedded demo model. With --server, the name of a served model. Default: `demo`, or the server's only model.
    model: Option<String>,
    /// Talk to a model of this server (HOST:PORT or a URI) instead of loading one.
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["split", "context", "memory_limit", "quantize"])]
    server: Option<String>,
    #[command(flatten)]
    reach: Reach,
    #[command(flatten)]
    devices: DeviceArgs,
    /// The system prompt, which says how the model is to answer.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Maximum length of the conversation, in tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Maximum device memory to use, such as 8GiB.
    #[arg(long, value_name = "BYTES")]
    memory_limit: Option<Bytes>,
    /// Quantise 16-bit and 32-bit matrices at load: int8 (8.125 bits a weight, relative error 0.65 %) or int4 (5 bits,
    /// 7.3 %).
    #[arg(long, value_name = "int8|int4")]
    quantize: Option<Quantize>,
    #[command(flatten)]
    self_test: super::SelfTestArgs,
}

/// The output of `/help`.
const HELP: &str = "\
/clear          begin again; the system prompt stays
/system [TEXT]  show or set the system prompt and begin again; without one: /system \"\"
/retry          answer the last message again
/save FILE      write the conversation as JSON messages
/load FILE      continue a saved conversation
/help           this text
/quit           end
\"\"\" begins and ends a message of several lines, and a \\ at the end of a line continues it.
//text sends a message that begins with a slash.
Ctrl-C ends an answer; at the prompt, Ctrl-C twice or Ctrl-D ends the program.";

pub(super) fn run(args: &Chat) -> anyhow::Result<()> {
    args.sampling.check().map_err(Refused::from)?;
    let quiet = verbosity() == Verbosity::Quiet;
    // One thread of its own, so that a server's questions are answered while the user types.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start the threads of the client")?;
    let answers = runtime.block_on(Answers::open(args))?;
    let mut input = Input::new(cache_directory().map(|folder| folder.join("chat_history")));
    let mut talk = Talk { args, answers, messages: Vec::new(), system: args.system.clone(), saved: None };
    talk.begin();
    if input.is_terminal() && !quiet {
        eprintln!("{}; /help lists the commands", visible(&talk.answers.describe()));
    }
    // From here on an interrupt ends an answer and not the program.
    let mut interrupts = {
        let _context = runtime.enter();
        signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?
    };
    loop {
        let said = runtime.block_on(async {
            tokio::select! {
                said = input.next() => said,
                // Only of another process or without a terminal: a line editor reads Ctrl-C as a key.
                _ = interrupts.recv() => Ok(Said::End),
            }
        })?;
        let before = talk.messages.clone();
        let sent = match said {
            Said::End => break,
            Said::Message(text) => {
                talk.say("user", text);
                true
            }
            Said::Command(name, rest) => match talk.command(&name, &rest) {
                Ok(Next::Ask) => true,
                Ok(Next::Go) => false,
                Ok(Next::Quit) => break,
                Err(error) if input.is_terminal() => {
                    eprintln!("{}", visible(&error.to_string()));
                    false
                }
                Err(error) => return Err(error),
            },
        };
        if !sent {
            continue;
        }
        let _without_echo = input.without_echo();
        match runtime.block_on(talk.answers.answer(talk.request(), &mut interrupts)) {
            Ok(Outcome { text, summary }) => {
                talk.say("assistant", text);
                if !quiet {
                    eprintln!("{summary}");
                }
            }
            // The conversation is as it was before, and the user may say something else.
            Err(error) if input.is_terminal() => {
                talk.messages = before;
                eprintln!("error: {}", visible(&super::told(&error)));
            }
            Err(error) => return Err(error),
        }
    }
    input.end();
    // Threads that wait for a line of the terminal are not waited for.
    runtime.shutdown_background();
    Ok(())
}

/// The next action after a command.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// The next words of the user.
    Go,
    /// An answer.
    Ask,
    Quit,
}

/// A conversation.
struct Talk<'a> {
    args: &'a Chat,
    answers: Answers,
    /// The system prompt, if any, then messages of the user and the model in turn.
    messages: Vec<ChatMessage>,
    system: Option<String>,
    /// The file that this conversation was saved to, which may be written again.
    saved: Option<PathBuf>,
}

impl Talk<'_> {
    fn say(&mut self, role: &str, content: String) {
        self.messages.push(ChatMessage { role: role.to_owned(), content, ..ChatMessage::default() });
    }

    /// Begins the conversation again.
    fn begin(&mut self) {
        self.messages.clear();
        if let Some(system) = self.system.clone() {
            self.say("system", system);
        }
    }

    fn command(&mut self, name: &str, rest: &str) -> anyhow::Result<Next> {
        match (name, rest) {
            ("help" | "?", _) => println!("{HELP}"),
            ("quit" | "exit" | "bye", _) => return Ok(Next::Quit),
            ("clear", _) => self.begin(),
            ("system", "") => {
                print(self.system.as_deref().unwrap_or("there is no system prompt"))?;
                print("\n")?;
            }
            ("system", text) => {
                self.system = Some(text.to_owned()).filter(|text| text != "\"\"");
                self.begin();
            }
            ("retry", _) => {
                let Some(last) = self.messages.iter().rposition(|message| message.role == "user") else {
                    return Err(Usage("there is no message to answer".to_owned()).into());
                };
                self.messages.truncate(last + 1);
                return Ok(Next::Ask);
            }
            ("save" | "load", "") => return Err(Usage(format!("/{name} needs a file")).into()),
            ("save", path) => self.save(Path::new(path))?,
            ("load", path) => self.load(Path::new(path))?,
            _ => return Err(Usage(format!("there is no command /{name}; /help lists them")).into()),
        }
        Ok(Next::Go)
    }

    fn save(&mut self, path: &Path) -> anyhow::Result<()> {
        if file::is_named(path) && self.saved.as_deref() != Some(path) {
            return Err(Usage(format!("{} exists, and is no file of this conversation", path.display())).into());
        }
        let failed = |error| Usage(format!("cannot write {}: {error}", path.display()));
        std::fs::write(path, format!("{:#}\n", to_json(&self.messages))).map_err(failed)?;
        self.saved = Some(path.to_owned());
        Ok(())
    }

    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        let failed = |error| Usage(format!("cannot read {}: {error}", path.display()));
        let text = file::read_argument_text(path, file::LARGE).map_err(failed)?;
        let messages = from_json(&text).map_err(|what| Usage(format!("{}: {what}", path.display())))?;
        self.system = messages.first().filter(|first| first.role == "system").map(|first| first.content.clone());
        (self.messages, self.saved) = (messages, Some(path.to_owned()));
        Ok(())
    }

    /// Builds the request for an answer to the last message.
    fn request(&self) -> proto::GenerateRequest {
        let sampling = self.args.sampling.of_chat();
        proto::GenerateRequest {
            model: self.answers.model(),
            prompt: Some(proto::generate_request::Prompt::Chat(proto::Chat {
                messages: self.messages.clone(),
                ..proto::Chat::default()
            })),
            sampling: Some(sampling.message()),
            stopping: Some(sampling.stopping()),
            device: self.answers.device(),
            ..proto::GenerateRequest::default()
        }
    }
}

/// Writes messages in the form of OpenAI's API.
fn to_json(messages: &[ChatMessage]) -> serde_json::Value {
    messages.iter().map(|message| serde_json::json!({"role": message.role, "content": message.content})).collect()
}

/// Reads what [`to_json`] writes. The error is a sentence.
fn from_json(text: &str) -> Result<Vec<ChatMessage>, String> {
    let value: serde_json::Value = serde_json::from_str(text).map_err(|error| format!("it is not JSON: {error}"))?;
    let list = value.as_array().ok_or("it is not a list of messages")?;
    let message = |(index, value): (usize, &serde_json::Value)| {
        let text = |key: &str| {
            let found = value[key].as_str().map(str::to_owned);
            found.ok_or_else(|| format!("message {index} has no text \"{key}\""))
        };
        Ok(ChatMessage { role: text("role")?, content: text("content")?, ..ChatMessage::default() })
    };
    list.iter().enumerate().map(message).collect()
}

/// Prints text of an answer at once, also into a pipe. A terminal gets it without control characters.
fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() { visible(text) } else { Cow::Borrowed(text) };
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Returns a text with U+FFFD in place of each control character but line feed and tab: text of a model, a file or a
/// server can then not command the terminal, for instance to change its title or what stands above.
pub(super) fn visible(text: &str) -> Cow<'_, str> {
    let control = |c: char| c.is_control() && c != '\n' && c != '\t';
    match text.contains(control) {
        true => Cow::Owned(text.replace(control, "\u{FFFD}")),
        false => Cow::Borrowed(text),
    }
}

/// Returns the error if the model draws no tokens.
fn embeds_only() -> Refused {
    tonic::Status::invalid_argument(RequestError::EmbedsOnly.to_string()).into()
}

/// Returns the error if the model has no chat template.
fn without_template(model: &str) -> Refused {
    tonic::Status::failed_precondition(format!(
        "model \"{model}\" has no chat template: `ostinato generate --prompt` continues plain text"
    ))
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_shown_text_and_no_commands() {
        for (text, shown) in [
            ("a\tb\nhé 😀", "a\tb\nhé 😀"),
            ("\u{1b}]0;title\u{7}x\r\n", "\u{FFFD}]0;title\u{FFFD}x\u{FFFD}\n"),
            ("\u{9b}2J\u{7f}\0", "\u{FFFD}2J\u{FFFD}\u{FFFD}"),
        ] {
            assert_eq!(visible(text), shown);
        }
    }

    #[test]
    fn what_is_saved_is_loaded_and_other_files_are_told() {
        let messages = [("system", "be \"brief\"\n"), ("user", "hé"), ("assistant", "")].map(|(role, content)| {
            ChatMessage { role: role.to_owned(), content: content.to_owned(), ..ChatMessage::default() }
        });
        assert_eq!(from_json(&to_json(&messages).to_string()), Ok(messages.to_vec()));
        for (text, words) in [
            ("x", "not JSON"),
            ("{}", "not a list"),
            (r#"[{"role": "user", "content": "a"}, {"role": "user"}]"#, "message 1 has no text \"content\""),
        ] {
            let error = from_json(text).expect_err(text);
            assert!(error.contains(words), "{error}");
        }
    }
}
