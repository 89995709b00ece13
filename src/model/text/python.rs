//! What templates see of Python where minijinja differs: how values are written as text and as JSON, methods of
//! strings, and some filters and tests.
//! Not here: rendering templates (`chat`), and what minijinja and its methods for Python already do in the same way.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Value as Jinja, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::Value;

/// Makes an environment write values and compute methods, filters and tests as Python's Jinja does.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&text(value)).map_err(Error::from),
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Jinja| match value.as_str() {
        // A text that is marked as safe stays so.
        Some(_) => value.clone(),
        None => text(value).into(),
    });
    environment.add_filter("join", join);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter("title", |value: &Jinja| title_words(&text(value)));
    environment.add_filter("trim", |value: &Jinja, chars: Option<&str>| trimmed(&text(value), chars, true, true));
    environment.add_function("cycler", minijinja_contrib::globals::cycler);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_test("sequence", |value: &Jinja| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    // None is no empty list.
    environment.add_test("iterable", |value: &Jinja| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("number", |value: &Jinja| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
}

/// Returns the value of a template for JSON. Its lists and objects are written as Python writes them wherever a template
/// turns them into text.
pub(super) fn of_json(value: &Value) -> Jinja {
    match value {
        Value::Array(list) => Jinja::from_object(List(list.iter().map(of_json).collect())),
        Value::Object(map) => Jinja::from_object(Dict {
            names: map.keys().map(Jinja::from).collect(),
            members: map.iter().map(|(key, value)| (key.clone(), of_json(value))).collect(),
        }),
        scalar => Jinja::from_serialize(scalar),
    }
}

/// A list of a template.
#[derive(Debug)]
struct List(Vec<Jinja>);

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Jinja::from_dyn_object(Arc::clone(self))))
    }
}

/// An object of a template.
#[derive(Debug)]
struct Dict {
    /// The names of the members, in their order.
    names: Vec<Jinja>,
    members: HashMap<String, Jinja>,
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Jinja> {
        self.members.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.names.clone())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Jinja::from_dyn_object(Arc::clone(self))))
    }
}

/// Returns what Python's `str` returns.
fn text(value: &Jinja) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => repr(value),
    }
}

/// Returns what Python's `repr` returns. Lists and tuples are not told apart.
fn repr(value: &Jinja) -> String {
    let mut out = String::new();
    write_repr(value, &mut out);
    out
}

fn write_repr(value: &Jinja, out: &mut String) {
    match value.kind() {
        ValueKind::String => write_quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&number_text(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
            let items = value.try_iter().into_iter().flatten();
            write_items(['[', ']'], items, out, write_repr);
        }
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            write_items(['{', '}'], keys, out, |key, out| {
                write_repr(key, out);
                out.push_str(": ");
                write_repr(&value.get_item(key).unwrap_or_default(), out);
            });
        }
        ValueKind::Undefined => out.push_str("Undefined"),
        _ => out.push_str(&value.to_string()),
    }
}

fn write_items(
    around: [char; 2],
    items: impl Iterator<Item = Jinja>,
    out: &mut String,
    write: impl Fn(&Jinja, &mut String),
) {
    out.push(around[0]);
    for (index, item) in items.enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        write(&item, out);
    }
    out.push(around[1]);
}

/// Writes a text in quotes: single ones, unless it has some and no double ones.
fn write_quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if c == quote => out.extend(['\\', c]),
            ' '..='~' => out.push(c),
            _ if is_printable(c) => out.push(c),
            _ => {
                let code = u32::from(c);
                out.push_str(&match code {
                    0..=0xff => format!("\\x{code:02x}"),
                    0x100..=0xffff => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                });
            }
        }
    }
    out.push(quote);
}

/// Whether a character outside ASCII is printable. Rust escapes the same categories of characters as Python.
fn is_printable(c: char) -> bool {
    // Behind another character, so that combining marks are not escaped.
    !c.is_ascii_control() && format!("a{c}").escape_debug().nth(1) == Some(c)
}

/// Writes a number with a fraction: the fewest digits that give it, with an exponent below 10⁻⁴ and from 10¹⁶ on.
fn number_text(number: f64) -> String {
    let size = number.abs();
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number < 0.0 { "-inf" } else { "inf" }.to_owned();
    }
    if number == 0.0 || (1e-4..1e16).contains(&size) {
        return format!("{number:?}");
    }
    let written = format!("{number:e}");
    match written.split_once('e') {
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
        None => written,
    }
}

