//! The choice of an adapter. It fails closed: it never falls back to another GPU, nor to a CPU driver that was not
//! named as one; an index does not. Pure functions.

use crate::config::{DeviceNames, Selector};
use crate::device::adapter::Adapter;
use crate::device::error::DeviceError;

/// Returns the only adapter that the selector names; without a selector, the only usable GPU. Errors list the adapters,
/// one per line.
pub fn select<'a>(adapters: &'a [Adapter], selector: Option<&Selector>) -> Result<&'a Adapter, DeviceError> {
    let Some(selector) = selector else {
        return only_gpu(adapters);
    };
    // A part of a CPU driver's name does not choose it.
    let found: Vec<&Adapter> =
        selector.find(adapters.iter().map(names), false).into_iter().map(|position| &adapters[position]).collect();
    match found[..] {
        [one] if one.is_cpu() && matches!(selector, Selector::Index(_)) => {
            Err(DeviceError::CpuByIndex { index: one.index, name: one.name.clone(), uuid: one.uuid.clone() })
        }
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
            cpu: found.iter().all(|adapter| adapter.is_cpu()),
            adapters: lines(found.iter().copied()),
        }),
    }
}

/// Returns what a selector compares of an adapter.
fn names(adapter: &Adapter) -> DeviceNames<'_> {
    DeviceNames {
        index: adapter.index,
        name: &adapter.name,
        uuid: &adapter.uuid,
        pci: adapter.pci.as_deref(),
        is_cpu: adapter.is_cpu(),
    }
}

fn only_gpu(adapters: &[Adapter]) -> Result<&Adapter, DeviceError> {
    let gpus: Vec<&Adapter> = adapters.iter().filter(|a| a.usable() && !a.is_cpu()).collect();
    match gpus[..] {
        [one] => Ok(one),
        _ => {
            let hint = match gpus.first() {
                Some(first) => format!(", choose one with --device {}", first.index),
                None if adapters.iter().any(|a| a.usable() && a.is_cpu()) => {
                    ", --device cpu chooses the CPU driver".to_owned()
                }
                None => String::new(),
            };
            Err(DeviceError::MustChoose { count: gpus.len(), hint, adapters: lines(adapters.iter()), no_gpu: None })
        }
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
            format!("a CPU driver is chosen only by cpu, its UUID {} or its whole name; ", cpu.uuid)
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

#[cfg(test)]
#[path = "select_tests.rs"]
mod tests;
