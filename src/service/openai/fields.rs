//! Reads fields of JSON objects. A wrong type is refused with the path of the field, `null` counts as absent, and
//! unknown fields are ignored.
//! Not here: the meaning of the fields.

use crate::service::refusal::Refusal;
use serde_json::{Map, Value};

/// The name of the whole body in messages. It is no field.
pub(super) const BODY: &str = "the body";

/// A JSON object and its path, which refusals name.
#[derive(Debug)]
pub(super) struct Fields {
    path: String,
    map: Map<String, Value>,
}

/// Returns the refusal of the field at `path`. It quotes the value only if that is a number.
pub(super) fn refuse(path: impl Into<String>, value: &Value, rule: impl Into<String>) -> Refusal {
    Refusal::Json { field: path.into(), value: shown(value), rule: rule.into() }
}

/// Formats a value for an error message: numbers and booleans as they are, everything else by its type, since it may
/// quote a prompt.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.len() <= 32 => format!("{text:?}"),
        Value::String(text) => format!("a text of {} bytes", text.len()),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

/// Returns the text `value`, which is at `path`.
pub(super) fn text(path: &str, value: Value) -> Result<String, Refusal> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(refuse(path, &other, "a text")),
    }
}

/// Returns a non-negative whole number, which may be written as `1.0`.
pub(super) fn whole(value: &Value) -> Option<u64> {
    let integral = |number: f64| (number.fract() == 0.0 && (0.0..9e15).contains(&number)).then_some(number as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(integral))
}

impl Fields {
    /// Wraps the object `value` at `path`; the path of the outermost object is empty.
    pub(super) fn of(path: impl Into<String>, value: Value) -> Result<Fields, Refusal> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Fields { path, map }),
            other if path.is_empty() => Err(refuse(BODY, &other, "an object")),
            other => Err(refuse(path, &other, "an object")),
        }
    }

    /// Returns the path of a field.
    pub(super) fn at(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// Takes a field of any type.
    pub(super) fn any(&mut self, key: &str) -> Option<Value> {
        self.map.get_mut(key).map(Value::take).filter(|value| !value.is_null())
    }

    /// Returns a field of any type without taking it.
    pub(super) fn peek(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Sets a field.
    pub(super) fn put(&mut self, key: &str, value: Value) {
        self.map.insert(key.to_owned(), value);
    }

    /// Takes a field and converts it with `read`.
    fn read<T>(&mut self, key: &str, rule: &str, read: impl FnOnce(&Value) -> Option<T>) -> Result<Option<T>, Refusal> {
        let Some(value) = self.any(key) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| refuse(self.at(key), &value, rule))
    }

    pub(super) fn flag(&mut self, key: &str) -> Result<Option<bool>, Refusal> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(super) fn number(&mut self, key: &str) -> Result<Option<f32>, Refusal> {
        let finite = |value: &Value| value.as_f64().map(|number| number as f32).filter(|number| number.is_finite());
        self.read(key, "a number", finite)
    }

    pub(super) fn whole(&mut self, key: &str) -> Result<Option<u32>, Refusal> {
        let read = |value: &Value| whole(value).and_then(|number| u32::try_from(number).ok());
        self.read(key, "a whole number from 0 to 4294967295", read)
    }

    /// Takes a whole number that may be negative.
    pub(super) fn signed(&mut self, key: &str) -> Result<Option<i64>, Refusal> {
        let read =
            |value: &Value| value.as_i64().or_else(|| whole(value).and_then(|number| i64::try_from(number).ok()));
        self.read(key, "a whole number", read)
    }

    pub(super) fn text(&mut self, key: &str) -> Result<Option<String>, Refusal> {
        let path = self.at(key);
        self.any(key).map(|value| text(&path, value)).transpose()
    }

    pub(super) fn list(&mut self, key: &str) -> Result<Option<Vec<Value>>, Refusal> {
        match self.any(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(refuse(self.at(key), &other, "a list")),
        }
    }

    pub(super) fn object(&mut self, key: &str) -> Result<Option<Fields>, Refusal> {
        let path = self.at(key);
        self.any(key).map(|value| Fields::of(path, value)).transpose()
    }

    /// Takes a required text.
    pub(super) fn need_text(&mut self, key: &str) -> Result<String, Refusal> {
        self.text(key)?.ok_or_else(|| self.missing(key, "a text"))
    }

    /// Returns the refusal of a required field that is absent.
    pub(super) fn missing(&self, key: &str, rule: &str) -> Refusal {
        Refusal::Json { field: self.at(key), value: "missing".to_owned(), rule: rule.to_owned() }
    }

    /// Refuses fields that are not supported, unless they have a value without effect: false, 0, or an empty text, list
    /// or object.
    pub(super) fn not_served(&mut self, keys: &[&str]) -> Result<(), Refusal> {
        let asks = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Number(number) => number.as_f64() != Some(0.0),
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            Value::Bool(true) => true,
        };
        match keys.iter().find(|key| self.map.get(**key).is_some_and(asks)) {
            Some(key) => Err(Refusal::NotServedField { field: self.at(key), what: String::new() }),
            None => Ok(()),
        }
    }

    /// Returns the remaining fields.
    pub(super) fn into_map(self) -> Map<String, Value> {
        self.map
    }
}