/// The filter `tojson` of transformers: `json.dumps` with the arguments `ensure_ascii`, `indent`, `separators` and
/// `sort_keys`, by position or by name, without escapes for HTML.
fn tojson(value: &Jinja, given: Rest<Jinja>, named: Kwargs) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let wrong = |what: &str| Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    if given.len() > NAMES.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut arguments = [const { None }; NAMES.len()];
    for (index, name) in NAMES.into_iter().enumerate() {
        let argument: Option<Jinja> = named.get(name)?;
        arguments[index] = given.get(index).cloned().or(argument).filter(|argument| !argument.is_none());
    }
    named.assert_all_used()?;
    let [ascii, indent, separators, sorted] = arguments;
    if value.is_undefined() {
        return Err(wrong("an undefined value is no JSON"));
    }
    let indent = match indent {
        None => None,
        Some(indent) => match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => Some(text.to_owned()),
            (None, Some(spaces)) => Some(" ".repeat(spaces)),
            (None, None) => return Err(wrong("indent is neither a text nor a number from 0 on")),
        },
    };
    let [item, key] = match separators {
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
        Some(pair) => {
            let pair: Vec<Jinja> = pair.try_iter()?.collect();
            match pair.iter().map(Jinja::as_str).collect::<Vec<_>>()[..] {
                [Some(item), Some(key)] => [item.to_owned(), key.to_owned()],
                _ => return Err(wrong("separators are not two texts")),
            }
        }
    };
    let failed = |error: serde_json::Error| wrong("cannot write JSON").with_source(error);
    let mut value = serde_json::to_value(value).map_err(failed)?;
    if sorted.is_some_and(|sorted| sorted.is_true()) {
        value.sort_all_objects();
    }
    let ascii = ascii.is_some_and(|ascii| ascii.is_true());
    let mut out = Vec::new();
    let format = Dumps { indent, item, key, ascii, depth: 0, filled: false };
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, format)).map_err(failed)?;
    String::from_utf8(out).map_err(|error| wrong("cannot write JSON").with_source(error))
}

/// The format of Python's `json.dumps`.
struct Dumps {
    /// What indents a line by one level; `None` for everything on one line.
    indent: Option<String>,
    /// Between two items.
    item: String,
    /// Between a key and its value.
    key: String,
    /// Whether characters outside ASCII are escaped.
    ascii: bool,
    depth: usize,
    /// Whether the list or object that ends next has items.
    filled: bool,
}

impl Dumps {
    fn open<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, mark: &[u8]) -> std::io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(mark)
    }

    fn close<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, mark: &[u8]) -> std::io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.new_line(writer)?;
        }
        self.filled = true;
        writer.write_all(mark)
    }

    fn begin<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.filled = true;
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + std::io::Write>(&self, writer: &mut W) -> std::io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }
}

