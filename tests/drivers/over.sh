#!/usr/bin/env bash
# Runs a command with lavapipe and the libraries of target/drivers in place of those of the system, in a mount namespace of
# its own: nothing outside it changes. That lavapipe compiles the tests' shaders in a quarter to a half of the time that
# Debian 12's takes. Fails where that is not possible: without target/drivers (install.sh), without root, or on a system
# whose C library is newer.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${CARGO_TARGET_DIR:-target}/drivers/root
libraries=$folder/usr/lib/x86_64-linux-gnu
[ "$(id -u)" -eq 0 ] || exit 1
[ -e "$folder/../installed" ] || exit 1
version() { grep -o '[0-9]\+\.[0-9]\+' | tail -n 1; }
own=$(getconf GNU_LIBC_VERSION | version)
newer=$("$libraries/ld-linux-x86-64.so.2" --version | head -n 1 | version)
[ "$(printf '%s\n' "$own" "$newer" | sort --version-sort | tail -n 1)" = "$newer" ]
# shellcheck disable=SC2016
exec unshare --mount bash -c '
    set -e
    libraries=/usr/lib/x86_64-linux-gnu
    mount --types overlay overlay --options "lowerdir=$0$libraries:$libraries" "$libraries"
    # The manifest names its library without a folder.
    for manifest in /usr/share/vulkan/icd.d/lvp_icd*.json; do
        mount --bind "$0/usr/share/vulkan/icd.d/lvp_icd.json" "$manifest"
    done
    exec "$@"' "$(cd "$folder" && pwd)" "$@"
