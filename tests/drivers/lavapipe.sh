#!/usr/bin/env bash
# Runs a test program, with its arguments, on the CPU driver of target/drivers: it has cooperative matrices of 8 x 8 x 8,
# which those of Debian 12 lack. Run install.sh first. For example, after `cargo test --no-run --test kernels`:
#
#   tests/drivers/lavapipe.sh target/debug/deps/kernels-* matmul
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(cd "${CARGO_TARGET_DIR:-target}/drivers" && pwd)
libraries=$folder/root/usr/lib/x86_64-linux-gnu
export VK_DRIVER_FILES=$folder/manifests/lvp_icd.json OSTINATO_TEST_GPU=cpu
export MESA_SHADER_CACHE_DISABLE=true XDG_CACHE_HOME=$folder/cache
# The driver needs its own C library, whose loader runs the program.
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" --preload "$folder/first.so" "$@"
