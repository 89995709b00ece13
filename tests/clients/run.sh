#!/usr/bin/env bash
# Runs clients of OpenAI's API, as their projects publish them, against `ostinato serve` with the embedded demo model and a
# chat template with tools and reasoning: the official client with 1,000 requests, LangChain and LiteLLM.
#   run.sh          these
#   run.sh webui    the backend of Open WebUI too, whose packages take 7 GB
# OSTINATO names the program (default: target/release/ostinato), DEVICE the device (default: cpu).
set -euo pipefail
cd "$(dirname "$0")/../.."
program=${OSTINATO:-target/release/ostinato}
folder=${CARGO_TARGET_DIR:-target}/clients
# Installs requirements in an environment, unless they are there: $1 names it, the rest are pip's arguments.
environment() {
    local at=$folder/$1
    [ "$(cat "$at/installed" 2>/dev/null)" = "$(cat "${@:2}")" ] && return
    python3 -m venv --clear "$at"
    "$at/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$2"
    cat "${@:2}" >"$at/installed"
}
mkdir -p "$folder"
environment clients tests/clients/requirements.txt
work=$(mktemp -d)
processes=()
trap 'kill "${processes[@]}" 2>/dev/null || true; wait; rm -rf "$work"' EXIT
mkdir "$work/tiny"
cp demo/model/* tests/clients/chat_template.jinja "$work/tiny/"
# Requests of two choices count twice, so more than the default 64 wait.
OSTINATO_SERVER__QUEUE_LIMIT=128 "$program" serve --json --model "tiny=$work/tiny@${DEVICE:-cpu}" --listen 127.0.0.1:0 --http 127.0.0.1:0 --admin 127.0.0.1:0 \
    >"$work/addresses" 2>"$work/log" &
processes+=($!)
for _ in $(seq 600); do
    [ -s "$work/addresses" ] && break
    kill -0 "${processes[0]}" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
    sleep 0.1
done
address() { python3 -c "import json, sys; print(json.loads(open(sys.argv[1]).readline())[sys.argv[2]])" "$work/addresses" "$1"; }
base=http://$(address http)/v1
python=$folder/clients/bin/python
"$python" tests/clients/thousand.py "$base" tiny "http://$(address admin)"
"$python" tests/clients/langchain.py "$base" tiny
"$python" tests/clients/lite.py "$base" tiny
if [ "${1:-}" = webui ]; then
    environment webui tests/clients/webui.txt
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    # Nothing is downloaded, and nobody logs in.
    env WEBUI_AUTH=False OPENAI_API_BASE_URL="$base" OPENAI_API_KEY=none ENABLE_OLLAMA_API=False OFFLINE_MODE=true HF_HUB_OFFLINE=1 \
        RAG_EMBEDDING_ENGINE=openai ENABLE_PERSISTENT_CONFIG=False DATA_DIR="$work/webui" WEBUI_SECRET_KEY=none \
        "$folder/webui/bin/open-webui" serve --host 127.0.0.1 --port "$port" >"$work/webui.log" 2>&1 &
    processes+=($!)
    for _ in $(seq 300); do
        curl --silent --fail "http://127.0.0.1:$port/health" >/dev/null && break
        kill -0 "${processes[1]}" 2>/dev/null || { tail -n 30 "$work/webui.log" >&2; exit 1; }
        sleep 1
    done
    "$folder/webui/bin/python" tests/clients/webui.py "http://127.0.0.1:$port" "$base" tiny
fi
