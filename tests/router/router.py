#!/usr/bin/env python3
"""A real router in front of two Ostinatos, asked by a real OpenAI client: chat plain and streaming, usage, several
samples, stop strings, log probabilities, a client that goes away, many requests at once, a worker that is killed.

Run by hand, after `cargo build`, with the demo model on a CPU driver (about two minutes on two cores):

    python3 -m venv /tmp/router && /tmp/router/bin/pip install smg==1.13.0 smg-grpc-proto==0.4.28 openai
    /tmp/router/bin/python tests/router/router.py target/debug/ostinato
"""

import concurrent.futures
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import grpc
import openai
from smg_grpc_proto import vllm_engine_pb2 as contract
from smg_grpc_proto import vllm_engine_pb2_grpc as services

STORY = "Tell me a story about a fox, a lantern and a river."
OTHER = "Tell me a story about a hen, a kettle and a hill."


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(what, seconds, look):
    until = time.monotonic() + seconds
    while True:
        try:
            found = look()
            if found:
                return found
        except (OSError, openai.OpenAIError, grpc.RpcError) as error:
            found = error
        assert time.monotonic() < until, f"{what} took more than {seconds} s: {found}"
        time.sleep(0.1)


class Worker:
    """One Ostinato with `replicas` replicas of the demo model, and the contract's client of it."""

    def __init__(self, program, folder, replicas):
        self.port = free_port()
        self.replicas = replicas
        self.log = folder / f"worker-{self.port}.log"
        models = ["--model", "demo=embedded:demo@cpu"] * replicas
        command = [program, "serve", *models, "--listen", f"127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(command, stdout=self.log.open("w"), stderr=subprocess.STDOUT)
        self.engine = services.VllmEngineStub(grpc.insecure_channel(f"127.0.0.1:{self.port}"))

    def ready(self):
        assert self.process.poll() is None, self.log.read_text()
        return "listening on" in self.log.read_text()

    def loads(self):
        return self.engine.GetLoads(contract.GetLoadsRequest(), timeout=10).loads

    def busy(self):
        return sum(load.num_total_reqs for load in self.loads())

    def idle(self):
        return all(load.num_total_reqs == 0 and load.num_used_tokens == 0 for load in self.loads())


def ask(client, text=STORY, **options):
    message = {"role": "user", "content": text}
    return client.chat.completions.create(model="demo", messages=[message], **options)


def stream(client, text=STORY, **options):
    """The texts and reasons by index, the usage, the number of log probabilities."""
    texts, reasons, usage, logprobs = {}, {}, None, 0
    for chunk in ask(client, text, stream=True, stream_options={"include_usage": True}, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs and choice.logprobs.content:
                logprobs += len(choice.logprobs.content)
            if choice.finish_reason:
                assert choice.index not in reasons, "it ended twice"
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage, logprobs


def our_own(program, worker, tokens):
    """Text and counts of the same request on our own service."""
    command = [program, "generate", "--server", f"http://127.0.0.1:{worker.port}", "--chat", STORY]
    done = subprocess.run(
        [*command, "--temperature", "0", "--max-tokens", str(tokens)], capture_output=True, text=True, check=True
    )
    said = done.stdout + done.stderr
    count = lambda what: int(re.search(rf"{what}\s+(\d+) tokens", said).group(1))
    return said, count("prompt"), count("output")


def check(program, workers, client):
    def say(what):
        print(f"ok  {what}", flush=True)

    said, prompt_tokens, output_tokens = our_own(program, workers[0], 30)
    plain = ask(client, temperature=0, max_tokens=30)
    choice = plain.choices[0]
    assert choice.message.content.strip() in said, (choice, said)
    assert choice.finish_reason == "length"
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (prompt_tokens, output_tokens)
    say(f"plain chat has our own service's text and usage, {prompt_tokens} and {output_tokens} tokens")

    texts, reasons, usage, _ = stream(client, temperature=0, max_tokens=30)
    assert (texts, reasons) == ({0: choice.message.content}, {0: "length"}), (texts, reasons)
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, output_tokens)
    say("so has streaming chat")

    second = ask(client, temperature=0, max_tokens=2).usage.prompt_tokens_details
    assert second.cached_tokens >= 16, second
    say(f"a prompt is sent where its beginning lies: {second.cached_tokens} tokens of it were cached")

    two = ask(client, seed=7, n=2, max_tokens=20)
    whole = {choice.index: choice.message.content for choice in two.choices}
    texts, reasons, usage, _ = stream(client, seed=7, n=2, max_tokens=20)
    assert texts == whole and len(set(whole.values())) == 2, (texts, whole)
    assert usage.completion_tokens == two.usage.completion_tokens == 40, (usage, two.usage)
    say("two samples, both ways")

    stopped = ask(client, temperature=0, max_tokens=100, stop=["lived"])
    texts, reasons, usage, _ = stream(client, temperature=0, max_tokens=100, stop=["lived"])
    content = stopped.choices[0].message.content
    assert texts == {0: content} and "lived" not in content and reasons == {0: "stop"}, (texts, content)
    assert 0 < usage.completion_tokens == stopped.usage.completion_tokens < 100
    say("a stop string, both ways")

    ended = ask(client, temperature=0, max_tokens=400)
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens < 400, ended
    say(f"the model's own end, after {ended.usage.completion_tokens} tokens")

    probable = ask(client, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(probable) == 5 and all(len(token.top_logprobs) == 2 for token in probable), probable
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in probable), "greedy takes the best"
    _, _, _, logprobs = stream(client, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2)
    assert logprobs == 5, logprobs
    say("log probabilities, both ways")

    wait_for("idle workers", 5, lambda: all(worker.idle() for worker in workers))
    open_stream = ask(client, OTHER, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(open_stream))
    assert sum(worker.busy() for worker in workers) == 1
    open_stream.close()
    begun = time.monotonic()
    wait_for("a row whose client has gone", 5, lambda: all(worker.idle() for worker in workers))
    say(f"a client that goes away frees its row, {time.monotonic() - begun:.1f} s later")

    def one(number):
        text = [STORY, OTHER][number % 2]
        if number % 3:
            return ask(client, text, max_tokens=6, seed=number).usage.completion_tokens
        return stream(client, text, max_tokens=6, seed=number)[2].completion_tokens

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(one, range(96)))
    assert counts == [6] * 96, counts
    wait_for("idle workers", 5, lambda: all(worker.idle() for worker in workers))
    served = [[load.num_used_tokens for load in worker.loads()] for worker in workers]
    say(f"96 requests, 16 at once, and no page is left in use: {served}")


