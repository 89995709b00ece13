//! The words of the user: lines of a terminal, with editing and a history, or of a pipe. Lines are joined to messages
//! of several lines, and those that begin with a slash are commands.

use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{Config, Editor};
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;
use tokio::task::spawn_blocking;

/// The delimiter before and after a message of several lines.
const BLOCK: &str = "\"\"\"";
/// The lines that the history keeps.
const KEPT: usize = 1000;
const PROMPT: &str = "> ";
const CONTINUED: &str = "… ";

/// A message, a command, or the end of the user's input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Message(String),
    /// A command without its slash, and the text after it.
    Command(String, String),
    /// The end of the input.
    End,
}

/// The source of input lines.
enum Source {
    Terminal(Box<Editor<(), DefaultHistory>>),
    Pipe,
}

/// The user's input. It is used by one reader at a time.
pub(super) struct Input {
    /// Absent while a line is read.
    source: Option<Source>,
    terminal: bool,
    /// The file that keeps the lines of a terminal.
    history: Option<PathBuf>,
}

/// The result of reading a line from the user.
enum Line {
    Text(String),
    Interrupted,
    End,
}

impl Input {
    /// Reads from the terminal if stdin is one. `history` is the file of earlier lines; without it none are kept.
    pub(super) fn new(history: Option<PathBuf>) -> Input {
        let editor = || {
            let config = Config::builder().max_history_size(KEPT).ok()?.auto_add_history(true).build();
            let mut editor = Editor::<(), DefaultHistory>::with_config(config).ok()?;
            if let Some(file) = &history {
                // There is no file before the first conversation.
                let _ = editor.load_history(file);
            }
            Some(Source::Terminal(Box::new(editor)))
        };
        let source = if std::io::stdin().is_terminal() { editor() } else { None };
        let terminal = source.is_some();
        Input { source: Some(source.unwrap_or(Source::Pipe)), terminal, history }
    }

    /// Whether a person may be at the other end, who can mend an error.
    pub(super) fn is_terminal(&self) -> bool {
        self.terminal
    }

    /// Reads a message or command. Two interrupts in a row are the end.
    pub(super) async fn next(&mut self) -> anyhow::Result<Said> {
        let mut words = Words::default();
        let mut interrupted = false;
        loop {
            let prompt = if words.is_empty() { PROMPT } else { CONTINUED };
            match self.line(prompt).await? {
                Line::Text(line) => {
                    interrupted = false;
                    if let Some(said) = words.take(&line) {
                        return Ok(said);
                    }
                }
                // The incomplete message is dropped.
                Line::Interrupted if interrupted => return Ok(Said::End),
                Line::Interrupted => {
                    (words, interrupted) = (Words::default(), true);
                    eprintln!("(Ctrl-C again, Ctrl-D or /quit ends the program)");
                }
                Line::End => return Ok(words.end()),
            }
        }
    }

    async fn line(&mut self, prompt: &'static str) -> anyhow::Result<Line> {
        let Some(source) = self.source.take() else { return Ok(Line::End) };
        let (source, line) = spawn_blocking(move || read(source, prompt)).await?;
        self.source = Some(source);
        line
    }

    /// Turns the terminal's echo off until the guard is dropped: keys that are pressed while an answer is printed then
    /// appear at the next prompt, as the line editor reads them, and not in the middle of the answer.
    pub(super) fn without_echo(&self) -> Option<WithoutEcho> {
        let before = self.terminal.then(|| tcgetattr(std::io::stdin()).ok()).flatten()?;
        let mut without = before.clone();
        without.local_modes.remove(LocalModes::ECHO);
        tcsetattr(std::io::stdin(), OptionalActions::Now, &without).ok()?;
        Some(WithoutEcho(before))
    }

    /// Keeps the lines of this conversation for the next one.
    pub(super) fn end(&mut self) {
        if let (Some(Source::Terminal(editor)), Some(file)) = (&mut self.source, &self.history) {
            let folder = file.parent().map(std::fs::create_dir_all);
            // A history that cannot be written is no reason to end with an error.
            let _ = folder.and_then(|made| made.ok()).map(|()| editor.append_history(file));
        }
    }
}

/// See [`Input::without_echo`]. Holds the terminal's modes from before.
pub(super) struct WithoutEcho(Termios);

