//! Regular expressions of tokenizer.json in the dialect of the library here. Elsewhere the library runs Oniguruma, for
//! which the files were written, and some constructs mean something else there: they are rewritten, or refused by name,
//! because a text that is split in another way has other tokens without any error.
//! Not here: running them.

use serde_json::Value;

/// Rewrites all expressions of a tokenizer. Returns the first one that is refused, and the construct in it.
pub(super) fn translate_all(value: &mut Value) -> Result<(), (String, String)> {
    match value {
        Value::Array(values) => values.iter_mut().try_for_each(translate_all),
        Value::Object(members) => members.iter_mut().try_for_each(|(key, value)| match value {
            Value::String(expression) if key == "Regex" => {
                *expression = translate(expression).map_err(|construct| (expression.clone(), construct))?;
                Ok(())
            }
            value => translate_all(value),
        }),
        _ => Ok(()),
    }
}

/// Rewrites an expression. Returns the construct for which it is refused.
fn translate(expression: &str) -> Result<String, String> {
    let mut out = String::with_capacity(expression.len());
    let mut rest = expression;
    // The number of character classes that are open, one within the other.
    let mut classes = 0u32;
    while let Some(c) = rest.chars().next() {
        let mut taken = c.len_utf8();
        match c {
            '\\' => {
                let escaped = rest[1..].chars().next();
                taken += escaped.map_or(0, char::len_utf8);
                match escaped {
                    Some('w' | 'W') => return Err(rest[..taken].to_owned()),
                    // Within a class, `\b` is a character.
                    Some('b' | 'B' | 'G' | 'Z') if classes == 0 => return Err(rest[..taken].to_owned()),
                    Some('p' | 'P' | 'x' | 'k' | 'u') if rest[taken..].starts_with('{') => {
                        taken = rest.find('}').map_or(rest.len(), |at| at + 1);
                        out.push_str(&rest[..taken]);
                    }
                    _ => out.push_str(&rest[..taken]),
                }
            }
            '[' => {
                if classes > 0 && rest.starts_with("[:") {
                    return Err(rest[..rest.find(":]").map_or(2, |at| at + 2)].to_owned());
                }
                classes += 1;
                // A closing bracket at the beginning of a class is a character of it.
                taken = ["[^]", "[]", "[^"].into_iter().find(|begin| rest.starts_with(begin)).map_or(1, str::len);
                out.push_str(&rest[..taken]);
            }
            ']' if classes > 0 => {
                classes -= 1;
                out.push(c);
            }
            _ if classes > 0 => out.push(c),
            // The ends of each line.
            '^' | '$' => out.extend(["(?m:", &rest[..1], ")"]),
            '(' => {
                let flags = rest.strip_prefix("(?").unwrap_or_default();
                let flags = &flags[..flags.find(|c: char| !c.is_ascii_alphabetic() && c != '-').unwrap_or(flags.len())];
                if rest[2.min(rest.len())..].starts_with(flags) && flags.contains(['m', 's', 'x']) {
                    return Err(format!("(?{flags}"));
                }
                out.push(c);
            }
            '{' => {
                let end = rest.find('}').filter(|end| rest[1..*end].chars().all(|c| c.is_ascii_digit() || c == ','));
                if let Some(end) = end {
                    taken = end + 1;
                    // A repetition of the repetition there, a possessive one here.
                    if rest[taken..].starts_with('+') {
                        return Err(rest[..taken + 1].to_owned());
                    }
                }
                out.push_str(&rest[..taken]);
            }
            _ => out.push(c),
        }
        rest = &rest[taken..];
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn constructs_are_rewritten_where_they_mean_something_else() {
        for (expression, expected) in [
            (r"\s+$|^a|[$^]\$\^", r"\s+(?m:$)|(?m:^)a|[$^]\$\^"),
            (r"[^\]$]|[]$]|[^]$][\b]\\w", r"[^\]$]|[]$]|[^]$][\b]\\w"),
            (r"(?i:'s|'t)|\p{N}{1,3}|[^\r\n\p{L}]?+\p{L}++|\s+(?!\S)|(?<=x)|(?>a)|(?<n>b)\k<n>", ""),
            (r"\x{4e00}+|\p{L}+|a{2}|a{x}+|(", ""),
        ] {
            let expected = if expected.is_empty() { expression } else { expected };
            assert_eq!(translate(expression).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn constructs_without_an_equal_are_refused() {
        for (expression, construct) in [
            (r"a\b", r"\b"),
            (r"\w+", r"\w"),
            (r"[^\s\W]", r"\W"),
            (r"\B", r"\B"),
            (r"x\Z", r"\Z"),
            (r"\G.", r"\G"),
            (r"[[:punct:]]+", "[:punct:]"),
            (r"\p{N}{1,3}+", "{1,3}+"),
            (r"a(?m)b", "(?m"),
            (r"(?i-s:.)", "(?i-s"),
        ] {
            assert_eq!(translate(expression), Err(construct.to_owned()));
        }
        let mut split =
            json!({"pre_tokenizer": {"pretokenizers": [{"pattern": {"Regex": "a$"}}, {"pattern": {"Regex": r"\b"}}]}});
        assert_eq!(translate_all(&mut split), Err((r"\b".to_owned(), r"\b".to_owned())));
        assert_eq!(split["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"], "a(?m:$)");
    }
}
