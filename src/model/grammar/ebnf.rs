//! Translates grammars in the notation of llama.cpp (GBNF) and XGrammar (EBNF), `root ::= "a" | [0-9]+`, to Lark, which
//! llguidance reads.
//!
//! Not here: parsing of generated text. Look-ahead and other extensions are rejected.

use std::collections::BTreeSet;
use std::fmt::Write;

/// A text that begins with this is a Lark grammar, whatever follows.
const LARK: &str = "%llguidance";

/// Whether a grammar is in this notation rather than in Lark's.
pub(super) fn is_ebnf(text: &str) -> bool {
    text.contains("::=") && !text.trim_start().starts_with(LARK)
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    /// The token `::=`.
    Is,
    /// Literals, character classes and operators, already in Lark's spelling.
    Other(String),
}

/// Translates a grammar to Lark. An error names the problem and its line.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let tokens = Scanner { rest: text, line: 1 }.tokens()?;
    let mut lark = String::new();
    let mut defined = BTreeSet::new();
    let mut used: Vec<(String, usize)> = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let (Token::Name(name), Some((Token::Is, _))) = (&tokens[at].0, tokens.get(at + 1)) else {
            return Err(format!("line {}: a rule must begin with NAME ::=", tokens[at].1));
        };
        if !defined.insert(name.clone()) {
            return Err(format!("line {}: rule \"{name}\" is defined twice", tokens[at].1));
        }
        let body = at + 2;
        let next_rule =
            |at: &usize| matches!((&tokens[*at].0, tokens.get(at + 1)), (Token::Name(_), Some((Token::Is, _))));
        at = (body..tokens.len()).find(next_rule).unwrap_or(tokens.len());
        let mut line = format!("{}:", rule_name(name));
        for (token, number) in &tokens[body..at] {
            let shown = match token {
                Token::Name(name) => {
                    used.push((name.clone(), *number));
                    rule_name(name)
                }
                Token::Other(text) => text.clone(),
                Token::Is => return Err(format!("line {number}: ::= without a name before it")),
            };
            // No space before a repetition operator, which applies to what precedes it.
            if !shown.starts_with(['*', '+', '?', '{']) {
                line.push(' ');
            }
            line.push_str(&shown);
        }
        lark.push_str(&line);
        lark.push('\n');
    }
    if !defined.contains("root") {
        return Err("there is no rule \"root\"".to_owned());
    }
    match used.into_iter().find(|(name, _)| !defined.contains(name)) {
        Some((name, line)) => Err(format!("line {line}: rule \"{name}\" is not defined")),
        None => Ok(lark),
    }
}

/// Returns the Lark name of a rule: lower case with underscores, and `start` for `root`. Distinct names stay distinct: an
/// underscore begins either `__`, a dash, or a character's code in hexadecimal digits up to the next underscore.
fn rule_name(name: &str) -> String {
    if name == "root" {
        return "start".to_owned();
    }
    let mut shown = String::from("r_");
    for c in name.chars() {
        match c {
            'a'..='z' | '0'..='9' => shown.push(c),
            '-' => shown.push_str("__"),
            other => write!(shown, "_{:x}_", u32::from(other)).expect("a string takes what is written"),
        }
    }
    shown
}

struct Scanner<'a> {
    rest: &'a str,
    line: usize,
}