impl Drop for WithoutEcho {
    fn drop(&mut self) {
        // A terminal that is gone needs no modes.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}

fn read(mut source: Source, prompt: &str) -> (Source, anyhow::Result<Line>) {
    let line = match &mut source {
        Source::Terminal(editor) => match editor.readline(prompt) {
            Ok(line) => Ok(Line::Text(line)),
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(error.into()),
        },
        Source::Pipe => {
            let mut line = String::new();
            match std::io::stdin().lock().read_line(&mut line) {
                Ok(0) => Ok(Line::End),
                Ok(_) => Ok(Line::Text(line.trim_end_matches(['\n', '\r']).to_owned())),
                Err(error) => Err(error.into()),
            }
        }
    };
    (source, line)
}

/// The lines of a message that is not complete.
#[derive(Debug, Default)]
struct Words {
    lines: Vec<String>,
    /// The line is between two marks of a block.
    block: bool,
}

impl Words {
    fn is_empty(&self) -> bool {
        self.lines.is_empty() && !self.block
    }

    /// Takes a line and returns what is complete with it.
    fn take(&mut self, line: &str) -> Option<Said> {
        if self.block {
            let Some(last) = line.trim_end().strip_suffix(BLOCK) else {
                self.lines.push(line.to_owned());
                return None;
            };
            self.block = false;
            self.lines.extend((!last.is_empty()).then(|| last.to_owned()));
            return self.message();
        }
        if self.lines.is_empty() {
            if let Some(first) = line.trim_start().strip_prefix(BLOCK) {
                self.block = true;
                // The block may end on the line on which it begins.
                return if first.is_empty() { None } else { self.take(first) };
            }
            if let Some(command) = line.strip_prefix('/')
                && !command.starts_with('/')
            {
                let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
                return Some(Said::Command(name.to_owned(), rest.trim().to_owned()));
            }
        }
        if let Some(continued) = line.strip_suffix('\\') {
            self.lines.push(continued.to_owned());
            return None;
        }
        self.lines.push(line.to_owned());
        self.message()
    }

    /// Returns what is complete at the end of the input.
    fn end(&mut self) -> Said {
        self.message().unwrap_or(Said::End)
    }

    /// Returns the message; `None` if it says nothing.
    fn message(&mut self) -> Option<Said> {
        let text = std::mem::take(&mut self.lines).join("\n");
        let text = if text.starts_with("//") { &text[1..] } else { &text };
        (!text.trim().is_empty()).then(|| Said::Message(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what lines say, with the end of the input after them.
    fn said(lines: &[&str]) -> Vec<Said> {
        let mut words = Words::default();
        let mut all: Vec<Said> = lines.iter().filter_map(|line| words.take(line)).collect();
        all.push(words.end());
        if all.last() != Some(&Said::End) {
            all.push(Said::End);
        }
        all
    }

    fn message(text: &str) -> Said {
        Said::Message(text.to_owned())
    }

    #[test]
    fn a_line_is_a_message_and_a_slash_begins_a_command() {
        let command = |name: &str, rest: &str| Said::Command(name.to_owned(), rest.to_owned());
        assert_eq!(said(&["hello", "", "  ", "two words"]), [message("hello"), message("two words"), Said::End]);
        assert_eq!(
            said(&["/clear", "/save  a file ", "//not one"]),
            [command("clear", ""), command("save", "a file"), message("/not one"), Said::End]
        );
    }

    #[test]
    fn several_lines_are_one_message() {
        assert_eq!(said(&["a\\", "b\\", "c"]), [message("a\nb\nc"), Said::End]);
        assert_eq!(said(&["\"\"\"", "/a", "", "b", "\"\"\""]), [message("/a\n\nb"), Said::End]);
        assert_eq!(said(&["\"\"\"a", "b\"\"\"", "c"]), [message("a\nb"), message("c"), Said::End]);
        assert_eq!(said(&["\"\"\"all on one line\"\"\""]), [message("all on one line"), Said::End]);
        // An incomplete message at the end of the input is complete.
        assert_eq!(said(&["a\\"]), [message("a"), Said::End]);
        assert_eq!(said(&["\"\"\"", "a"]), [message("a"), Said::End]);
        assert_eq!(said(&["\"\"\"", "\"\"\""]), [Said::End]);
    }
}
