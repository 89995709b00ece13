//! What an operator may say: one typed tree, unknown keys refused, all problems reported at once.
