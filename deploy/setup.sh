#!/usr/bin/env bash
# Installs missing packages. Needs root, or uses sudo, only if a package is missing.
#   setup.sh run    the C++ compiler, the Vulkan loader, and a CPU driver if no Vulkan driver is installed
#   setup.sh test   the C++ compiler, the Vulkan loader, both CPU drivers, the validation layer, a browser, cargo-deny,
#                   curl, the tools for network namespaces (iproute2) and for checking units (systemd), a Python
#                   environment with a router (target/python), and on Debian, for root, a newer lavapipe (target/drivers),
#                   which compiles the tests' shaders in a quarter to a half of the time
#   setup.sh install  what tests/install/run.sh needs: debootstrap, iproute2
#   setup.sh drivers  the C++ compiler, the Vulkan loader, the validation layer, and in target/drivers the drivers of a
#                   newer Mesa with what lets them run without hardware (tests/drivers)
set -euo pipefail
what=${1:-run}

has_library() { ldconfig -p 2>/dev/null | grep -q "$1" || /sbin/ldconfig -p 2>/dev/null | grep -q "$1"; }

# Lists the manifests of Vulkan drivers in the places where the loader looks for them.
drivers() {
    local folders=(/usr/share/vulkan/icd.d /etc/vulkan/icd.d /usr/local/share/vulkan/icd.d /usr/local/etc/vulkan/icd.d)
    [ -n "${VK_DRIVER_FILES:-}${VK_ICD_FILENAMES:-}" ] && echo "${VK_DRIVER_FILES:-$VK_ICD_FILENAMES}"
    for folder in "${folders[@]}"; do
        ls "$folder"/*.json 2>/dev/null || true
    done
}

missing=()
need() {
    missing+=("$1")
}

command -v c++ >/dev/null || need g++
has_library libvulkan.so.1 || need libvulkan1
case $what in
run)
    [ -n "$(drivers)" ] || need mesa-vulkan-drivers
    ;;
test)
    [ -e /usr/share/vulkan/icd.d/lvp_icd.x86_64.json ] || [ -e /usr/share/vulkan/icd.d/lvp_icd.json ] || need mesa-vulkan-drivers
    [ -e /usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json ] || need vulkan-validationlayers
    # Chromium is used to test the admin page. Its package also contains SwiftShader, the second CPU driver, and a newer
    # validation layer.
    { [ -e /usr/bin/chromium ] && [ -e /usr/lib/chromium/vk_swiftshader_icd.json ]; } || need chromium
    # For the tests with three hosts as network namespaces, and for checking the service's systemd unit.
    command -v ip >/dev/null || [ -x /sbin/ip ] || need iproute2
    command -v curl >/dev/null || need curl
    command -v systemd-analyze >/dev/null || need systemd
    python3 -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
    ;;
install)
    command -v debootstrap >/dev/null || need debootstrap
    command -v ip >/dev/null || [ -x /sbin/ip ] || need iproute2
    ;;
drivers)
    [ -e /usr/lib/chromium/libVkLayer_khronos_validation.so ] || need chromium
    python3 -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
    ;;
*)
    echo "setup.sh: '$what' is neither run nor test nor install nor drivers" >&2
    exit 2
    ;;
esac

if [ ${#missing[@]} -gt 0 ]; then
    if ! command -v apt-get >/dev/null; then
        echo "setup.sh: this system has no apt-get: install what Debian calls ${missing[*]}, then try again" >&2
        exit 2
    fi
    echo "installing ${missing[*]}"
    root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo)
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if [ "$what" = test ] && ! cargo deny --version >/dev/null 2>&1; then
    # Built without optimization: it takes longer to build than to check a few hundred crates.
    echo "installing cargo-deny"
    CARGO_PROFILE_DEV_DEBUG=false cargo install --locked --quiet --debug cargo-deny
fi

if [ "$what" = drivers ]; then
    "$(dirname "$0")/../tests/drivers/install.sh"
    "$(dirname "$0")/../tests/drivers/intel.sh"
fi

if [ "$what" = test ]; then
    cd "$(dirname "$0")/.."
    # Without it, tests run on the system's lavapipe.
    if [ "$(id -u)" -eq 0 ]; then
        tests/drivers/install.sh || echo "setup.sh: no newer lavapipe could be installed, the tests use the system's" >&2
    fi
    python=${CARGO_TARGET_DIR:-target}/python
    wanted=tests/requirements.txt
    # installed.txt is a copy of the requirements that were installed last.
    if ! cmp --silent "$wanted" "$python/installed.txt"; then
        echo "installing the tests' Python packages in $python"
        python3 -m venv --clear "$python"
        "$python/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$wanted"
        cp "$wanted" "$python/installed.txt"
    fi
fi
