#!/usr/bin/env bash
# Checks all crates with cargo-deny (see deny.toml): bans, licences and sources; also known vulnerabilities, if the
# advisory database can be reached.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo deny --locked --offline check --hide-inclusion-graph bans licenses sources 2>/dev/null ||
    cargo deny --locked check --hide-inclusion-graph bans licenses sources
if timeout 60 cargo deny --locked fetch db >/dev/null 2>&1; then
    cargo deny --locked check --hide-inclusion-graph advisories
else
    echo "the advisory database cannot be reached from here: advisories are not checked"
fi