impl serde_json::ser::Formatter for Dumps {
    fn write_f64<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, value: f64) -> std::io::Result<()> {
        writer.write_all(number_text(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> std::io::Result<()> {
        if !self.ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            if matches!(c, ' '..='~') {
                writer.write_all(&[c as u8])?;
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(writer, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        self.begin(writer, first)
    }

    fn begin_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        self.begin(writer, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}

/// The filter `join`: the items as text, or one attribute of each.
fn join(values: &Jinja, between: Option<&str>, named: Kwargs) -> Result<String, Error> {
    let named_between: Option<&str> = named.get("d")?;
    let attribute: Option<&str> = named.get("attribute")?;
    named.assert_all_used()?;
    let mut texts = Vec::new();
    for mut value in values.try_iter()? {
        for name in attribute.into_iter().flat_map(|path| path.split('.')) {
            value = value.get_attr(name)?;
        }
        texts.push(text(&value));
    }
    Ok(texts.join(between.or(named_between).unwrap_or_default()))
}

/// The filter `length`. An undefined value has none, and no error.
fn length(value: &Jinja) -> Result<usize, Error> {
    let wrong = || {
        Error::new(ErrorKind::InvalidOperation, format!("cannot calculate length of value of type {}", value.kind()))
    };
    match value.is_undefined() {
        true => Ok(0),
        false => value.len().ok_or_else(wrong),
    }
}

/// The filter `escape`: the characters of HTML as entities, unless the text is marked as safe.
fn escape(value: &Jinja) -> Jinja {
    if value.is_safe() {
        return value.clone();
    }
    let mut escaped = String::new();
    for c in text(value).chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            _ => escaped.push(c),
        }
    }
    Jinja::from_safe_string(escaped)
}

/// The filter `title`: the first letter of each word in upper case. Words are separated by white space, hyphens and
/// opening brackets.
fn title_words(text: &str) -> String {
    let separates = |c: char| c.is_whitespace() || "-({[<".contains(c);
    let mut begins = true;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match begins {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        begins = separates(c);
    }
    out
}

/// The method `title`: the first of each run of letters in upper case.
fn title(text: &str) -> String {
    let mut begins = true;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match begins {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        begins = !is_cased(c);
    }
    out
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase()
}

/// Whether Python counts a character as white space: the separators of ASCII too.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Returns the text without these characters, or without white space, at its ends.
fn trimmed(text: &str, chars: Option<&str>, left: bool, right: bool) -> String {
    let strips = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(strips) } else { text };
    let text = if right { text.trim_end_matches(strips) } else { text };
    text.to_owned()
}

/// Splits a text at a separator, or at white space, at most `most` times, from its end if `from_end`.
fn split(text: &str, separator: Option<&str>, most: Option<usize>, from_end: bool) -> Vec<String> {
    let most = most.unwrap_or(usize::MAX);
    let owned = |parts: Vec<&str>| parts.into_iter().map(str::to_owned).collect::<Vec<String>>();
    match (separator, from_end) {
        (Some(separator), false) => owned(text.splitn(most.saturating_add(1), separator).collect()),
        (Some(separator), true) => {
            let mut parts: Vec<&str> = text.rsplitn(most.saturating_add(1), separator).collect();
            parts.reverse();
            owned(parts)
        }
        (None, false) => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_start_matches(is_space));
            while !rest.is_empty() && parts.len() < most {
                let (part, behind) = rest.split_at(rest.find(is_space).unwrap_or(rest.len()));
                parts.push(part);
                rest = behind.trim_start_matches(is_space);
            }
            parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
            owned(parts)
        }
        (None, true) => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end_matches(is_space));
            while !rest.is_empty() && parts.len() < most {
                let begin =
                    rest.char_indices().rev().find(|(_, c)| is_space(*c)).map_or(0, |(at, c)| at + c.len_utf8());
                let (before, part) = rest.split_at(begin);
                parts.push(part);
                rest = before.trim_end_matches(is_space);
            }
            parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
            parts.reverse();
            owned(parts)
        }
    }
}

/// Splits a text into lines.
fn lines(text: &str, keep_ends: bool) -> Vec<String> {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some((at, c)) = rest.char_indices().find(|(_, c)| ends(*c)) {
        let end = if rest[at..].starts_with("\r\n") { at + 2 } else { at + c.len_utf8() };
        lines.push(rest[..if keep_ends { end } else { at }].to_owned());
        rest = &rest[end..];
    }
    lines.extend(Some(rest.to_owned()).filter(|rest| !rest.is_empty()));
    lines
}

/// Calls a method of a value that is not one of minijinja's own.
fn method(state: &State<'_, '_>, value: &Jinja, name: &str, args: &[Jinja]) -> Result<Jinja, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, name, args)
    {
        return result;
    }
    pycompat::unknown_method_callback(state, value, name, args)
}

/// Calls a method of a text; `None` if it is left to `pycompat`, which counts positions in bytes, has other white space
/// and says of the empty text that it has all properties.
fn string_method(text: &str, name: &str, args: &[Jinja]) -> Option<Result<Jinja, Error>> {
    Some(match name {
        "strip" => strip(text, args, true, true),
        "lstrip" => strip(text, args, true, false),
        "rstrip" => strip(text, args, false, true),
        "split" => split_method(text, args, false),
        "rsplit" => split_method(text, args, true),
        "splitlines" => from_args(args).and_then(|(ends, named): (Option<bool>, Kwargs)| {
            let keep: Option<bool> = named.get("keepends")?;
            named.assert_all_used()?;
            Ok(lines(text, ends.or(keep).unwrap_or(false)).into())
        }),
        "find" | "rfind" | "index" | "rindex" => from_args(args).and_then(|(what,): (&str,)| {
            let found = if name.starts_with('r') { text.rfind(what) } else { text.find(what) };
            match found {
                Some(at) => Ok(text[..at].chars().count().into()),
                None if name.ends_with("find") => Ok((-1).into()),
                None => Err(Error::new(ErrorKind::InvalidOperation, format!("{name}: the text is not found"))),
            }
        }),
        "count" => from_args(args).map(|(what,): (&str,)| text.matches(what).count().into()),
        "join" => from_args(args).and_then(|(values,): (&Jinja,)| {
            let texts: Vec<String> = values.try_iter()?.map(|value| self::text(&value)).collect();
            Ok(texts.join(text).into())
        }),
        "removeprefix" => {
            from_args(args).map(|(prefix,): (&str,)| text.strip_prefix(prefix).unwrap_or(text).to_owned().into())
        }
        "removesuffix" => {
            from_args(args).map(|(suffix,): (&str,)| text.strip_suffix(suffix).unwrap_or(text).to_owned().into())
        }
        "partition" | "rpartition" => from_args(args).map(|(separator,): (&str,)| {
            let last = name == "rpartition";
            match if last { text.rsplit_once(separator) } else { text.split_once(separator) } {
                Some((before, behind)) => parts([before, separator, behind]),
                None if last => parts(["", "", text]),
                None => parts([text, "", ""]),
            }
        }),
        "title" => from_args(args).map(|()| title(text).into()),
        "islower" => property(args, || text.chars().any(is_cased) && !text.chars().any(char::is_uppercase)),
        "isupper" => property(args, || text.chars().any(is_cased) && !text.chars().any(char::is_lowercase)),
        "isspace" => property(args, || !text.is_empty() && text.chars().all(is_space)),
        "isdigit" | "isnumeric" | "isalnum" | "isalpha" if text.is_empty() => property(args, || false),
        _ => return None,
    })
}

