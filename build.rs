//! Compiles the shaders and writes the Rust side of their argument blocks; compiles the
//! protocol. Deliberately absent: any tool that is not a crate.

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
