//! The choice of an adapter. It fails closed: it never falls back to another GPU, nor to a CPU driver that was not
//! named. Pure functions.

use crate::device::adapter::Adapter;
use crate::device::error::DeviceError;
use std::fmt;
use std::str::FromStr;

/// The user's way to name an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The device UUID: 32 hexadecimal digits in lower case, without dashes.
    Uuid(String),
    /// The PCI address `domain:bus:device.function` in lower case; the domain has at least four digits.
    Pci(String),
    /// A part of the adapter's name, case-insensitive; a CPU driver requires the whole name.
    Name(String),
    /// The index in the list that `ostinato devices` prints.
    Index(usize),
    /// The CPU driver.
    Cpu,
}

impl FromStr for Selector {
    type Err = DeviceError;

    /// Parses `cpu`, an index, a UUID (dashes and a leading `GPU-` are optional) or a PCI address (the domain is
    /// optional); any other text is a name. The prefixes `uuid:`, `pci:`, `index:` and `name:` force the kind.
    fn from_str(text: &str) -> Result<Selector, DeviceError> {
        let bad = |reason: &str| DeviceError::BadSelector { text: text.to_owned(), reason: reason.to_owned() };
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Err(bad("it is empty"));
        }
        let forced = |prefix: &str| {
            trimmed
                .get(..prefix.len())
                .filter(|head| head.eq_ignore_ascii_case(prefix))
                .map(|_| trimmed[prefix.len()..].trim())
        };
        if let Some(rest) = forced("uuid:") {
            return uuid(rest).map(Selector::Uuid).ok_or_else(|| bad("a UUID has 32 hexadecimal digits"));
        }
        if let Some(rest) = forced("pci:") {
            return pci(rest).map(Selector::Pci).ok_or_else(|| bad("a PCI address looks like 0000:65:00.0 or 65:00.0"));
        }
        if let Some(rest) = forced("index:") {
            return rest.parse().map(Selector::Index).map_err(|_| bad("an index is a whole number"));
        }
        if let Some(rest) = forced("name:") {
            return if rest.is_empty() { Err(bad("the name is empty")) } else { Ok(Selector::Name(rest.to_owned())) };
        }
        if trimmed.eq_ignore_ascii_case("cpu") {
            return Ok(Selector::Cpu);
        }
        if trimmed.bytes().all(|b| b.is_ascii_digit()) && trimmed.len() < 32 {
            return trimmed.parse().map(Selector::Index).map_err(|_| bad("the index is too large"));
        }
        Ok(uuid(trimmed)
            .map(Selector::Uuid)
            .or_else(|| pci(trimmed).map(Selector::Pci))
            .unwrap_or_else(|| Selector::Name(trimmed.to_owned())))
    }
}

impl fmt::Display for Selector {
    /// Writes the selector as a user would; the text parses back to the same selector.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Selector::Uuid(digits) => {
                for (i, part) in [0..8, 8..12, 12..16, 16..20, 20..32].into_iter().enumerate() {
                    write!(f, "{}{}", if i > 0 { "-" } else { "" }, digits.get(part).unwrap_or_default())?;
                }
                Ok(())
            }
            Selector::Pci(address) => f.write_str(address),
            Selector::Name(name) => match name.parse() {
                Ok(Selector::Name(same)) if same == *name => f.write_str(name),
                _ => write!(f, "name:{name}"),
            },
            Selector::Index(index) => write!(f, "{index}"),
            Selector::Cpu => f.write_str("cpu"),
        }
    }
}

