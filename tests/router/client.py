#!/usr/bin/env python3
"""Sends requests with the OpenAI client library through a router to two Ostinato workers. `tests/program/fleet.rs` runs this
program on the router's host and selects the cases. Every successful check prints a line that begins with "ok"; the
lines "kill N" and "start N" ask the test to kill or start worker N. The workers are called directly, over the engine's
contract, only to inspect them.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import threading
import time

import grpc
import openai
from smg_grpc_proto import vllm_engine_pb2 as contract
from smg_grpc_proto import vllm_engine_pb2_grpc as services

STORY = "Tell me a story about a fox, a lantern and a river."
OTHER = "Tell me a story about a hen, a kettle and a hill."
# The trace id and the client's own span id, which is the root of the trace; tests/program/fleet.rs looks for them.
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def say(what):
    print(f"ok  {what}", flush=True)


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
        time.sleep(0.02)


class Worker:
    """A client of one Ostinato worker, over the engine's contract."""

    def __init__(self, address):
        self.address = address
        # A worker that was killed must be reconnected as soon as it is back.
        options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]
        self.engine = services.VllmEngineStub(grpc.insecure_channel(address, options=options))

    def loads(self):
        return self.engine.GetLoads(contract.GetLoadsRequest(), timeout=10).loads

    def busy(self):
        return sum(load.num_total_reqs for load in self.loads())

    def idle(self):
        return all(load.num_total_reqs == 0 and load.num_used_tokens == 0 for load in self.loads())

    def last_asked(self):
        """Returns the time at which the worker last received a request, in seconds since 1970; 0 if never."""
        return self.engine.GetServerInfo(contract.GetServerInfoRequest(), timeout=10).last_receive_timestamp


