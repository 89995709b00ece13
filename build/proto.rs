//! Compiles `proto/` to Rust code and to the descriptor set that gRPC reflection serves. The crate `protox` parses the
//! files, so no external `protoc` is needed.

use std::path::PathBuf;

/// The project's own contract, and vLLM's engine contract, which the server implements as well.
const FILES: [&str; 2] = ["ostinato/v1/ostinato.proto", "vllm/engine.proto"];

/// Writes one Rust file per package (such as `ostinato.v1.rs`) and `descriptors.bin`, compressed, to `OUT_DIR`.
pub fn compile() {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut compiler = protox::Compiler::new(["proto"]).expect("proto/ is a folder");
    compiler.include_source_info(true).include_imports(true);
    for file in FILES {
        compiler.open_file(file).unwrap_or_else(|error| panic!("proto/: {error:?}"));
    }
    let descriptors = crate::demo::deflated(&compiler.encode_file_descriptor_set());
    std::fs::write(out.join("descriptors.bin"), descriptors).expect("OUT_DIR is writable");
    tonic_prost_build::configure()
        .compile_fds(compiler.file_descriptor_set())
        .expect("proto/: cannot write the generated Rust");
}
