#!/usr/bin/env bash
# Builds the library by which Intel's Vulkan driver runs without hardware, which Debian does not package, in
# target/drivers (after install.sh; two minutes). It comes from the source of Debian's stable Mesa and serves the newer
# driver too. What the build needs is downloaded into target/drivers as well: nothing outside it changes.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(cd "${CARGO_TARGET_DIR:-target}" && pwd)/drivers
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
archive=mesa_25.0.7.orig.tar.xz
sum=592272df3cf01e85e7db300c449df5061092574d099da275d19e97ef0510f8a6
library=libintel_noop_drm_shim.so
libraries=$folder/root/usr/lib/x86_64-linux-gnu

[ -e "$libraries/$library" ] && exit 0
[ -d "$libraries" ] || { echo "tests/drivers: run install.sh first" >&2; exit 2; }
echo "building $library in $folder"
rm -rf "$folder/intel"
mkdir -p "$folder"/intel/{packages,root}
cd "$folder/intel"
python3 -c 'import sys, urllib.request as r; r.urlretrieve(*sys.argv[1:])' "$mirror/pool/main/m/mesa/$archive" "$archive"
echo "$sum  $archive" | sha256sum --check --quiet
tar xf "$archive"
# Of the system's own Debian: the programs run with its C library.
(cd packages && apt-get download -qq -o APT::Sandbox::User= flex bison m4 libdrm-dev libdrm2 libpciaccess-dev libpciaccess0 \
    libdrm-intel1 libsigsegv2)
for package in packages/*.deb; do
    dpkg-deb -x "$package" root
done
sed -i "s#^prefix=/usr#prefix=$PWD/root/usr#" root/usr/lib/x86_64-linux-gnu/pkgconfig/*.pc
python3 -m venv python
python/bin/python -m pip install --quiet --disable-pip-version-check meson==1.12.1 ninja==1.13.2 mako==1.4.3 \
    pyyaml==6.0.3 packaging==26.3 setuptools==65.5.0
export PATH=$PWD/python/bin:$PWD/root/usr/bin:$PATH
export LD_LIBRARY_PATH=$PWD/root/usr/lib/x86_64-linux-gnu:$PWD/root/lib/x86_64-linux-gnu
export PKG_CONFIG_PATH=$PWD/root/usr/lib/x86_64-linux-gnu/pkgconfig
export BISON_PKGDATADIR=$PWD/root/usr/share/bison M4=$PWD/root/usr/bin/m4
cd mesa-25.0.7
meson setup build -Dtools=drm-shim,intel -Dvulkan-drivers= -Dgallium-drivers= -Dplatforms= -Dllvm=disabled \
    -Dglx=disabled -Degl=disabled -Dgbm=disabled -Dopengl=false -Dgles1=disabled -Dgles2=disabled \
    -Dbuildtype=release >/dev/null
ninja -C build "src/intel/tools/$library" >/dev/null
cp "build/src/intel/tools/$library" "$libraries/"
rm -rf "$folder/intel"
