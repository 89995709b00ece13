// Stacked experts in parts: a layer whose experts no single buffer holds has several, each with the matrices of PART_EXPERTS
// adjacent experts from FIRST_EXPERT on. Each part has a call of its own, which leaves the rows of other experts to their
// calls. With PART_EXPERTS 0, `weight` holds the matrices of all experts.
// The includer defines both constants.

// Whether `weight` does not hold the matrix of an expert.
bool is_elsewhere(uint expert) { return PART_EXPERTS != 0u && expert - FIRST_EXPERT >= PART_EXPERTS; }
