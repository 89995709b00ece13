//! Tests of `ostinato check-device` on a CPU driver: what scripts and bug reports rely on, its exit statuses, and that a
//! driver behind the loader's switch for portability is found.

use crate::cli::{cpu, ostinato, run};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn report(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"))
}

fn outcomes(report: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let tests = report["tests"].as_array().expect("tests");
    tests.iter().map(|test| (text(&test["name"]), text(&test["result"]))).collect()
}

#[test]
fn compiling_only_builds_every_pipeline_and_runs_nothing() {
    let output =
        run(&["check-device", "--device", cpu(), "--model", "demo-hybrid", "--compile-only", "--validation", "--json"]);
    let report = report(&output);
    assert!(output.status.success(), "{report:#}");
    assert_eq!((&report["passed"], &report["compile_only"]), (&true.into(), &true.into()));
    assert_eq!(report["paths"], serde_json::json!(["row_major"]));
    assert_eq!(report["validation"], serde_json::json!([]));
    assert_eq!(report["device"]["uuid"], cpu());
    let not_run = outcomes(&report).into_iter().filter(|(_, result)| result == "not_run").map(|(name, _)| name);
    assert_eq!(not_run.collect::<Vec<_>>(), ["matrix_order", "quantised_kernels", "small_model", "start"]);
    let pipelines = report["pipelines"].as_array().expect("pipelines");
    for kernel in ["sample", "gemv.bf16", "attention.f16", "delta_step", "next_tokens"] {
        assert!(pipelines.iter().any(|pipeline| pipeline["kernel"] == kernel), "{kernel} was not built");
    }
    for pipeline in pipelines {
        let group: u64 = pipeline["workgroup"].as_array().expect("a size").iter().filter_map(Value::as_u64).product();
        let fits = group >= 1 && group <= report["device"]["max_invocations"].as_u64().expect("a limit");
        let built = pipeline["ms"].as_f64().is_some_and(|ms| ms > 0.0) && pipeline["error"].is_null();
        assert!(fits && built && pipeline["shared_bytes"].is_u64(), "{pipeline:#}");
        assert!(pipeline["constants"].is_object(), "{pipeline:#}");
    }
    let missing = report["missing"].as_array().expect("what is missing");
    let says = |word: &str| missing.iter().any(|missing| missing["what"].as_str().expect("a text").contains(word));
    // A newer lavapipe has matrices, but not of this shape.
    assert!((says("cooperative matrices") || says("matrices of 16x16x16")) && says("a GPU"), "{missing:#?}");
}

