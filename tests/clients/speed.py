"""Compares decoding through OpenAI's API with decoding through gRPC, both while all streams decode.
Usage: speed.py PROGRAM GRPC_ADDRESS HTTP_URL MODEL [STREAMS…] (default: 1 16 64). Runs `ostinato bench --server` for gRPC, and
for HTTP a process for each four streams, which only notes what came when. Each way is measured three times, in turns, and
the best is taken. The model's tokenizer must have a word for each token."""

import json
import multiprocessing
import selectors
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

program, grpc, base, model, *counts = sys.argv[1:]
PROMPT, DECODE = 64, 512


def stream(seed):
    """Opens a stream and returns its socket."""
    # Token ids, as `bench` sends them; each stream has others.
    ids = [100 + (seed * 7919 + index * 104729) % 1000 for index in range(PROMPT)]
    asked = {"model": model, "prompt": ids, "max_tokens": DECODE, "ignore_eos": True, "stream": True, "temperature": 0}
    url = urlsplit(base)
    body = json.dumps(asked).encode()
    head = f"POST {url.path}/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection((url.hostname, url.port))
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def read(seeds, start, results):
    """Reads streams to their ends and tells when each one's events came."""
    start.wait()
    selector, events = selectors.DefaultSelector(), {}
    for seed in seeds:
        connection = stream(seed)
        selector.register(connection, selectors.EVENT_READ)
        events[connection] = []
    left = len(events)
    while left:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)
            events[key.fileobj].append((time.monotonic(), data))
            # The end may come in two parts.
            if not data or b"[DONE]" in b"".join(part for _, part in events[key.fileobj][-2:]):
                selector.unregister(key.fileobj)
                left -= 1
    results.put(list(events.values()))


def arrivals(parts):
    """Returns a time for each token of a stream's parts: when the end of its event came."""
    times, rest = [], b""
    for at, data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                words = sum(len(choice["text"].split()) for choice in event["choices"])
                times += [at] * words
    if len(times) != DECODE:
        raise SystemExit(f"{len(times)} words came, not {DECODE}: the tokenizer has no word for each token")
    return times


def over_http(count, seed):
    start, results = multiprocessing.Barrier((count + 3) // 4), multiprocessing.Queue()
    seeds = [range(seed + first, seed + min(first + 4, count)) for first in range(0, count, 4)]
    processes = [multiprocessing.Process(target=read, args=(part, start, results)) for part in seeds]
    for process in processes:
        process.start()
    parts = [stream for _ in processes for stream in results.get()]
    for process in processes:
        process.join()
    times = list(map(arrivals, parts))
    begin, end = max(events[0] for events in times), min(events[-1] for events in times)
    tokens = sum(begin < at <= end for events in times for at in events)
    return tokens / (end - begin)


def over_grpc(count, seed):
    asked = ["bench", "--server", grpc, "--served-model", model, "--streams", str(count), "--requests", str(count), "--seed", str(seed)]
    asked += ["--prompt", str(PROMPT), "--decode", str(DECODE), "--json"]
    lines = subprocess.run([program, *asked], check=True, capture_output=True, text=True).stdout.splitlines()
    return json.loads(lines[-1])["decode_tokens_per_second"]


for count in map(int, counts or [1, 16, 64]):
    http, native = [], []
    for turn in range(3):
        http.append(over_http(count, 1000 * count + 100 * turn))
        native.append(over_grpc(count, 1000 * count + 100 * turn + 50))
    ratio = max(http) / max(native)
    print(f"{count} streams: HTTP {max(http):.1f}, gRPC {max(native):.1f} tokens/s, {ratio:.3f} of it", flush=True)
