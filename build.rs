//! The build script: compiles the shaders to SPIR-V, generates the Rust structs of their push-constant blocks, and
//! compiles the gRPC protocol. It needs no external tools, only crates.

#[path = "build/proto.rs"]
mod proto;
#[path = "build/shaders.rs"]
mod shaders;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    proto::compile();
    shaders::compile();
}
