"""Uses `ostinato serve` through the backend of Open WebUI: the list of models, a chat whole and as a stream.
Usage: webui.py WEBUI_URL BASE_URL MODEL."""

import json
import sys
import urllib.request

webui, base, model = sys.argv[1:]


def call(path, body=None, token=None):
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(webui + path, data, headers), timeout=120) as answer:
        return answer.read().decode()


token = json.loads(call("/api/v1/auths/signin", {"email": "admin@localhost", "password": "admin"}))["token"]
assert [entry["id"] for entry in json.loads(call("/api/models", token=token))["data"]] == [model]
assert [entry["id"] for entry in json.loads(call("/openai/verify", {"url": base, "key": "none"}, token))["data"]] == [model]
asked = {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16, "seed": 3}
whole = json.loads(call("/api/chat/completions", asked | {"stream": False}, token))
lines = call("/api/chat/completions", asked | {"stream": True}, token).split("\n\n")
events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
assert events[-1] == "[DONE]", events[-3:]
deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event).get("choices", [])]
assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
print("open-webui: models, chat, stream ok")
