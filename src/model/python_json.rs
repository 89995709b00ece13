//! JSON as Python's `json` module writes it, in which infinities and NaN may stand for numbers: configurations that older
//! versions of transformers saved have them. Not here: JSON of requests and of other files, which is parsed strictly.

use serde_json::Value;

/// The words that Python writes for numbers that JSON cannot express.
const NUMBERS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Parses a text. `Infinity`, `-Infinity` and `NaN` become strings.
///
/// # Errors
/// If it is not JSON apart from that; the error is that of the text as it is.
pub fn parse(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).or_else(|error| serde_json::from_str(&quoted(text)).map_err(|_| error))
}

/// Returns a text with quotation marks around such numbers.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.find(['"', '-', 'I', 'N']) {
        out.push_str(&rest[..next]);
        rest = &rest[next..];
        if rest.starts_with('"') {
            let end = string_end(rest);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        // All else that begins so is copied: negative numbers, and errors, which the parser reports.
        let number = NUMBERS.into_iter().find(|number| rest.starts_with(number));
        match number {
            Some(number) => {
                out.push('"');
                out.push_str(number);
                out.push('"');
            }
            None => out.push_str(&rest[..1]),
        }
        rest = &rest[number.map_or(1, str::len)..];
    }
    out.push_str(rest);
    out
}

/// Returns the length of the string with which a text begins, quotation marks included; that of the text, if it does not end.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: numbers without a text in JSON are strings, also beside strings that hold the same words, quotation marks and
    /// backslashes; other texts are what they are, and errors name the place in the file.
    #[test]
    fn infinities_and_nan_are_strings() {
        let text = r#"{"a": [0.0, Infinity], "b \" Infinity": -Infinity, "c": NaN, "d": "NaN\\", "é": -1, "f": [NaN]}"#;
        let wanted = serde_json::json!({
            "a": [0.0, "Infinity"], "b \" Infinity": "-Infinity", "c": "NaN", "d": "NaN\\", "é": -1, "f": ["NaN"],
        });
        assert_eq!(parse(text).unwrap(), wanted);
        assert_eq!(parse("NaN").unwrap(), "NaN");
        for wrong in
            [r#"{"a": Inf}"#, r#"{"a": -Infinite}"#, r#"{"a": +Infinity}"#, r#"{"a": "Infinity}"#, "N", "-", "{"]
        {
            let error = parse(wrong).expect_err(wrong).to_string();
            assert_eq!(error, serde_json::from_str::<Value>(wrong).unwrap_err().to_string());
        }
    }
}
