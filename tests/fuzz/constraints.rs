//! Generates structured constraints from bytes: chains, cycles, products and repetitions, alone and nested. A fuzzer
//! that mutates single characters of a grammar finds errors of syntax; stack, memory and time are consumed by its
//! structure. Not here: what is done with the constraints.

use ostinato::model::grammar::{Constraint, MOST_BYTES};

/// How the rules or definitions refer to each other.
#[derive(Clone, Copy)]
enum Shape {
    /// Each refers to the next.
    Chain,
    /// Each refers to the next, and the last to the first.
    Cycle,
    /// Each refers to the next twice.
    Product,
    /// Each repeats the next this many times.
    Repetition(u32),
    /// The next is optional in each.
    Optional,
}

/// Reads numbers from the input; returns zeroes after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a number up to tens of thousands whose logarithm is uniform, so that small numbers are as frequent as
    /// large ones.
    fn count(&mut self) -> usize {
        let bits = self.byte() % 16;
        (1 << bits) + usize::from(self.byte()) * (1 << bits) / 256
    }

    fn shape(&mut self) -> Shape {
        match self.byte() % 5 {
            0 => Shape::Chain,
            1 => Shape::Cycle,
            2 => Shape::Product,
            3 => Shape::Repetition(self.count() as u32 * u32::from(self.byte()).max(1)),
            _ => Shape::Optional,
        }
    }
}

/// Returns a constraint. Its text is at most about [`MOST_BYTES`] long.
pub fn constraint(bytes: &[u8]) -> Constraint {
    let input = &mut Input(bytes);
    match input.byte() % 7 {
        0 => Constraint::Regex(regex(input)),
        1 => Constraint::Grammar(rules(input, "start", "a", ": ")),
        2 => Constraint::Grammar(rules(input, "start", "A", ": ")),
        3 => Constraint::Grammar(rules(input, "root", "a", " ::= ")),
        4 => Constraint::JsonSchema(schema(input)),
        5 => {
            let content = serde_json::json!({"type": "regex", "pattern": regex(input)});
            let format = serde_json::json!({"type": "tag", "begin": "<", "content": content, "end": ">"});
            Constraint::StructuralTag(serde_json::json!({"type": "structural_tag", "format": format}).to_string())
        }
        _ => {
            let (count, length) = (input.count() % 1100, input.count() % 512);
            Constraint::Choice((0..count).map(|i| format!("{i}{}", "x".repeat(length))).collect())
        }
    }
}

fn regex(input: &mut Input<'_>) -> String {
    let mut text = "a".to_owned();
    for _ in 0..input.byte() % 6 {
        let count = input.count();
        let times = count.min(MOST_BYTES / 2 / (text.len() + 4)).max(1);
        text = match input.byte() % 8 {
            0 => format!("({text}){{{count}}}"),
            1 => format!("({text}){{0,{count}}}"),
            2 => format!("({text})?").repeat(times),
            3 => text.repeat(times),
            4 => format!("({text})*b"),
            5 => (0..times.min(500)).map(|i| format!("{text}{i}")).collect::<Vec<_>>().join("|"),
            6 => format!(".*{text}.{{{count}}}"),
            _ => format!("[^{text}]({text}|b)+"),
        };
        if text.len() > MOST_BYTES {
            break;
        }
    }
    text
}

fn rules(input: &mut Input<'_>, start: &str, name: &str, is: &str) -> String {
    let (shape, count) = (input.shape(), input.count());
    let mut text = format!("{start}{is}{name}0\n");
    let mut last = 0;
    for i in 0..count {
        if text.len() > MOST_BYTES - 100 {
            break;
        }
        last = i + 1;
        let next = format!("{name}{last}");
        let body = match shape {
            Shape::Chain | Shape::Cycle => next,
            Shape::Product => format!("{next} {next}"),
            Shape::Repetition(times) => format!("{next}{{{times}}}"),
            Shape::Optional => format!("\"y\" {next}?"),
        };
        text.push_str(&format!("{name}{i}{is}{body}\n"));
    }
    let end = if matches!(shape, Shape::Cycle) { format!("\"x\" | \"z\" {name}0") } else { "\"x\"".to_owned() };
    text.push_str(&format!("{name}{last}{is}{end}\n"));
    text
}

fn schema(input: &mut Input<'_>) -> String {
    let (shape, kind, count) = (input.shape(), input.byte(), input.count());
    let reference = |i: usize| format!("{{\"$ref\":\"#/$defs/d{i}\"}}");
    let mut definitions = Vec::new();
    let mut length = 0;
    for i in 0..count {
        let next = reference(i + 1);
        let body = match (kind % 4, shape) {
            (_, Shape::Product) => format!("{{\"anyOf\":[{next},{next}]}}"),
            (_, Shape::Repetition(times)) => {
                format!("{{\"type\":\"array\",\"items\":{next},\"minItems\":{times},\"maxItems\":{times}}}")
            }
            (0, _) => next,
            (1, _) => format!("{{\"type\":\"array\",\"items\":{next}}}"),
            (2, _) => format!("{{\"allOf\":[{next}]}}"),
            _ => format!("{{\"type\":\"object\",\"properties\":{{\"p{i}\":{next}}},\"required\":[\"p{i}\"]}}"),
        };
        length += body.len() + 12;
        if length > MOST_BYTES - 200 {
            break;
        }
        definitions.push(format!("\"d{i}\":{body}"));
    }
    let last = definitions.len();
    let end = if matches!(shape, Shape::Cycle) { reference(0) } else { "{\"type\":\"null\"}".to_owned() };
    definitions.push(format!("\"d{last}\":{end}"));
    format!("{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{}}}}}", definitions.join(","))
}
