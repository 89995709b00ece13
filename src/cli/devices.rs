//! `ostinato devices`: lists all adapters with their properties, and why an adapter is refused.

use crate::device::{Adapter, Instance, InstanceOptions, QueueFamilyInfo, diagnose_no_gpu};
use crate::measure::pairs::{ExchangeTime, exchange_times};
use serde_json::{Value, json};
use std::fmt::Write;

/// Prints the adapters as text, or as a JSON array, which scripts parse.
pub(crate) fn run(json: bool, pairs: bool) -> Result<(), anyhow::Error> {
    let instance = Instance::new(&InstanceOptions::default())?;
    let adapters = instance.adapters();
    let text = if pairs {
        exchanges(&instance, &adapters, json)?
    } else if json {
        let rows: Vec<Value> = adapters.iter().map(row).collect();
        serde_json::to_string_pretty(&rows)? + "\n"
    } else {
        adapters.iter().map(describe).collect()
    };
    // `print!` would panic if the reader closes the pipe; this returns an error.
    std::io::Write::write_all(&mut std::io::stdout().lock(), text.as_bytes())?;
    // Printed to stderr, because scripts parse the list on stdout.
    if let Some(why) = diagnose_no_gpu(&adapters) {
        eprintln!("{why}");
    }
    Ok(())
}

/// Measures the exchanges between all pairs of usable devices, and returns the times as text, or as a JSON array. CPU
/// drivers count if there are no two GPUs.
fn exchanges(instance: &Instance, adapters: &[Adapter], json: bool) -> Result<String, anyhow::Error> {
    let usable: Vec<&Adapter> = adapters.iter().filter(|adapter| adapter.usable()).collect();
    let gpus: Vec<&Adapter> = usable.iter().copied().filter(|adapter| !adapter.is_cpu()).collect();
    let devices = if gpus.len() > 1 { gpus } else { usable };
    if devices.len() < 2 {
        anyhow::bail!("--pairs needs two devices, {} can be used", devices.len());
    }
    let (mut text, mut rows) = (String::new(), Vec::new());
    for (first, a) in devices.iter().enumerate() {
        for b in &devices[first + 1..] {
            let times = exchange_times(instance, [a, b])?;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{} and {}: {} and {}", a.index, b.index, a.name, b.name);
            let _ = writeln!(
                text,
                "   f32 values    within a step  as bf16 blocks    step divided    each way, within a step"
            );
            for ExchangeTime { values, within, halves, divided } in &times {
                let micros = |seconds: f64| format!("{:.1} µs", seconds * 1e6);
                let waits = within.map_or("-".to_owned(), micros);
                let rate = within
                    .map_or("-".to_owned(), |seconds| format!("{:.1} GB/s", f64::from(*values) * 4.0 / seconds / 1e9));
                let (halves, divided) = (halves.map_or("-".to_owned(), micros), micros(*divided));
                let _ = writeln!(text, "   {values:>10} {waits:>16} {halves:>15} {divided:>15} {rate:>26}");
            }
            let micros = |seconds: f64| (seconds * 1e7).round() / 10.0;
            rows.push(json!({
                "devices": [a.uuid, b.uuid],
                "exchanges": times.iter().map(|time| json!({
                    "values": time.values,
                    "within_step_us": time.within.map(micros),
                    "within_step_bf16_us": time.halves.map(micros),
                    "divided_us": micros(time.divided),
                })).collect::<Vec<_>>(),
            }));
        }
    }
    Ok(if json { serde_json::to_string_pretty(&rows)? + "\n" } else { text })
}