def check_kill(workers, client):
    """Long streams on both workers; then one worker is killed."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        def long(number):
            try:
                text = f"{'ABCDEFGH'[number]}: tell me a story about a fox, a lantern and a river."
                return stream(client, text, max_tokens=60, extra_body={"ignore_eos": True})[2].completion_tokens
            except openai.OpenAIError as error:
                return error

        streams = [pool.submit(long, number) for number in range(8)]
        wait_for("all streams", 30, lambda: sum(worker.busy() for worker in workers) == len(streams))
        lost, kept = (worker.busy() for worker in workers)
        assert lost >= 1 and kept >= 1, (lost, kept)
        workers[0].process.send_signal(signal.SIGKILL)
        ends = [end.result() for end in streams]
    whole = sum(end == 60 for end in ends)
    assert whole == kept and lost + kept == len(streams), (lost, kept, ends)
    after = [ask(client, max_tokens=4, seed=number).usage.completion_tokens for number in range(6)]
    assert after == [4] * 6, after
    wait_for("an idle worker", 5, workers[1].idle)
    print(f"ok  one worker killed: {whole} of 8 streams went on to their end, and new requests are served", flush=True)


def main():
    program = os.path.abspath(sys.argv[1])
    folder = pathlib.Path(tempfile.mkdtemp(prefix="router-"))
    router_log = folder / "router.log"
    workers, routers = [], []
    try:
        workers = [Worker(program, folder, replicas) for replicas in (1, 2)]
        for worker in workers:
            wait_for("a worker's start", 120, worker.ready)
        ranks = sum(worker.replicas for worker in workers)

        def start(policy):
            port = free_port()
            command = [
                str(pathlib.Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port),
                "--backend", "vllm", "--policy", policy, "--dp-aware", "--prometheus-port", str(free_port()),
                "--log-level", "debug", "--worker-urls", *[f"grpc://127.0.0.1:{worker.port}" for worker in workers],
            ]
            routers.append(subprocess.Popen(command, stdout=router_log.open("a"), stderr=subprocess.STDOUT))
            base = f"http://127.0.0.1:{port}"

            def registered():
                with urllib.request.urlopen(f"{base}/workers", timeout=5) as answer:
                    return answer.read().decode().count('"is_healthy":true') == ranks

            wait_for("the workers' registration", 60, registered)
            client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
            # Until it has their tokenizer.
            wait_for("the first answer", 60, lambda: ask(client, max_tokens=1))
            return client

        client = start("cache_aware")
        print(f"ok  the router has {ranks} ranks of {len(workers)} workers", flush=True)
        log = router_log.read_text()
        assert log.count("KV event stream connected") >= ranks, "the router does not follow the pages"
        assert "huggingface.co/api/models/demo" not in log, "the router looked for the served name in a registry"
        check(program, workers, client)
        # Requests alike would all go to one worker: another policy spreads them.
        check_kill(workers, start("round_robin"))
    except BaseException:
        print(f"logs are in {folder}", file=sys.stderr)
        raise
    finally:
        for process in [*routers, *[worker.process for worker in workers]]:
            process.kill()
            process.wait()


main()