class Fleet:
    def __init__(self, program, router, workers):
        self.program = program
        self.workers = [Worker(address) for address in workers]
        self.client = openai.OpenAI(base_url=f"{router}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, content=STORY, **options):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model="demo", messages=messages, **options)

    def stream(self, content=STORY, **options):
        """Returns the texts and finish reasons by index, the usage, and the number of log probabilities."""
        texts, reasons, usage, logprobs = {}, {}, None, 0
        for chunk in self.ask(content, stream=True, stream_options={"include_usage": True}, **options):
            assert not (chunk.usage and usage), "its usage came twice"
            usage = chunk.usage or usage
            for choice in chunk.choices:
                assert choice.index not in reasons, "something came behind its end"
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                if choice.logprobs and choice.logprobs.content:
                    logprobs += len(choice.logprobs.content)
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        return texts, reasons, usage, logprobs

    def wait_idle(self):
        wait_for("idle workers", 10, lambda: all(worker.idle() for worker in self.workers))

    def where(self, work):
        """Runs `work`; returns its result and the number of the worker that received the request."""
        before = [worker.last_asked() for worker in self.workers]
        result = work()
        asked = [number for number, worker in enumerate(self.workers) if worker.last_asked() > before[number]]
        assert len(asked) == 1, f"one request was given to {asked}"
        return result, asked[0]


def ready(fleet):
    """Waits until the router answers and sends requests to both workers, which also means that it has the tokenizer."""
    wait_for("the first answer", 60, lambda: fleet.ask(max_tokens=1))
    before = [worker.last_asked() for worker in fleet.workers]

    def both():
        fleet.ask(f"{time.monotonic()}: hello", max_tokens=1)
        return all(worker.last_asked() > moment for worker, moment in zip(fleet.workers, before, strict=True))

    wait_for("a request to each worker", 60, both)
    say("the router gives both workers requests")


def our_own(fleet, tokens):
    """Returns the output of the same request to our own service, and its prompt and output token counts."""
    command = [fleet.program, "generate", "--server", f"http://{fleet.workers[0].address}", "--chat", STORY]
    done = subprocess.run(
        [*command, "--temperature", "0", "--max-tokens", str(tokens)], capture_output=True, text=True, check=True
    )
    said = done.stdout + done.stderr
    count = lambda what: int(re.search(rf"{what}\s+(\d+) tokens", said).group(1))
    return said, count("prompt"), count("output")


def chat(fleet):
    said, *counts = our_own(fleet, 30)
    plain = fleet.ask(temperature=0, max_tokens=30)
    choice = plain.choices[0]
    assert choice.message.content.strip() in said, (choice, said)
    assert choice.finish_reason == "length"
    assert [plain.usage.prompt_tokens, plain.usage.completion_tokens] == counts, (plain.usage, counts)
    say(f"plain chat has our own service's text and usage, {counts} tokens")

    texts, reasons, usage, _ = fleet.stream(temperature=0, max_tokens=30)
    assert (texts, reasons) == ({0: choice.message.content}, {0: "length"}), (texts, reasons)
    assert [usage.prompt_tokens, usage.completion_tokens] == counts, (usage, counts)
    say("so has streaming chat")

    ended = fleet.ask(temperature=0, max_tokens=400)
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens < 400, ended
    say(f"the model's own end, after {ended.usage.completion_tokens} tokens")


def samples(fleet):
    two = fleet.ask(seed=7, n=2, max_tokens=20)
    whole = {choice.index: choice.message.content for choice in two.choices}
    texts, reasons, usage, _ = fleet.stream(seed=7, n=2, max_tokens=20)
    assert texts == whole and len(set(whole.values())) == 2 and len(reasons) == 2, (texts, whole)
    assert usage.completion_tokens == two.usage.completion_tokens == 40, (usage, two.usage)
    say("two samples, both ways")


def stops(fleet):
    # The stop string spans several tokens: "liv" and "ed", or shorter ones.
    stopped = fleet.ask(temperature=0, max_tokens=100, stop=["lived"])
    texts, reasons, usage, _ = fleet.stream(temperature=0, max_tokens=100, stop=["lived"])
    content = stopped.choices[0].message.content
    assert texts == {0: content} and "lived" not in content and reasons == {0: "stop"}, (texts, content)
    assert 0 < usage.completion_tokens == stopped.usage.completion_tokens < 100
    longer = fleet.ask(temperature=0, max_tokens=100).choices[0].message.content
    assert longer.startswith(content + "lived"), (content, longer)
    say("a stop string, both ways")


def logprobs(fleet):
    probable = fleet.ask(temperature=0, max_tokens=5, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(probable) == 5 and all(len(token.top_logprobs) == 2 for token in probable), probable
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in probable), "greedy takes the best"
    *_, counted = fleet.stream(temperature=0, max_tokens=5, logprobs=True, top_logprobs=2)
    assert counted == 5, counted
    say("log probabilities, both ways")


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 0, "maximum": 14},
            },
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}


def tools(fleet):
    """Offers tools that the model may use; it does not use them, because it was not trained on tools."""
    plain = fleet.ask(temperature=0, max_tokens=20)
    offered = fleet.ask(temperature=0, max_tokens=20, tools=[TOOL], tool_choice="auto")
    assert offered.choices[0].message.content == plain.choices[0].message.content, offered
    assert not offered.choices[0].message.tool_calls and offered.choices[0].finish_reason == "length", offered
    # A conversation in which a tool was used.
    call = {"id": "one", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm", "days": 1}'}}
    messages = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "one", "content": "rain"},
    ]
    after = fleet.ask(messages, temperature=0, max_tokens=5, tools=[TOOL])
    assert after.usage.prompt_tokens > plain.usage.prompt_tokens and after.usage.completion_tokens == 5, after
    say("tools are offered, and a conversation goes on after one was used")


def cancel(fleet):
    fleet.wait_idle()
    # Measures the duration of a step from a stream without other load.
    begun = time.monotonic()
    fleet.stream(OTHER, max_tokens=40, extra_body={"ignore_eos": True})
    step = (time.monotonic() - begun) / 40
    open_stream = fleet.ask(OTHER, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(open_stream))
    assert sum(worker.busy() for worker in fleet.workers) == 1
    open_stream.close()
    begun = time.monotonic()
    wait_for("a row whose client has gone", 5, lambda: all(worker.idle() for worker in fleet.workers))
    took = time.monotonic() - begun
    # Two plans are in flight, with two steps each on a device as slow as this; the rest of the limit covers the
    # notification of the cancellation and the polling here.
    assert took < 8 * step + 0.3, (took, step)
    say(f"a client that goes away frees its row, {took * 1e3:.0f} ms later, with steps of {step * 1e3:.0f} ms")


