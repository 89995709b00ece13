//! What an operator sees of a running server. Deliberately absent: what clients use.

pub mod metrics;
