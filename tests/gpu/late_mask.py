#!/usr/bin/env python3
"""Shows what streams without a constraint lose beside one whose masks take seconds.

    tests/gpu/late_mask.py PROGRAM MODEL [--device SELECTOR] [--mask 5] [--masks 3] [--streams 8] [--tokens 4000]

PROGRAM is `ostinato`; MODEL a checkpoint's folder, a GGUF file or `embedded:demo`. The streams run twice: alone, and
beside a stream that follows a regex, whose worker process is stopped (SIGSTOP) --masks times for --mask seconds: the
limits on constraints end those whose masks would take as long by themselves. The output has, for both, the tokens/s of all
streams while the constrained one runs, and the longest gap between two events of a stream; and of the constrained stream
its longest gaps, which are the times of its slowest masks.

Ends with status 1 if the output does not follow the regex, a stream ends early, no mask was late, or, with --least and
--gap, if the streams have lost more than that. Needs Linux and Python's standard library.
"""

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

PROMPT = 32
REGEX = "[a-z ]{1,2000}"
# Tokens of the constrained stream between two masks that take long.
BETWEEN = 4


def serve(arguments, folder):
    """Starts the server. Returns its process and the addresses of OpenAI's API and of the admin endpoint."""
    device = f"device = {json.dumps(arguments.device)}" if arguments.device else ""
    config = os.path.join(folder, "ostinato.toml")
    slots = arguments.streams + 2
    with open(config, "w", encoding="utf-8") as file:
        file.write(
            '[server]\nlisten = "127.0.0.1:0"\nworker_seconds = 60\n'
            '[http]\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
            f'[[models]]\nname = "model"\npath = {json.dumps(arguments.model)}\nslots = {slots}\nreplicas = [{{ {device} }}]\n'
        )
    log = open(os.path.join(folder, "log"), "w", encoding="utf-8")
    command = [arguments.program, "serve", "--config", config]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    addresses = {}
    for line in server.stdout:
        for words, name in (("OpenAI's API on http://", "http"), ("admin on http://", "admin")):
            if line.startswith(words):
                addresses[name] = line[len(words):].strip().removesuffix("/v1").rstrip("/")
        if "http" in addresses:
            return server, addresses
    server.wait()
    with open(log.name, encoding="utf-8") as file:
        sys.exit(f"the server has ended with {server.returncode}:\n{file.read()}")