def turns(fleet):
    """Checks that a conversation continues on the worker on which it began, for both workers."""
    begun = {}
    for number in range(40):
        first = [{"role": "user", "content": f"{number * 7919} times: {STORY} {OTHER}"}]
        answer, at = fleet.where(lambda: fleet.ask(first, temperature=0, max_tokens=24))
        begun.setdefault(at, (first, answer))
        if len(begun) == len(fleet.workers):
            break
    assert len(begun) == len(fleet.workers), f"every new conversation went to {list(begun)}"
    for at, (first, answer) in begun.items():
        second = [*first, {"role": "assistant", "content": answer.choices[0].message.content},
                  {"role": "user", "content": "And then?"}]
        # The router learns about cached pages from events, which the workers send when pages enter the prefix cache.
        time.sleep(0.3)
        after, went = fleet.where(lambda: fleet.ask(second, temperature=0, max_tokens=4))
        cached = after.usage.prompt_tokens_details.cached_tokens
        whole = answer.usage.total_tokens // 16 * 16
        assert went == at, f"begun on {at}, went on on {went}"
        assert whole - 16 <= cached <= whole, (cached, whole)
        say(f"a second turn went to worker {at}, which had {cached} tokens of it")


def trace(fleet):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    answer = fleet.ask("Say something that nobody has said.", max_tokens=12, extra_headers=headers)
    assert answer.usage.completion_tokens > 1
    say("a request with a trace")


