//! The generated half of `proto/ostinato/v1`: messages, client and server.
//! Deliberately absent: anything written by hand.

#![allow(missing_docs, unreachable_pub, missing_debug_implementations)]
#![allow(clippy::all)]

tonic::include_proto!("ostinato.v1");

/// The encoded descriptor set of `proto/`, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
