#!/usr/bin/env bash
# Installs Ostinato on a bare Debian root as a new user does, and prints the seconds that each step takes. A step that
# fails ends the script with its output. Needs root, debootstrap and Debian's package mirror.
#   run.sh package [FOLDER]   the Debian package that `make dist` wrote into FOLDER (default: target/dist): its checksums
#                             and contents, `dpkg -i`, the command of its unit, the first commands of a user, removal
#   run.sh source             the README's commands: packages, Rust, `make demo`, then chat, curl and the `openai` client.
#                             With RUST=host the toolchain and the crates of this machine stand for rustup and the registry,
#                             and with BUILT=FOLDER a release build's target folder for the dependencies, which then take no
#                             time.
# ROOT_CACHE names the archive of the bare root, which is made if it is not there (default: target/install/SUITE.tar).
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-}
case $what in package | source) ;; *)
    echo "run.sh: '$what' is neither package nor source" >&2
    exit 2
    ;;
esac
suite=bookworm
cache=${ROOT_CACHE:-target/install/$suite.tar}
for program in debootstrap unshare chroot ip; do
    command -v "$program" >/dev/null || { echo "run.sh: there is no $program: run deploy/setup.sh install" >&2; exit 2; }
done
if [ ! -e "$cache" ]; then
    mkdir -p "$(dirname "$cache")"
    making=$(mktemp -d)
    debootstrap --variant=minbase "$suite" "$making" >"$cache.log" || { cat "$cache.log" >&2; exit 1; }
    tar --create --file "$cache.part" --directory "$making" .
    mv "$cache.part" "$cache"
    rm -rf "$making"
fi

