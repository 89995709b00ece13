//! Ostinato