#[test]
fn a_check_loads_the_model_and_passes_its_tests() {
    // A model with quantised weights, whose kernels are tested.
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama.cpp/demo-Q4_K_M.gguf");
    let output = run(&["check-device", "--device", cpu(), "--model", model, "--tune", "device_packing=2"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let tests = [
        "limits             ",
        "quantised_kernels  ",
        "packing            ",
        "small_model        ",
        "start              ",
    ];
    for line in tests.map(|test| format!("{test}passed")).iter().map(String::as_str).chain(["\npassed\n"]) {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
}

#[test]
fn kernels_that_compute_wrongly_fail_the_check() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama.cpp/demo-Q4_K_M.gguf");
    let output = run(&["check-device", "--device", cpu(), "--model", model, "--tune", "broken_codes=2", "--json"]);
    let report = report(&output);
    assert_eq!((output.status.code(), &report["passed"]), (Some(1), &false.into()), "{report:#}");
    let failed = outcomes(&report).into_iter().filter(|(_, result)| result == "failed").map(|(name, _)| name);
    assert_eq!(failed.collect::<Vec<_>>(), ["quantised_kernels", "start"]);
}

/// Goal: who wants results only still learns that a model runs in a slower way than it should. Method: a test at start that is made
/// to fail.
#[test]
fn a_failed_test_at_start_is_told_with_quiet_too() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama.cpp/demo-Q4_K_M.gguf");
    let given = ["generate", "--quiet", "--device", cpu(), "--model", model, "--prompt", "Once", "--max-tokens", "2"];
    let cache = tempfile::tempdir().expect("a folder");
    let told = |tune: &str| {
        let mut command = ostinato(&[&given[..], &["--tune", tune]].concat());
        let output = command.env("XDG_CACHE_HOME", cache.path()).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        errors.lines().filter(|line| line.starts_with("warning: ")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(told("integer_dots=1"), [""; 0]);
    let warnings = told("integer_dots=1,broken_codes=3");
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.starts_with("warning: \"demo") && warning.contains("without integer dot products"), "{warning}");
}

#[test]
fn matrix_units_that_the_device_did_not_promise_are_refused() {
    let tune = ["--tune", "fragments=2"];
    let output = ostinato(&["check-device", "--device", cpu(), "--compile-only"]).args(tune).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let what = "tuning fragments=2 is asked for, device";
    let lacks = ["does not offer cooperative matrices", "does not offer matrices of 16x16x16"];
    assert!(text.contains(what) && lacks.iter().any(|lacks| text.contains(lacks)), "{text}");
    // A command that would run the model ends in the same way.
    let output = ostinato(&["bench", "--model", "demo", "--device", cpu()]).args(tune).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains(what), "{:?} {text}", output.status);
}

#[test]
fn arguments_that_are_wrong_end_with_2() {
    for wrong in [
        &["--device", "no such device"][..],
        &["--device", cpu(), "--tune", "fragment=2"],
        &["--device", cpu(), "--model", "no/such/model/here"],
    ] {
        let output = ostinato(&["check-device"]).args(wrong).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Returns the manifest of lavapipe's driver.
fn lavapipe() -> Value {
    // The environment of this process names the drivers' manifests.
    let _ = cpu();
    let given = std::env::var_os("VK_DRIVER_FILES").expect("the tests select the drivers");
    let lavapipe = std::env::split_paths(&given).next().expect("a driver");
    let manifest = std::fs::read_to_string(&lavapipe).expect("the driver's manifest");
    serde_json::from_str(&manifest).expect("JSON")
}

/// Goal: a driver older than Vulkan 1.3 is refused with both versions, and nothing is said of what it was not asked for.
/// Method: a driver in front of lavapipe changes its version.
#[test]
fn a_driver_of_an_older_vulkan_is_refused_with_both_versions() {
    let mut manifest = lavapipe();
    let library = manifest["ICD"]["library_path"].as_str().expect("a library").to_owned();
    let folder = tempfile::tempdir().expect("a folder");
    let older = folder.path().join("libolder.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/drivers/older.c");
    let compiled = Command::new("c++").args(["-x", "c", "-shared", "-fPIC", source, "-o"]).arg(&older).status();
    assert!(compiled.expect("a compiler").success());
    manifest["ICD"]["library_path"] = older.to_str().expect("UTF-8").into();
    let file = folder.path().join("older.json");
    std::fs::write(&file, manifest.to_string()).expect("a manifest");
    let run = |arguments: &[&str]| {
        let mut command = ostinato(arguments);
        let command =
            command.env("VK_DRIVER_FILES", &file).env("VK_ICD_FILENAMES", &file).env("OLDER_DRIVER", &library);
        let output = command.output().expect("it runs");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    let refused = "Vulkan 1.3 is needed, its driver has 1.2.131";
    for (arguments, status) in [
        (&["devices"][..], 0),
        (&["check-device", "--device", "cpu"], 1),
        (&["generate", "--prompt", "x", "--device", "cpu"], 2),
        (&["generate", "--prompt", "x"], 2),
    ] {
        let (ended, text) = run(arguments);
        assert_eq!(ended, Some(status), "{text}");
        assert!(text.contains(refused) && !text.contains("0 invocations"), "{text}");
    }
    let (_, text) = run(&["generate", "--prompt", "x"]);
    assert!(text.contains("there is no usable GPU; the adapters are:"), "there is nothing to choose: {text}");
}

#[test]
fn a_driver_that_the_loader_lists_on_request_only_is_found() {
    let mut manifest = lavapipe();
    manifest["ICD"]["is_portability_driver"] = true.into();
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("portability-{}.json", std::process::id()));
    std::fs::write(&file, manifest.to_string()).expect("a manifest");
    let output = ostinato(&["devices"]).env("VK_DRIVER_FILES", &file).env("VK_ICD_FILENAMES", &file).output().unwrap();
    std::fs::remove_file(&file).expect("it was written above");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("llvmpipe"), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
}