root=$(mktemp -d)
mounts=()
# Mounts go lazily: a process that has just ended may still have a device open.
cleanup() {
    for ((index = ${#mounts[@]} - 1; index >= 0; index--)); do umount --lazy "${mounts[$index]}"; done
    rm -rf --one-file-system "$root"
}
trap cleanup EXIT
tar --extract --file "$cache" --directory "$root"
# The folder is only root's until now, and so would be everything in the root.
chmod 755 "$root"
bind() {
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    mounts+=("$root$2")
}
mount -t proc proc "$root/proc"
mounts+=("$root/proc")
bind /dev /dev
# How this machine reaches registries: names, authorities of certificates, addresses of mirrors.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf; do
    [ ! -e "$file" ] || cp --dereference "$file" "$root$file"
done
authorities=/etc/ssl/authorities.crt
mkdir -p "$root/etc/ssl"
cp --dereference "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root$authorities"
environment=(PATH=/root/.cargo/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive
    SSL_CERT_FILE=$authorities PIP_CERT=$authorities CURL_CA_BUNDLE=$authorities)
# In the root, with the network of this machine.
inside() { chroot "$root" env -i "${environment[@]}" bash -euc "$1"; }
# In the root, on a network of its own, so that the server has its usual ports.
alone() { unshare --net bash -euc 'ip link set lo up; exec chroot "$0" env -i "${@:2}" bash -euc "$1"' "$root" "$1" "${environment[@]}"; }
# Runs a step: its name, where, and the commands. Shows the output where it fails.
step() {
    local begin end
    begin=$(date +%s.%N)
    if ! "$2" "$3" >"$root/step.log" 2>&1; then
        printf '%8s  %s\n' failed "$1"
        tail --lines 60 "$root/step.log"
        exit 1
    fi
    end=$(date +%s.%N)
    printf '%7.1fs  %s\n' "$(awk "BEGIN { print $end - $begin }")" "$1"
}

# What a new user does with a program that is there: $1 is the program, $2 the device.
first_commands() {
    # The newest version of the client that the tests use.
    local client
    client=$(grep '^openai==' tests/requirements.txt)
    step "a virtual environment with the openai client" inside "apt-get install --yes -qq --no-install-recommends curl python3-venv
        python3 -m venv /venv && /venv/bin/pip install --quiet $client"
    step "the first answer of ostinato chat" alone "
        printf 'Tell me a story about a fox.\n' | $1 chat demo --device $2 --max-tokens 64 | tee /answer
        [ -s /answer ]"
    cat >"$root/client.py" <<'PYTHON'
import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
question = [{"role": "user", "content": "Tell me a story about a fox."}]
(model,) = [model.id for model in client.models.list()]
stream = client.chat.completions.create(model=model, messages=question, max_tokens=64, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert text, "an answer"
print(text)
PYTHON
    # A server process has the trap: it ends with the step.
    local serve="$1 serve demo --device $2 >/server.log 2>&1 & server=\$!; trap 'kill \$server' EXIT
        until curl --silent --fail http://127.0.0.1:8000/health; do kill -0 \$server; sleep 0.05; done"
    step "ostinato serve, and an answer to curl" alone "$serve
        curl --silent --fail http://127.0.0.1:8000/v1/chat/completions \
            -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}' | tee /answer
        grep -q '\"content\"' /answer"
    step "ostinato serve, and an answer to the openai client" alone "$serve
        /venv/bin/python /client.py"
}

echo "on a bare Debian $suite, $(nproc) processors:"
if [ "$what" = package ]; then
    dist=${2:-target/dist}
    cp -r "$dist" "$root/dist"
    step "the checksums" inside 'cd /dist && sha256sum --check --strict SHA256SUMS'
    step "apt-get update" inside 'apt-get update -qq'
    step "what the package depends on" inside '
        apt-get install --yes -qq --no-install-recommends libvulkan1 mesa-vulkan-drivers'
    step "dpkg -i" inside 'dpkg -i /dist/*.deb && dpkg --verify ostinato && test -z "$(dpkg --audit)"'
    size=$(stat --format %s "$root/usr/bin/ostinato")
    most=30500000
    [ "$size" -le "$most" ] || { echo "the program has $size bytes, at most $most are allowed" >&2; exit 1; }
    echo "          the program has $size bytes"
    step "version, completions, manual pages, licences, configuration" inside '
        ostinato --version
        . /usr/share/bash-completion/completions/ostinato && complete -p ostinato
        [ "$(ls /usr/share/man/man1/ostinato*.1.gz | wc -l)" -gt 10 ]
        for page in /usr/share/man/man1/ostinato*.1.gz; do gunzip --test "$page"; done
        grep -q "Permission is hereby granted" /usr/share/doc/ostinato/licences.txt
        test -s /usr/share/doc/ostinato/copyright
        dpkg-query --showformat "\${Conffiles}" --show ostinato | grep -q /etc/ostinato/ostinato.toml'
    # As systemd starts it: the user may write to the cache only.
    unit=$root/usr/lib/systemd/system/ostinato.service
    command=$(sed -n 's/^ExecStart=//p' "$unit")
    step "the unit's command as nobody's user, an answer, and its end" alone "
        install -d -o nobody /var/cache/ostinato
        export OSTINATO_RUNTIME__CACHE_DIRECTORY=/var/cache/ostinato
        setpriv --reuid nobody --regid nogroup --clear-groups --no-new-privs $command >/server.log 2>&1 & server=\$!
        for _ in \$(seq 600); do grep -q 'API on http' /server.log && break; kill -0 \$server; sleep 0.1; done
        ostinato generate --chat 'Tell me a story about a fox.' --max-tokens 32 --server 127.0.0.1:50051
        kill -TERM \$server && wait \$server"
    first_commands ostinato cpu
    step "dpkg --remove and --purge" inside '
        dpkg --remove ostinato && test ! -e /usr/bin/ostinato && test -e /etc/ostinato/ostinato.toml
        dpkg --purge ostinato && test ! -e /etc/ostinato'
else
    # The commands of the section "Start" of the README.
    mapfile -t commands < <(sed -n '/^## Start/,/^### /{/^```sh$/,/^```$/{/^```/d; s/ *# .*//; p}}' README.md)
    [ ${#commands[@]} -eq 3 ] || { echo "run.sh: the README has ${#commands[@]} commands in Start, not 3" >&2; exit 1; }
    mkdir "$root/src"
    git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from - | tar --extract --directory "$root/src"
    commit=$(git rev-parse --short=12 HEAD)
    # A bare root has no sudo.
    printf '#!/bin/sh\nexec "$@"\n' >"$root/usr/local/bin/sudo"
    chmod 755 "$root/usr/local/bin/sudo"
    step "apt-get update" inside 'apt-get update -qq'
    step "${commands[0]}" inside "${commands[0]}"
    if [ "${RUST:-}" = host ]; then
        toolchain=$(rustc --print sysroot)
        bind "$toolchain" /opt/rust
        environment[0]=PATH=/opt/rust/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
        mkdir -p "$root/root/.cargo"
        cp -r "${CARGO_HOME:-$HOME/.cargo}/registry" "$root/root/.cargo/registry"
        [ -z "${BUILT:-}" ] || { mkdir -p "$root/src/target" && cp -r "$BUILT/release" "$root/src/target/"; }
        echo "       -  ${commands[1]}   (this machine's toolchain instead${BUILT:+, and its compiled dependencies})"
    else
        step "${commands[1]}" inside "${commands[1]}"
    fi
    step "${commands[2]}" inside "cd /src && ${commands[2]} COMMIT=$commit"
    tail --lines 8 "$root/step.log" | sed 's/^/          /'
    first_commands /src/target/release/ostinato cpu
fi
