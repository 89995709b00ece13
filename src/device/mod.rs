//! Vulkan and nothing above it: adapters, selection, queues, timelines, pipelines,
//! command encoding. Home of `unsafe`. Deliberately absent: what a weight is.
#![allow(unsafe_code)]
