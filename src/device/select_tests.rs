//! Tests of adapter selection on lists of invented adapters.

use super::*;
use crate::device::adapter::AdapterKind;

fn adapter(index: usize, name: &str, kind: AdapterKind, pci: Option<&str>, refused: Option<&str>) -> Adapter {
    Adapter { pci: pci.map(str::to_owned), refused: refused.map(str::to_owned), ..Adapter::made_up(index, name, kind) }
}

fn host() -> Vec<Adapter> {
    vec![
        adapter(0, "NVIDIA H200", AdapterKind::Discrete, Some("0000:65:00.0"), None),
        adapter(1, "NVIDIA H200", AdapterKind::Discrete, Some("0000:66:00.0"), None),
        adapter(2, "AMD Radeon RX 7900 XTX", AdapterKind::Discrete, Some("0001:03:00.0"), None),
        adapter(3, "Old Radeon", AdapterKind::Discrete, None, Some("it has no bufferDeviceAddress")),
        adapter(4, "llvmpipe (LLVM 15.0.6, 256 bits)", AdapterKind::Cpu, None, None),
    ]
}

fn choose(text: &str) -> Result<usize, DeviceError> {
    let selector: Selector = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
    select(&host(), Some(&selector)).map(|a| a.index)
}

fn chosen(text: &str) -> usize {
    choose(text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

#[test]
fn a_uuid_in_any_spelling() {
    assert_eq!(chosen("00000001-aaaa-bbbb-cccc-0123456789ab"), 1);
    assert_eq!(chosen("00000001AAAABBBBCCCC0123456789AB"), 1);
    assert_eq!(chosen("GPU-00000002-aaaa-bbbb-cccc-0123456789ab"), 2);
    assert_eq!(chosen("uuid:00000004-aaaa-bbbb-cccc-0123456789ab"), 4);
}

#[test]
fn a_pci_address_full_or_short() {
    assert_eq!(chosen("0000:66:00.0"), 1);
    assert_eq!(chosen("66:00.0"), 1);
    assert_eq!(chosen("00000000:65:00.0"), 0);
    assert_eq!(chosen("0001:03:00.0"), 2);
    assert!(matches!(choose("03:00.0"), Err(DeviceError::NoMatch { .. })), "the short form means domain 0");
}

#[test]
fn digits_are_an_index_unless_said_otherwise() {
    assert_eq!(chosen("1"), 1);
    assert!(matches!(choose("9"), Err(DeviceError::NoMatch { .. })));
    assert_eq!(chosen("name:7900"), 2);
    assert_eq!(chosen("xtx"), 2);
}

#[test]
fn several_matches_are_an_error_that_lists_them_one_a_line() {
    let error = choose("h200").expect_err("two of them");
    assert!(matches!(error, DeviceError::Ambiguous { count: 2, .. }));
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[1].contains("0000:65:00.0") && lines[2].contains("0000:66:00.0"), "{text}");
    assert!(error.is_users());
}

#[test]
fn no_match_lists_every_adapter() {
    let text = choose("intel").expect_err("none").to_string();
    assert_eq!(text.lines().count(), 1 + host().len(), "{text}");
}

#[test]
fn a_refused_adapter_says_why() {
    let error = choose("old radeon").expect_err("refused");
    assert_eq!(error.to_string(), "device \"Old Radeon\" cannot be used: it has no bufferDeviceAddress");
}

#[test]
fn a_cpu_driver_is_chosen_only_by_cpu_or_exactly() {
    assert_eq!(chosen("cpu"), 4);
    assert_eq!(chosen("CPU"), 4);
    assert_eq!(chosen("00000004-aaaa-bbbb-cccc-0123456789ab"), 4);
    assert_eq!(chosen("LLVMpipe (LLVM 15.0.6, 256 bits)"), 4);
    let error = choose("llvmpipe").expect_err("a part of the name is not enough").to_string();
    assert!(error.contains("only by cpu, its UUID 00000004"), "{error}");
    let error = choose("4").expect_err("an index does not say that it is a CPU driver");
    assert!(matches!(error, DeviceError::CpuByIndex { index: 4, .. }) && error.is_users());
    assert!(error.to_string().contains("by cpu, its UUID 00000004-aaaa"), "{error}");
}

#[test]
fn without_a_selector_only_a_single_usable_gpu_is_taken() {
    let all = host();
    let none = |adapters: &[Adapter]| select(adapters, None).map(|a| a.name.clone());
    assert_eq!(none(&all[2..]).expect("one GPU is usable"), "AMD Radeon RX 7900 XTX");
    assert!(matches!(none(&all), Err(DeviceError::MustChoose { count: 3, .. })));
    assert!(matches!(none(&all[3..]), Err(DeviceError::MustChoose { count: 0, .. })), "never the CPU by itself");
    assert!(matches!(none(&[]), Err(DeviceError::MustChoose { count: 0, .. })));
    // The message says what to type.
    let told = |adapters: &[Adapter]| none(adapters).expect_err("none is taken").to_string();
    assert!(told(&all).contains("3 usable GPUs, choose one with --device 0;"), "{}", told(&all));
    assert!(
        told(&all[3..]).contains("there is no usable GPU, --device cpu chooses the CPU driver;"),
        "{}",
        told(&all[3..])
    );
    assert!(!told(&all[3..4]).contains("--device"), "there is nothing to choose: {}", told(&all[3..4]));
}
