#!/usr/bin/env bash
# Serves the embedded demo model on loopback, requests a story from it through gRPC, shows the text as it arrives and
# the cost per token, and stops the server.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${OSTINATO:-${CARGO_TARGET_DIR:-target}/release/ostinato}
listen=${LISTEN:-127.0.0.1:50551}
ask=${ASK:-Tell me a story about a fox, a lantern and a river.}

# Prints the UUID of the first usable GPU, or nothing. Without a GPU this demo falls back to a CPU driver; the program
# itself never falls back.
gpu() {
    "$program" devices --json | tr -d ' \n' |
        grep -o '"uuid":"[^"]*","pci":[^,]*,"type":"[^"]*","driver":"[^"]*","usable":true' |
        grep -v '"type":"cpu"' | head -n 1 | cut -d '"' -f 4
}
device=${DEVICE:-$(gpu || true)}
device=${device:-cpu}

log=$(mktemp)
"$program" serve --model "demo=embedded:demo@$device" --listen "$listen" --http "${HTTP:-off}" --admin "${ADMIN:-127.0.0.1:0}" >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 600); do
    grep -q "^listening on" "$log" && break
    kill -0 "$server" 2>/dev/null || { cat "$log" >&2; exit 1; }
    sleep 0.1
done
cat "$log"
echo
echo "> $ask"
"$program" generate --server "http://$listen" --chat "$ask" --temperature 0.7 --top-p 0.95 --seed "${SEED:-7}" --max-tokens 320
kill -TERM "$server"
wait "$server"
trap 'rm -f "$log"' EXIT
