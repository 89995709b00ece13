#!/usr/bin/env bash
# Installs the Vulkan drivers of a newer Debian, and the libraries by which they run without hardware, in the folder
# target/drivers: nothing outside it changes, and it needs no root. Debian's mirror is $DEBIAN_MIRROR. To renew the
# drivers, remove the folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/tests/drivers
mkdir -p "${CARGO_TARGET_DIR:-target}"
folder=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)/drivers
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
suite=trixie
keys=/usr/share/keyrings/debian-archive-keyring.gpg
# libvulkan1 is the loader; mesa-drm-shim stands for the kernel's part of a driver. What they depend on comes with them,
# the C library too.
packages=(mesa-vulkan-drivers mesa-drm-shim libvulkan1)
# Changes with every change of this script.
stamp=$(sha256sum "$0" "$here"/first.c | sha256sum)

if [ "$(cat "$folder/installed" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
if ! command -v apt-get >/dev/null || ! [ -e "$keys" ]; then
    echo "tests/drivers: it needs apt-get and Debian's keys ($keys)" >&2
    exit 2
fi
echo "installing the drivers of $suite-backports in $folder"
rm -rf "$folder"
mkdir -p "$folder"/apt/{lists/partial,cache/archives/partial,parts} "$folder"/{root,manifests}
: >"$folder/apt/status"
for part in $suite $suite-backports; do
    echo "deb [signed-by=$keys] $mirror $part main"
done >"$folder/apt/sources.list"
cat >"$folder/apt/apt.conf" <<END
Dir::State::lists "$folder/apt/lists";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
Dir::Etc::sourcelist "$folder/apt/sources.list";
Dir::Etc::sourceparts "$folder/apt/parts";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "$folder/apt/parts";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Debug::NoLocking "true";
END
export APT_CONFIG=$folder/apt/apt.conf
apt-get update -qq
apt-get install -qq -y --download-only -t $suite-backports "${packages[@]}" >/dev/null
for package in "$folder"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$folder/root"
done
libraries=$folder/root/usr/lib/x86_64-linux-gnu
# The manifests name their libraries without a folder: the loader would look in the system's.
for manifest in "$folder"/root/usr/share/vulkan/icd.d/*.json; do
    sed -E "s#(\"library_path\": *\")([^\"]*/)?(lib[^\"/]*\")#\1$libraries/\3#" "$manifest" \
        >"$folder/manifests/$(basename "$manifest")"
done
cc -shared -fPIC -O1 -o "$folder/first.so" "$here/first.c"
rm -rf "$folder/apt/lists" "$folder/apt/cache"
echo "$stamp" >"$folder/installed"