/// Returns an adapter as an object.
pub(super) fn row(adapter: &Adapter) -> Value {
    let (major, minor, patch) = adapter.api;
    let c = &adapter.capabilities;
    json!({
        "index": adapter.index,
        "name": adapter.name,
        "uuid": adapter.uuid,
        "pci": adapter.pci,
        "type": adapter.kind.to_string(),
        "driver": adapter.driver,
        "usable": adapter.usable(),
        "reason": adapter.refused,
        "vulkan": format!("{major}.{minor}.{patch}"),
        "queue_families": adapter.queue_families.iter().map(|f| json!({
            "index": f.index,
            "queues": f.count,
            "kinds": kinds(f),
            "timestamp_bits": f.timestamp_bits,
        })).collect::<Vec<_>>(),
        "heaps": adapter.memory_heaps.iter().map(|h| json!({
            "bytes": h.bytes,
            "device_local": h.device_local,
            "host_visible": h.host_visible,
        })).collect::<Vec<_>>(),
        "features": c.optional(),
        "matrix_shapes": c.matrix_shapes.iter().map(|s| json!({
            "m": s.m, "n": s.n, "k": s.k,
            "input": format!("{:?}", s.input).to_lowercase(),
            "accumulator": format!("{:?}", s.accumulator).to_lowercase(),
        })).collect::<Vec<_>>(),
        "subgroup_size": c.subgroup_size,
        "subgroup_sizes": [c.subgroup_min, c.subgroup_max],
        "max_shared_bytes": c.max_shared_bytes,
        "max_invocations": c.max_invocations,
        "max_push_bytes": c.max_push_bytes,
        "max_allocation_bytes": c.max_allocation_bytes,
        "max_buffer_bytes": c.max_buffer_bytes,
        "processors": c.processors,
    })
}

fn kinds(family: &QueueFamilyInfo) -> Vec<&'static str> {
    let kinds = [(family.graphics(), "graphics"), (family.compute(), "compute"), (family.transfer(), "transfer")];
    kinds.into_iter().filter_map(|(there, name)| there.then_some(name)).collect()
}

fn describe(adapter: &Adapter) -> String {
    let (major, minor, patch) = adapter.api;
    let c = &adapter.capabilities;
    let mut out = format!("{}: {}\n", adapter.index, adapter.name);
    let mut line = |key: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "   {key:<9} {value}");
    };
    line("uuid", adapter.uuid.clone());
    line("pci", adapter.pci.clone().unwrap_or_else(|| "-".to_owned()));
    line("type", adapter.kind.to_string());
    line("driver", format!("{}, Vulkan {major}.{minor}.{patch}", adapter.driver));
    for family in &adapter.queue_families {
        line("queues", format!("family {}: {} x {}", family.index, family.count, kinds(family).join("+")));
    }
    for heap in &adapter.memory_heaps {
        let place = if heap.device_local { "device" } else { "host" };
        let mapped = if heap.host_visible { ", host-visible" } else { "" };
        line("memory", format!("{:.1} GiB {place}{mapped}", heap.bytes as f64 / (1u64 << 30) as f64));
    }
    if c.subgroup_size > 0 {
        line("subgroup", format!("{} ({} to {})", c.subgroup_size, c.subgroup_min, c.subgroup_max));
    }
    let features = c.optional();
    line("features", if features.is_empty() { "-".to_owned() } else { features.join(", ") });
    let usable = if adapter.is_cpu() { "yes, when selected (cpu)" } else { "yes" };
    line("usable", adapter.refused.as_ref().map_or_else(|| usable.to_owned(), |why| format!("no: {why}")));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{AdapterKind, HeapInfo};

    #[test]
    fn a_row_has_every_key_that_scripts_rely_on() {
        let mut adapter = Adapter::made_up(2, "NVIDIA H200", AdapterKind::Discrete);
        adapter.pci = Some("0000:65:00.0".to_owned());
        adapter.memory_heaps = vec![HeapInfo { bytes: 7, device_local: true, host_visible: false }];
        let value = row(&adapter);
        assert_eq!(value["index"], 2);
        assert_eq!(value["name"], "NVIDIA H200");
        assert_eq!(value["uuid"], "00000002-aaaa-bbbb-cccc-0123456789ab");
        assert_eq!(value["pci"], "0000:65:00.0");
        assert_eq!(value["type"], "discrete");
        assert_eq!(value["driver"], "test 1.0");
        assert_eq!((&value["usable"], &value["reason"]), (&json!(true), &Value::Null));
        assert_eq!(value["heaps"][0]["bytes"], 7);
        for key in ["queue_families", "features", "matrix_shapes"] {
            assert!(value[key].is_array(), "{key}");
        }
    }

    #[test]
    fn a_refused_adapter_says_why_in_both_forms() {
        let mut adapter = Adapter::made_up(0, "Old", AdapterKind::Integrated);
        adapter.refused = Some("it has no timelineSemaphore".to_owned());
        let value = row(&adapter);
        assert_eq!((&value["usable"], &value["reason"]), (&json!(false), &json!("it has no timelineSemaphore")));
        assert!(describe(&adapter).contains("no: it has no timelineSemaphore"));
    }
}
