//! How a device is named: by UUID, PCI address, index, name or as the CPU driver. Pure: text and values only.

use serde::de::{Deserialize, Deserializer, Error};
use std::fmt;
use std::str::FromStr;

/// The text is not a device selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("device \"{text}\" cannot be parsed: {reason}")]
pub struct SelectorError {
    text: String,
    reason: &'static str,
}

/// The properties of a device that a [`Selector`] compares.
#[derive(Clone, Copy, Debug)]
pub struct DeviceNames<'a> {
    /// The index in the list that `ostinato devices` prints.
    pub index: usize,
    /// The name, as the driver reports it.
    pub name: &'a str,
    /// The UUID in hexadecimal digits, with or without dashes.
    pub uuid: &'a str,
    /// The PCI address, if the driver reports one.
    pub pci: Option<&'a str>,
    /// Whether it is a CPU driver.
    pub is_cpu: bool,
}

/// The user's way to name a device, in the configuration, on the command line and in requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// The device UUID: 32 hexadecimal digits in lower case, without dashes.
    Uuid(String),
    /// The PCI address `domain:bus:device.function` in lower case; the domain has at least four digits.
    Pci(String),
    /// The device's name or a part of it, case-insensitive.
    Name(String),
    /// The index in the list that `ostinato devices` prints.
    Index(usize),
    /// The CPU driver.
    Cpu,
}

impl FromStr for Selector {
    type Err = SelectorError;

    /// Parses `cpu`, an index, a UUID (dashes and a leading `GPU-` are optional) or a PCI address (the domain is
    /// optional); any other text is a name. The prefixes `uuid:`, `pci:`, `index:` and `name:` force the kind.
    fn from_str(text: &str) -> Result<Selector, SelectorError> {
        let bad = |reason| SelectorError { text: text.to_owned(), reason };
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

impl<'de> Deserialize<'de> for Selector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Selector, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl Selector {
    /// Returns the positions of the devices that the selector names. A name is compared as a whole first; only if no
    /// device has it, devices match whose name contains it, CPU drivers among them only with `part_of_cpu`.
    pub fn find<'a>(&self, devices: impl Iterator<Item = DeviceNames<'a>> + Clone, part_of_cpu: bool) -> Vec<usize> {
        let of = |test: &dyn Fn(&DeviceNames<'_>) -> bool| -> Vec<usize> {
            devices.clone().enumerate().filter(|(_, device)| test(device)).map(|(position, _)| position).collect()
        };
        match self {
            Selector::Uuid(digits) => of(&|device| uuid(device.uuid).as_ref() == Some(digits)),
            Selector::Pci(address) => of(&|device| device.pci.and_then(pci).as_ref() == Some(address)),
            Selector::Index(index) => of(&|device| device.index == *index),
            Selector::Cpu => of(&|device| device.is_cpu),
            Selector::Name(name) => {
                let wanted = name.to_lowercase();
                let whole = of(&|device| device.name.to_lowercase() == wanted);
                if !whole.is_empty() {
                    return whole;
                }
                of(&|device| (part_of_cpu || !device.is_cpu) && device.name.to_lowercase().contains(&wanted))
            }
        }
    }
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
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_refused_with_a_reason() {
        for text in ["", "  ", "uuid:123", "pci:zz", "index:x", "name:", "99999999999999999999999"] {
            let error = text.parse::<Selector>().expect_err(text).to_string();
            assert!(error.starts_with(&format!("device \"{text}\" cannot be parsed: ")), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_shown_parses_back(text in "\\PC{1,40}") {
            if let Ok(selector) = text.parse::<Selector>() {
                let shown = selector.to_string();
                let again: Selector = shown.parse().expect("shown selectors parse");
                proptest::prop_assert_eq!(selector, again);
            }
        }
    }
}
