#!/usr/bin/env bash
# Installs the program, or packs it to be installed elsewhere.
#   package.sh install [ROOT] [PREFIX]   under ROOT/PREFIX: the program without debug information, completions, manual
#                                        pages, licences, the systemd unit and the example configuration
#                                        (default: /usr/local)
#   package.sh dist [FOLDER]             an archive, a Debian package, the debug information and checksums
#                                        (default: target/dist)
# OSTINATO names the program (default: target/release/ostinato, which `make build` builds, and for `dist`
# target/distributed/ostinato, which `make dist` builds).
set -euo pipefail
cd "$(dirname "$0")/.."
profile=release
[ "${1:-}" = dist ] && profile=distributed
program=${OSTINATO:-${CARGO_TARGET_DIR:-target}/$profile/ostinato}
[ -x "$program" ] || { echo "package.sh: there is no program at $program: run make build, or make dist" >&2; exit 2; }
# "ostinato 0.1.0 (…)"
version=$("$program" --version | cut -d ' ' -f 2)

# Writes name, version, licence and licence texts of every crate that is linked in, from the sources that cargo has. A
# text that several crates have is written once.
licences() {
    local sources=("${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/)
    declare -A first
    cargo tree --locked --edges normal --prefix none --format '{p}|{l}' | sed 's/ (\*)$//; s/ (.*)|/|/; s/ v/ /' | sort -u |
        while IFS='|' read -r crate licence; do
            [ "${crate%% *}" = ostinato ] && continue
            printf '==== %s: %s\n' "$crate" "$licence"
            for source in "${sources[@]}"; do
                while IFS= read -r text; do
                    hash=$(sha256sum "$text" | cut -d ' ' -f 1)
                    if [ -n "${first[$hash]:-}" ]; then
                        printf -- '---- %s: as of %s\n' "${text##*/}" "${first[$hash]}"
                        continue
                    fi
                    first[$hash]=$crate
                    printf -- '---- %s\n' "${text##*/}"
                    cat "$text"
                    echo
                done < <(find "$source${crate/ /-}" -maxdepth 1 -type f \
                    \( -iname 'licen[sc]e*' -o -iname 'copying*' -o -iname 'notice*' \) 2>/dev/null | sort)
            done
        done
}

# Lays out all files below the folder $1. The unit starts the program in the folder $2.
lay_out() {
    local to=$1
    install -d "$to/bin" "$to/share/man/man1" "$to/share/doc/ostinato" "$to/lib/systemd/system"
    strip --strip-all -o "$to/bin/ostinato" "$program"
    chmod 755 "$to/bin/ostinato"
    for place in bash-completion/completions/ostinato zsh/site-functions/_ostinato fish/vendor_completions.d/ostinato.fish; do
        install -d "$to/share/${place%/*}"
        "$program" completions "${place%%[-/]*}" >"$to/share/$place"
    done
    "$program" man --out "$to/share/man/man1"
    gzip --best --no-name --force "$to"/share/man/man1/ostinato*.1
    install -m 644 README.md LICENSE deploy/ostinato.toml "$to/share/doc/ostinato/"
    licences >"$to/share/doc/ostinato/licences.txt"
    sed "s|/usr/local/bin/|$2/bin/|" deploy/ostinato.service >"$to/lib/systemd/system/ostinato.service"
}

case ${1:-} in
install)
    lay_out "${2:-}${3:-/usr/local}" "${3:-/usr/local}"
    echo "installed in ${2:-}${3:-/usr/local}; configuration: share/doc/ostinato/ostinato.toml"
    ;;
dist)
    out=${2:-target/dist}
    mkdir -p "$out"
    out=$(cd "$out" && pwd)
    arch=$(dpkg --print-architecture 2>/dev/null || uname -m)
    name=ostinato-$version-$arch
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # The debug information: `gdb -s`, or addr2line with an address of a backtrace.
    objcopy --only-keep-debug --compress-debug-sections "$program" "$out/$name.debug"

    # To be unpacked into /usr/local, without its first folder.
    lay_out "$work/$name" /usr/local
    tar --create --gzip --file "$out/$name.tar.gz" --owner 0 --group 0 --directory "$work" "$name"

    if command -v dpkg-deb >/dev/null; then
        root=$work/deb
        mkdir "$root"
        cp -a "$work/$name" "$root/usr"
        sed -i "s|/usr/local/bin/|/usr/bin/|" "$root/usr/lib/systemd/system/ostinato.service"
        # Where Debian looks for them.
        mkdir -p "$root/usr/share/zsh/vendor-completions"
        mv "$root/usr/share/zsh/site-functions/_ostinato" "$root/usr/share/zsh/vendor-completions/"
        rmdir "$root/usr/share/zsh/site-functions"
        install -D -m 644 deploy/ostinato.toml "$root/etc/ostinato/ostinato.toml"
        mv "$root/usr/share/doc/ostinato/LICENSE" "$root/usr/share/doc/ostinato/copyright"
        mkdir "$root/DEBIAN"
        echo /etc/ostinato/ostinato.toml >"$root/DEBIAN/conffiles"
        # The newest version of the C library that the program asks for.
        libc=$(objdump --dynamic-syms "$root/usr/bin/ostinato" | grep -o 'GLIBC_[0-9.]*' | sort --unique --version-sort | tail --lines 1)
        cat >"$root/DEBIAN/control" <<CONTROL
Package: ostinato
Version: $version
Architecture: $arch
Maintainer: Ostinato <noreply@ostinato.invalid>
Installed-Size: $(du --summarize --block-size=1024 "$root/usr" | cut -f 1)
Depends: libc6 (>= ${libc#GLIBC_}), libgcc-s1, libvulkan1
Recommends: mesa-vulkan-drivers
Section: science
Priority: optional
Description: language models on any Vulkan 1.3 GPU
 Serves language models over OpenAI's HTTP API and gRPC from GPUs with a Vulkan
 1.3 driver, and talks to them in the terminal. The service is not started before it is enabled:
 systemctl enable --now ostinato
CONTROL
        dpkg-deb --root-owner-group --build "$root" "$out/ostinato_${version}_$arch.deb" >/dev/null
    fi
    (cd "$out" && sha256sum -- *"$version"* | grep -v SHA256SUMS >SHA256SUMS)
    ls -l "$out"
    ;;
*)
    echo "package.sh: '${1:-}' is neither install nor dist" >&2
    exit 2
    ;;
esac
