"""Asks a router for two models of one server and compares its answers with the server's own.
Usage: models.py ROUTER SERVER WORKER…: the router's URL, the URL of the server's HTTP API, and the address of the gRPC port
of each model."""

import json
import sys
import time
import urllib.request

import openai

router, server, *workers = sys.argv[1:]
for worker in workers:
    body, headers = json.dumps({"url": f"grpc://{worker}"}).encode(), {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{router}/workers", body, headers), timeout=30).close()
through = openai.OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0)
direct = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def names(client):
    try:
        return sorted(model.id for model in client.models.list())
    except openai.APIStatusError:
        return []


until = time.monotonic() + 60
while names(through) != names(direct):
    assert time.monotonic() < until, (names(through), names(direct))
    time.sleep(0.2)
assert len(names(direct)) == len(workers), names(direct)


def ask(client, **asked):
    while True:
        try:
            return client.chat.completions.create(**asked)
        except openai.InternalServerError as error:
            # The router lists a model before it has its tokenizer, and answers with 503 until then.
            assert error.status_code == 503 and time.monotonic() < until, error
            time.sleep(0.2)


for model in names(direct):
    asked = dict(model=model, messages=[{"role": "user", "content": "Add 2 and 3."}], max_tokens=24, temperature=0)
    said = [ask(client, **asked) for client in (through, direct)]
    texts = [answer.choices[0].message.content for answer in said]
    assert texts[0] == texts[1] and said[0].model == model, said
    print(model, repr(texts[0]))
print("two models ok")