impl Scanner<'_> {
    fn tokens(mut self) -> Result<Vec<(Token, usize)>, String> {
        let mut tokens = Vec::new();
        while let Some(c) = self.peek() {
            let line = self.line;
            let token = match c {
                c if c.is_whitespace() => {
                    self.next();
                    continue;
                }
                '#' => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.next();
                    }
                    continue;
                }
                ':' if self.rest.starts_with("::=") => {
                    self.rest = &self.rest[3..];
                    Token::Is
                }
                '"' => Token::Other(self.literal()?),
                '[' => Token::Other(self.class()?),
                '{' => Token::Other(self.counts()?),
                '.' => {
                    self.next();
                    Token::Other("/(?s:.)/".to_owned())
                }
                '|' | '(' | ')' | '*' | '+' | '?' => {
                    self.next();
                    Token::Other(c.to_string())
                }
                c if c.is_ascii_alphanumeric() || c == '_' => {
                    let end = self.rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'));
                    let (name, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
                    let name = name.to_owned();
                    self.rest = rest;
                    Token::Name(name)
                }
                other => return Err(format!("line {line}: {other:?} is not understood")),
            };
            tokens.push((token, line));
        }
        Ok(tokens)
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.line += usize::from(c == '\n');
        self.rest = &self.rest[c.len_utf8()..];
        Some(c)
    }

    fn unclosed(&self, what: &str) -> String {
        format!("line {}: {what} is not closed", self.line)
    }

    fn literal(&mut self) -> Result<String, String> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                None | Some('\n') => return Err(self.unclosed("a literal")),
                Some('"') => return Ok(serde_json::Value::from(text).to_string()),
                Some('\\') => text.push(self.escape()?),
                Some(c) => text.push(c),
            }
        }
    }

    /// Reads the character that follows a backslash.
    fn escape(&mut self) -> Result<char, String> {
        let line = self.line;
        let c = self.next().ok_or_else(|| self.unclosed("an escape"))?;
        let digits = match c {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c if c.is_ascii_punctuation() => return Ok(c),
            other => return Err(format!("line {line}: the escape \\{other} is not known")),
        };
        let hex = self.rest.get(..digits).unwrap_or_default();
        let value = u32::from_str_radix(hex, 16).ok().filter(|_| hex.len() == digits).and_then(char::from_u32);
        let value = value.ok_or_else(|| format!("line {line}: \\{c}{hex} is not a character"))?;
        self.rest = &self.rest[digits..];
        Ok(value)
    }

    /// Translates a character class such as `[^a-z]` to a regular expression of code points, in which no character has
    /// a special meaning.
    fn class(&mut self) -> Result<String, String> {
        self.next();
        let mut shown = String::from("/[");
        if self.peek() == Some('^') {
            self.next();
            shown.push('^');
        }
        let mut items = 0;
        loop {
            let first = match self.next() {
                None | Some('\n') => return Err(self.unclosed("a character class")),
                Some(']') => break,
                Some('\\') => self.escape()?,
                Some(c) => c,
            };
            items += 1;
            write!(shown, "\\u{{{:x}}}", u32::from(first)).expect("a string takes what is written");
            let ranges = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            if ranges {
                self.next();
                let last = match self.next() {
                    None | Some('\n') => return Err(self.unclosed("a character class")),
                    Some('\\') => self.escape()?,
                    Some(c) => c,
                };
                if last < first {
                    return Err(format!("line {}: the range {first:?} to {last:?} goes backwards", self.line));
                }
                write!(shown, "-\\u{{{:x}}}", u32::from(last)).expect("a string takes what is written");
            }
        }
        if items == 0 {
            return Err(format!("line {}: a character class is empty", self.line));
        }
        shown.push_str("]/");
        Ok(shown)
    }

    /// Reads a repetition count: `{2}`, `{2,}` or `{2,5}`.
    fn counts(&mut self) -> Result<String, String> {
        let end = self.rest.find('}').ok_or_else(|| self.unclosed("a repetition"))?;
        let inside: String = self.rest[1..end].chars().filter(|c| !c.is_whitespace()).collect();
        let number = |text: &str| text.parse::<u32>().is_ok();
        let good = match inside.split_once(',') {
            None => number(&inside),
            Some((least, most)) => number(least) && (most.is_empty() || number(most)),
        };
        if !good {
            return Err(format!("line {}: {{{inside}}} must be {{n}}, {{n,}} or {{n,m}}", self.line));
        }
        self.rest = &self.rest[end + 1..];
        Ok(format!("{{{inside}}}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_larks() {
        let lark = to_lark(
            "# numbers\nroot ::= item (\", \" item){0,3} |\n  \"none\"\nitem-2 ::= \"\\\"\\u00e9\"\nitem ::= [^a-z\\]\\-]+ item-2?",
        );
        assert_eq!(
            lark.unwrap(),
            "start: r_item ( \", \" r_item ){0,3} | \"none\"\nr_item__2: \"\\\"é\"\nr_item: /[^\\u{61}-\\u{7a}\\u{5d}\\u{2d}]/+ r_item__2?\n"
        );
    }

    #[test]
    fn distinct_names_stay_distinct() {
        let names = ["aA", "a-41-", "a_41_", "a--", "a_", "a-", "a", "a41", "a-4-1-", "aA-", "root-", "é"];
        let shown: std::collections::BTreeSet<String> = names.iter().map(|name| rule_name(name)).collect();
        assert_eq!(shown.len(), names.len(), "{shown:?}");
        assert!(to_lark("root ::= aA a-41-\naA ::= \"x\"\na-41- ::= \"y\"").is_ok());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, wrong) in [
            ("a ::= \"x\"", "no rule \"root\""),
            ("root ::= b", "line 1: rule \"b\" is not defined"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: rule \"root\" is defined twice"),
            ("root ::= \"a", "line 1: a literal is not closed"),
            ("root ::= [z-a]", "goes backwards"),
            ("root ::= []", "class is empty"),
            ("root ::= \"a\"{x}", "{x} must be"),
            ("root ::= \"\\ud800\"", "is not a character"),
            ("root ::= (?=a)", "line 1: '='"),
            ("\"a\" root ::= \"b\"", "must begin with NAME"),
        ] {
            let error = to_lark(text).unwrap_err();
            assert!(error.contains(wrong), "{text}: {error}");
        }
    }
}
