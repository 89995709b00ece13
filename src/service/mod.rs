//! tonic in, engine out; the only tokio. No policy beyond admission and deadlines.

pub mod proto;