fn parts(texts: [&str; 3]) -> Jinja {
    texts.map(str::to_owned).to_vec().into()
}

fn property(args: &[Jinja], holds: impl FnOnce() -> bool) -> Result<Jinja, Error> {
    from_args(args).map(|()| holds().into())
}

fn strip(text: &str, args: &[Jinja], left: bool, right: bool) -> Result<Jinja, Error> {
    from_args(args).map(|(chars,): (Option<&str>,)| trimmed(text, chars, left, right).into())
}

fn split_method(text: &str, args: &[Jinja], from_end: bool) -> Result<Jinja, Error> {
    let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let named_separator: Option<&str> = named.get("sep")?;
    let named_most: Option<i64> = named.get("maxsplit")?;
    named.assert_all_used()?;
    let separator = separator.or(named_separator);
    if separator == Some("") {
        return Err(Error::new(ErrorKind::InvalidOperation, "split: the separator is empty"));
    }
    // A negative number means no limit.
    let most = most.or(named_most).and_then(|most| usize::try_from(most).ok());
    Ok(split(text, separator, most, from_end).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Renders an expression over `v`. The expected texts of these tests are those of Jinja2 with the filter `tojson` of
    /// transformers.
    #[track_caller]
    fn check(expression: &str, v: Value, expected: &str) {
        let mut environment = Environment::new();
        install(&mut environment);
        let rendered =
            environment.render_str(&format!("{{{{ {expression} }}}}"), minijinja::context!(v => of_json(&v)));
        assert_eq!(rendered.unwrap_or_else(|error| format!("error: {error}")), expected, "{expression}");
    }

    #[test]
    fn values_are_written_as_python_writes_them() {
        let v =
            json!({"a": ["x", "it's", "\"", "'\"", null, true, 1, 2.0, {}], "é\n\u{7f}\u{200b}\u{e000}\u{f0000}": []});
        let written =
            r#"{'a': ['x', "it's", '"', '\'"', None, True, 1, 2.0, {}], 'é\n\x7f\u200b\ue000\U000f0000': []}"#;
        check("v", v.clone(), written);
        check("v | string", v.clone(), written);
        check("'' ~ v", v.clone(), written);
        check("[v] | join", v.clone(), written);
        check("''.join([v])", v, written);
        check("['a', [v]]", json!("b"), "['a', ['b']]");
        check("{'a': v}", json!("e\u{301}😀"), "{'a': 'e\u{301}😀'}");
        check("v", json!("'"), "'");
        check("v.a.b", json!({"a": {}}), "");
    }

    #[test]
    fn numbers_have_the_digits_and_exponents_of_python() {
        let v = json!([1e16, 1e15, 1e-4, 1e-5, 1.5e-7, 1e22, 1e100, -0.0, 0.1, 123456789.12345679]);
        let written = "1e+16, 1000000000000000.0, 0.0001, 1e-05, 1.5e-07, 1e+22, 1e+100, -0.0, 0.1, 123456789.12345679";
        check("v", v.clone(), &format!("[{written}]"));
        check("v | join(', ')", v.clone(), written);
        check("v | tojson", v.clone(), &format!("[{written}]"));
        check("v[3]", v, "1e-05");
        check("v", json!(u64::MAX), "18446744073709551615");
    }

    #[test]
    fn json_has_the_arguments_of_transformers() {
        let v = json!({"b": ["é😀\u{7f}\n\"", {}, []], "a": 1});
        check("v | tojson", v.clone(), "{\"b\": [\"é😀\u{7f}\\n\\\"\", {}, []], \"a\": 1}");
        let ascii = r#"{"b": ["\u00e9\ud83d\ude00\u007f\n\"", {}, []], "a": 1}"#;
        check("v | tojson(true)", v.clone(), ascii);
        check("v | tojson(ensure_ascii=true)", v.clone(), ascii);
        check("v.b[1:] | tojson(separators=(',', ':'))", v.clone(), "[{},[]]");
        check("v.b[1:] | tojson(false, 2)", v.clone(), "[\n  {},\n  []\n]");
        check("v.b[1:] | tojson(indent='\t')", v.clone(), "[\n\t{},\n\t[]\n]");
        check("v.b[1:] | tojson(indent=0)", v.clone(), "[\n{},\n[]\n]");
        check("[v.a, [v.a]] | tojson(indent=none)", v.clone(), "[1, [1]]");
        check("[[[v.a], 2]] | tojson(indent=1)", v.clone(), "[\n [\n  [\n   1\n  ],\n  2\n ]\n]");
        check("{'b': v.a, 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=true)", v, r#"{"a": {"c": 2, "d": 1}, "b": 1}"#);
    }

    #[test]
    fn strings_have_the_methods_of_python() {
        check("v.find('x') ~ v.rfind('é') ~ v.find('z') ~ v.index('x')", json!("ééx"), "21-12");
        check("v.split()", json!(" a\u{1c}b  c "), "['a', 'b', 'c']");
        check("v.split(none, 1)", json!(" a  b  c "), "['a', 'b  c ']");
        check("v.rsplit(none, 1)", json!(" a  b  c "), "[' a  b', 'c']");
        check(
            "[v.split(','), v.split(',', 1), v.rsplit(',', 1)]",
            json!("a,b,"),
            "[['a', 'b', ''], ['a', 'b,'], ['a,b', '']]",
        );
        check("v.split(sep='b', maxsplit=1)", json!("abcb"), "['a', 'cb']");
        check("[''.split(), ''.split(',')]", json!(0), "[[], ['']]");
        check("v.splitlines()", json!("a\r\nb\u{2028}\rc\n"), r"['a', 'b', '', 'c']");
        check("v.splitlines(true)", json!("a\r\nb"), r"['a\r\n', 'b']");
        check(
            "[v.strip(), v.lstrip(), v.rstrip('\u{1f} '), v | trim]",
            json!("\u{1f} a "),
            r"['a', 'a ', '\x1f a', 'a']",
        );
        check(
            "[v.removeprefix('a'), v.removesuffix('c'), v.partition('b')]",
            json!("abc"),
            "['bc', 'ab', ['a', 'b', 'c']]",
        );
        check("v.title() ~ (v | title)", json!("they're x1y-z"), "They'Re X1Y-ZThey're X1y-Z");
        check(
            "[v.isdigit(), v.isalpha(), v.islower(), v.isupper(), v.isspace()]",
            json!(""),
            "[False, False, False, False, False]",
        );
        check(
            "['A1'.isupper(), 'a1'.islower(), 'aA'.islower(), '1'.isupper()]",
            json!(0),
            "[True, True, False, False]",
        );
        check("v.count('')", json!("ab"), "3");
    }

    #[test]
    fn filters_and_tests_are_those_of_jinja() {
        check("v.calls | length", json!({}), "0");
        check("v | length", json!("éé"), "2");
        check("v | join(', ', attribute='f.n')", json!([{"f": {"n": "a"}}, {"f": {"n": 1.0}}]), "a, 1.0");
        check(
            "[v is sequence, v.a is sequence, 'x' is sequence, 1 is sequence]",
            json!({"a": []}),
            "[True, True, True, False]",
        );
        check(
            "[v.n is iterable, v is iterable, v.s is iterable, 1 is iterable]",
            json!({"n": null, "s": ""}),
            "[False, True, True, False]",
        );
        check("[true is number, 1 is number, 'x' is number]", json!(0), "[True, True, False]");
        check(
            "[v | e, v | e | escape, v | safe | e]",
            json!("<'\"&>"),
            "['&lt;&#39;&#34;&amp;&gt;', '&lt;&#39;&#34;&amp;&gt;', '<\\'\"&>']",
        );
        check("v == [1, 'a'] and v[1:] == ['a'] and v + v == v * 2 and 'a' in v", json!([1, "a"]), "True");
        check(
            "v == {'a': 1} and 'a' in v and v.get('b', 2) == 2 and v | items | first == ['a', 1]",
            json!({"a": 1}),
            "True",
        );
    }
}
