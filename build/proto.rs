//! Compiles `proto/` to Rust and to the descriptor set that gRPC reflection serves. No
//! external `protoc`: protox parses.

use std::path::PathBuf;

/// Our own contract, and the one of others that is answered beside it.
const FILES: [&str; 2] = ["ostinato/v1/ostinato.proto", "vllm/engine.proto"];

/// Writes a Rust file for each package (`ostinato.v1.rs`) and `descriptors.bin` to `OUT_DIR`.
pub fn compile() {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut compiler = protox::Compiler::new(["proto"]).expect("proto/ is a folder");
    compiler.include_source_info(true).include_imports(true);
    for file in FILES {
        compiler.open_file(file).unwrap_or_else(|error| panic!("proto/: {error:?}"));
    }
    std::fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set()).expect("OUT_DIR is writable");
    tonic_prost_build::configure()
        .compile_fds(compiler.file_descriptor_set())
        .expect("proto/: cannot write the generated Rust");
}