/// Returns the only adapter that the selector names; without a selector, the only usable GPU. Errors list the adapters,
/// one per line.
pub fn select<'a>(adapters: &'a [Adapter], selector: Option<&Selector>) -> Result<&'a Adapter, DeviceError> {
    let Some(selector) = selector else {
        return only_gpu(adapters);
    };
    let of = |test: &dyn Fn(&Adapter) -> bool| adapters.iter().filter(|a| test(a)).collect::<Vec<&Adapter>>();
    let found = match selector {
        Selector::Uuid(digits) => of(&|a| uuid(&a.uuid).as_ref() == Some(digits)),
        Selector::Pci(address) => of(&|a| a.pci.as_deref().and_then(pci).as_ref() == Some(address)),
        Selector::Index(index) => of(&|a| a.index == *index),
        Selector::Cpu => of(&Adapter::is_cpu),
        Selector::Name(name) => {
            let wanted = name.to_lowercase();
            let exact = of(&|a| a.name.to_lowercase() == wanted);
            if exact.is_empty() { of(&|a| !a.is_cpu() && a.name.to_lowercase().contains(&wanted)) } else { exact }
        }
    };
    match found[..] {
        [one] => match &one.refused {
            None => Ok(one),
            Some(reason) => Err(DeviceError::Refused { name: one.name.clone(), reason: reason.clone() }),
        },
        [] => Err(DeviceError::NoMatch {
            selector: selector.to_string(),
            hint: cpu_hint(adapters, selector),
            adapters: lines(adapters.iter()),
            no_gpu: None,
        }),
        _ => Err(DeviceError::Ambiguous {
            selector: selector.to_string(),
            count: found.len(),
            adapters: lines(found.iter().copied()),
        }),
    }
}

fn only_gpu(adapters: &[Adapter]) -> Result<&Adapter, DeviceError> {
    let gpus: Vec<&Adapter> = adapters.iter().filter(|a| a.usable() && !a.is_cpu()).collect();
    match gpus[..] {
        [one] => Ok(one),
        _ => Err(DeviceError::MustChoose { count: gpus.len(), adapters: lines(adapters.iter()), no_gpu: None }),
    }
}

/// A part of a CPU driver's name does not select that driver. Returns a hint that says what does, or an empty string.
fn cpu_hint(adapters: &[Adapter], selector: &Selector) -> String {
    let Selector::Name(name) = selector else {
        return String::new();
    };
    let wanted = name.to_lowercase();
    match adapters.iter().find(|a| a.is_cpu() && a.name.to_lowercase().contains(&wanted)) {
        Some(cpu) => {
            format!("a CPU driver is chosen only by cpu, its index {}, its UUID or its whole name; ", cpu.index)
        }
        None => String::new(),
    }
}

fn lines<'a>(adapters: impl Iterator<Item = &'a Adapter>) -> String {
    let mut out = String::new();
    for adapter in adapters {
        out.push_str(&format!("\n  {adapter}"));
    }
    if out.is_empty() { "\n  (none)".to_owned() } else { out }
}

/// Returns the 32 hexadecimal digits of a UUID in lower case; the text may have dashes and a leading `GPU-`.
fn uuid(text: &str) -> Option<String> {
    let lower = text.to_lowercase();
    let digits: String = lower.strip_prefix("gpu-").unwrap_or(&lower).chars().filter(|&c| c != '-').collect();
    (digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_hexdigit())).then_some(digits)
}

/// Returns the full PCI address in lower case; a missing domain becomes 0000.
fn pci(text: &str) -> Option<String> {
    let hex = |part: &str, digits: std::ops::RangeInclusive<usize>| {
        if digits.contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit()) {
            u32::from_str_radix(part, 16).ok()
        } else {
            None
        }
    };
    let (slot, function) = text.trim().rsplit_once('.')?;
    let parts: Vec<&str> = slot.split(':').collect();
    let (domain, bus, device) = match parts[..] {
        [bus, device] => ("0000", bus, device),
        [domain, bus, device] => (domain, bus, device),
        _ => return None,
    };
    let (domain, bus) = (hex(domain, 1..=8)?, hex(bus, 1..=2)?);
    let (device, function) = (hex(device, 1..=2)?, hex(function, 1..=1)?);
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
