#!/usr/bin/env bash
# Builds the fuzz targets and runs each for a bounded time.
#
# Usage: tests/fuzz/run.sh SECONDS [TARGET...]
#
# Exits with an error if a target has found something. The input is then in regressions/TARGET/, and an ordinary test
# (tests/tree/regressions.rs) fails on it until the defect is fixed.
set -euo pipefail
cd "$(dirname "$0")"
seconds=${1:?how many seconds for each target}
shift
all=(safetensors gguf gguf_split weights model_config tokenizer chat constraint configuration generate vllm_generate)
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=("${all[@]}")

host=$(rustc -vV | sed -n 's/^host: //p')
# Kept for the next run: the build, and the inputs that reached new code.
target=${CARGO_TARGET_DIR:-$PWD/../../target}/fuzz
# Coverage instrumentation for libFuzzer. There is no sanitizer, because all code except device/ and one file is free of
# unsafe.
flags=(
    --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares
)
RUSTFLAGS="${flags[*]}" CARGO_TARGET_DIR=$target cargo build --locked --target "$host" --bins

# Constraints and templates are processed in worker processes, which run the program itself.
CARGO_TARGET_DIR=$target cargo build --locked --manifest-path ../../Cargo.toml --bin ostinato
export OSTINATO_PROGRAM=$target/debug/ostinato

failed=()
for name in "${targets[@]}"; do
    mkdir -p "$target/corpus/$name" "regressions/$name" "seeds/$name"
    echo "== $name, $seconds s"
    # A single input may take 10 s and 2 GiB. Inputs are at most 64 KiB long.
    "$target/$host/debug/$name" "$target/corpus/$name" "seeds/$name" "regressions/$name" \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 \
        -artifact_prefix="regressions/$name/" || failed+=("$name")
done
[ ${#failed[@]} -eq 0 ] || { echo "found something: ${failed[*]}"; exit 1; }