def kill(fleet):
    """Runs long streams on both workers; then kills one worker and starts it again."""
    streams, tokens = 8, 120
    begun = set()

    def long(number):
        """Returns the finish reasons of a stream, and its number of output tokens if it ended normally."""
        reasons, usage = [], None
        try:
            options = {"max_tokens": tokens, "extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
            for chunk in fleet.ask(f"{'ABCDEFGH'[number]}: {STORY}", stream=True, **options):
                begun.add(number)
                usage = chunk.usage or usage
                reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        except openai.OpenAIError:
            reasons.append("lost")
        return reasons, usage and usage.completion_tokens

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        running = [pool.submit(long, number) for number in range(streams)]
        wait_for("all streams", 30, lambda: len(begun) == streams)
        lost, kept = (worker.busy() for worker in fleet.workers)
        assert lost >= 1 and kept >= 1 and lost + kept == streams, (lost, kept)
        print("kill 0", flush=True)
        ends = [end.result() for end in running]
    whole = sum(end == (["length"], tokens) for end in ends)
    cut = sum(reasons != ["length"] for reasons, _ in ends)
    assert kept <= whole and cut >= 1 and whole + cut == streams, (lost, kept, ends)
    say(f"one worker killed: {whole} of {streams} streams went on to their end, {cut} were cut")

    after = [fleet.ask(max_tokens=4, seed=number).usage.completion_tokens for number in range(6)]
    assert after == [4] * 6, after
    wait_for("an idle worker", 10, fleet.workers[1].idle)
    say("new requests are served by the other")

    print("start 0", flush=True)
    back = fleet.workers[0]
    # The contract defines 0 for a worker that has not yet had a request.
    wait_for("the worker's return", 60, lambda: back.last_asked() == 0)

    def used():
        fleet.ask(f"{time.monotonic()}: hello", max_tokens=2)
        return back.last_asked() > 0

    begun = time.monotonic()
    wait_for("a request to the worker that is back", 60, used)
    say(f"the worker is back and used, {time.monotonic() - begun:.1f} s after it listens")


def many(fleet):
    """Sends a few hundred requests of several kinds, or a thousand, 64 at a time; each must end exactly once."""
    requests, at_once, tokens = 1000 if "OSTINATO_TEST_EVERY_CASE" in os.environ else 192, 64, 3
    most = 0
    lock = threading.Lock()
    running = 0

    def one(number):
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        try:
            content = f"{number % 8}: {[STORY, OTHER][number % 2]}"
            options = {"max_tokens": tokens, "seed": number, "extra_body": {"ignore_eos": True}}
            if number % 3 == 0:
                answer = fleet.ask(content, **options)
                assert [choice.finish_reason for choice in answer.choices] == ["length"], answer
                return answer.usage.completion_tokens
            if number % 20 == 1:
                # Clients that cancel.
                stream = fleet.ask(content, stream=True, **{**options, "max_tokens": 200})
                next(iter(stream))
                stream.close()
                return "gone"
            texts, reasons, usage, _ = fleet.stream(content, **options)
            assert reasons == {0: "length"} and texts.keys() == {0}, (texts, reasons)
            return usage.completion_tokens
        finally:
            with lock:
                running -= 1

    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        counts = collections.Counter(pool.map(one, range(requests)))
    took = time.monotonic() - begun
    gone = sum(number % 3 != 0 and number % 20 == 1 for number in range(requests))
    assert counts == {tokens: requests - gone, "gone": gone} and most == at_once, (counts, most)
    fleet.wait_idle()
    left = [[load.num_used_tokens for load in worker.loads()] for worker in fleet.workers]
    asked = [worker.last_asked() > 0 for worker in fleet.workers]
    assert left == [[0], [0]] and all(asked), (left, asked)
    say(f"{requests} requests, {most} at once, {gone} clients gone, in {took:.0f} s; no page is left in use: {left}")


def structure(fleet):
    """Checks output with a JSON schema, and tools that must be used."""
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "hen"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}}
    answer = fleet.ask(max_tokens=60, temperature=0, response_format=form)
    said = json.loads(answer.choices[0].message.content)
    assert said.keys() == {"animal", "legs"} and said["animal"] in ("fox", "hen"), said
    assert isinstance(said["legs"], int) and 0 <= said["legs"] <= 9, said
    assert answer.choices[0].finish_reason == "stop", answer
    texts, reasons, usage, _ = fleet.stream(max_tokens=60, temperature=0, response_format=form)
    assert (json.loads(texts[0]), reasons) == (said, {0: "stop"}), (texts, reasons)
    assert usage.completion_tokens == answer.usage.completion_tokens
    say(f"a JSON schema, both ways: {said}")

    named = {"type": "function", "function": {"name": "weather"}}
    answer = fleet.ask(max_tokens=100, temperature=0, tools=[TOOL], tool_choice=named).choices[0]
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    check_arguments(arguments)
    assert (call.function.name, answer.finish_reason) == ("weather", "tool_calls"), answer
    say(f"a tool that must be used: {arguments}")

    # The router's schema for "any tool" allows any number of calls and further keys, and this model, which was never
    # trained on tools, does not end its output. So only the beginning is checked.
    answer = fleet.ask(max_tokens=60, temperature=0, tools=[TOOL], tool_choice="required").choices[0]
    begun = re.match(r'\[\s*\{\s*"name"\s*:\s*"weather",\s*"parameters"\s*:\s*(\{.*?\})', answer.message.content, re.DOTALL)
    assert begun, answer
    check_arguments(json.loads(begun[1]))
    say("some tool that must be used")


def check_arguments(arguments):
    assert arguments.keys() == {"town", "days"}, arguments
    assert 0 <= arguments["days"] <= 14 and len(arguments["town"]) <= 12, arguments


CASES = [ready, chat, samples, stops, logprobs, tools, cancel, turns, trace, kill, many, structure]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True, help="the ostinato to ask our own service with")
    parser.add_argument("--router", required=True, help="http://HOST:PORT")
    parser.add_argument("--worker", action="append", required=True, help="HOST:PORT, once for each")
    parser.add_argument("cases", nargs="+", choices=[case.__name__ for case in CASES])
    arguments = parser.parse_args()
    fleet = Fleet(arguments.program, arguments.router, arguments.worker)
    for name in arguments.cases:
        next(case for case in CASES if case.__name__ == name)(fleet)


main()
