//! The generated half of `proto/`: messages, clients and servers, ours at the top, others' under their packages; and its
//! descriptors. Not here: anything else that is written by hand.

#![allow(missing_docs, unreachable_pub, missing_debug_implementations)]
#![allow(clippy::all)]

use flate2::read::DeflateDecoder;
use std::io::Read;
use std::sync::LazyLock;

tonic::include_proto!("ostinato.v1");

pub mod vllm {
    pub mod grpc {
        pub mod engine {
            tonic::include_proto!("vllm.grpc.engine");
        }
    }
}

pub mod smg {
    pub mod grpc {
        pub mod common {
            tonic::include_proto!("smg.grpc.common");
        }
    }
}

/// The encoded descriptor set of `proto/`, for gRPC reflection.
pub fn descriptors() -> &'static [u8] {
    static ENCODED: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let packed: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
        let mut bytes = Vec::new();
        DeflateDecoder::new(packed).read_to_end(&mut bytes).expect("the build wrote it");
        bytes
    });
    &ENCODED
}
