//! The build script: compiles the shaders to SPIR-V, generates the Rust structs of their push-constant blocks, and
//! compiles the gRPC protocol, and packs the embedded models. It needs no external tools, only crates. It also passes on the compiler's version.

#[path = "build/demo.rs"]
mod demo;
#[path = "build/proto.rs"]
mod proto;
#[path = "build/shaders.rs"]
mod shaders;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    let version = std::process::Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .arg("--version")
        .output()
        .ok()
        .and_then(|output| String::from_utf8(output.stdout).ok())
        // `rustc 1.95.0 (…)`: the first two words.
        .map(|text| text.split_whitespace().take(2).collect::<Vec<_>>().join(" "));
    println!("cargo:rustc-env=OSTINATO_RUSTC={}", version.unwrap_or_else(|| "rustc".to_owned()));
    demo::pack();
    proto::compile();
    shaders::compile();
}