class Stream(threading.Thread):
    """One stream of /v1/completions, and the times at which its events came."""

    def __init__(self, address, tokens, seed, regex=None):
        super().__init__(daemon=True)
        self.address, self.tokens, self.regex = address, tokens, regex
        # Ids of whole words and parts of words in every vocabulary.
        self.prompt = [300 + (seed * 37 + index * 11) % 500 for index in range(PROMPT)]
        self.times, self.text, self.count, self.problem, self.reason = [], "", 0, None, None

    def run(self):
        body = {
            "model": "model", "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }
        body.update({"guided_regex": self.regex} if self.regex else {"ignore_eos": True})
        try:
            connection = http.client.HTTPConnection(self.address, timeout=1200)
            self.begun = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self.problem = response.read().decode()
                return
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.problem = event["error"]["message"]
                    return
                if event["choices"]:
                    self.times.append(time.monotonic())
                    self.text += event["choices"][0]["text"]
                    self.reason = event["choices"][0]["finish_reason"] or self.reason
                elif event.get("usage"):
                    self.count = event["usage"]["completion_tokens"]
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.problem = repr(error)

    def longest_gap(self):
        return max((after - before for before, after in zip(self.times, self.times[1:])), default=0.0)


def run(streams):
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()
    for stream in streams:
        if stream.problem:
            sys.exit(f"a stream has failed: {stream.problem}")


def rate(streams, begin, end):
    """The events/s of all streams between two times, as tokens/s: an event has as many tokens as the stream's others."""
    tokens = 0.0
    for stream in streams:
        within = sum(begin <= at <= end for at in stream.times)
        tokens += within * stream.count / len(stream.times)
    return tokens / (end - begin)


def workers(process):
    """The process ids of a process's descendants."""
    found = []
    for task in os.listdir(f"/proc/{process}/task"):
        with open(f"/proc/{process}/task/{task}/children", encoding="ascii") as file:
            children = [int(child) for child in file.read().split()]
        for child in children:
            found += [child, *workers(child)]
    return found


def delay(server, seconds):
    """Stops the server's workers for the given number of seconds. Returns the number of workers."""
    stopped = workers(server.pid)
    for worker in stopped:
        os.kill(worker, signal.SIGSTOP)
    time.sleep(seconds)
    for worker in stopped:
        os.kill(worker, signal.SIGCONT)
    return len(stopped)


def metric(address, name):
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def measure(arguments, server, addresses):
    address = addresses["http"]
    ordinary = lambda tokens: [Stream(address, tokens, seed) for seed in range(arguments.streams)]
    follow = lambda seed: Stream(address, BETWEEN * (arguments.masks + 2), seed, REGEX)
    # Pipelines and workers are warm afterwards, and prompts are in the prefix cache in both runs.
    run(ordinary(8) + [follow(98)])
    alone = ordinary(arguments.tokens)
    run(alone)
    before = metric(addresses["admin"], "ostinato_preemptions_total")
    beside, constrained = ordinary(arguments.tokens), follow(99)
    for stream in beside:
        stream.start()
    while any(not stream.times for stream in beside):
        time.sleep(0.001)
    begin = time.monotonic()
    constrained.start()
    problems, stopped = [], 0
    for number in range(1, arguments.masks + 1):
        while len(constrained.times) < BETWEEN * number and constrained.is_alive():
            time.sleep(0.0005)
        stopped += delay(server, arguments.mask)
    constrained.join()
    end = time.monotonic()
    still = sum(stream.is_alive() for stream in beside)
    for stream in beside:
        stream.join()
    late = metric(addresses["admin"], "ostinato_preemptions_total") - before
    problems += [stream.problem for stream in [*beside, constrained] if stream.problem]
    problems += ["a stream has drawn other numbers of tokens" for stream in beside if stream.count != arguments.tokens]
    if still < arguments.streams:
        problems.append(f"{arguments.streams - still} streams ended before the constrained one: give more --tokens")
    if not re.fullmatch(REGEX, constrained.text):
        problems.append(f"the constrained stream has drawn {constrained.text[:200]!r}")
    gaps = [max(stream.longest_gap() for stream in streams) for streams in (alone, beside)]
    first, last = max(stream.times[0] for stream in alone), min(stream.times[-1] for stream in alone)
    rates = [rate(alone, first, last), rate(beside, begin, end)]
    equal = sum(a.text == b.text for a, b in zip(alone, beside))
    print(f"{arguments.streams} streams without a constraint    tokens/s   longest gap of a stream")
    print(f"alone                           {rates[0]:10.1f}   {gaps[0] * 1000:8.1f} ms")
    print(f"beside the constrained stream   {rates[1]:10.1f}   {gaps[1] * 1000:8.1f} ms   ({rates[1] / rates[0]:.3f} of alone)")
    slow = sorted((b - a for a, b in zip(constrained.times, constrained.times[1:])), reverse=True)
    shown = ", ".join(f"{gap:.2f}" for gap in slow[: arguments.masks + 2])
    print(
        f"the constrained stream: {constrained.count} tokens in {end - begin:.1f} s, slowest mask {constrained.longest_gap():.2f} s, "
        f"longest gaps {shown} s; it left its batch {late:.0f} times"
    )
    print(f"{still} of {arguments.streams} streams went on when it ended; {equal} of their texts equal those alone")
    if stopped < arguments.masks or sum(gap > 0.5 * arguments.mask for gap in slow) < arguments.masks:
        problems.append("not as many masks took as long as wanted: the result shows nothing")
    # On CPU drivers a row is queued only when its mask is there, so it never holds a batch that it could leave.
    if late < 1 and arguments.device != "cpu":
        problems.append("the row never left its batch: no mask was late")
    if rates[1] < arguments.least * rates[0]:
        problems.append(f"less than {arguments.least} of the speed is left")
    if gaps[1] > arguments.gap:
        problems.append(f"a stream waited {gaps[1]:.3f} s for its next event, at most {arguments.gap} are allowed")
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--device", help="as in the configuration, such as 0 or cpu")
    parser.add_argument("--mask", type=float, default=5.0, help="seconds that a mask shall take")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--masks", type=int, default=3, help="how many masks shall take so long")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of each stream without a constraint")
    parser.add_argument("--least", type=float, default=0.0, help="the least part of the speed that must be left")
    parser.add_argument("--gap", type=float, default=float("inf"), help="the longest gap that is allowed, seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, addresses = serve(arguments, folder)
        try:
            problems = measure(arguments, server, addresses)
        finally:
            server.terminate()
            server.wait(60)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
