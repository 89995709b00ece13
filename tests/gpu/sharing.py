#!/usr/bin/env python3
"""Runs several processes of Ostinato on one GPU for some minutes, and a CUDA program beside them.

    tests/gpu/sharing.py PROGRAM MODEL[=TOKENS] [MODEL[=TOKENS] …] [--seconds 600] [--cuda] [--device SELECTOR]

PROGRAM is `ostinato`; each MODEL, a checkpoint's folder or a GGUF file, is one process at a time, which generates a text of
TOKENS tokens (default 2,000) again and again. Each model's text is generated alone first. Then all models run at once, with
--cuda beside a process of torch that multiplies matrices in a loop, until the time is over. The output has the number of
texts, the tokens/s alone and beside the others, and the faults: calls of decode steps that waited too long for another
call's words. Its last line is the throughput of the GPU while it is shared: of the time in which all processes decode at once
(and not one of them starts), the tokens/s of each, and the products/s of the CUDA process, of those alone, and their sum.

Ends with status 1 if a text differs from the one that its model gave alone, if a process failed, or after a fault. Needs
Python's standard library, and torch for --cuda.
"""

import argparse
import itertools
import json
import subprocess
import sys
import threading
import time

PROMPT = "5,80,300,7,120"
FAULT = "waited too long"
# Prints the time, on the clock that all processes share, and the number of products so far.
CUDA = """
import time, torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
end = time.monotonic() + float({seconds})
done = 0
while time.monotonic() < end:
    for _ in range(50):
        y = x @ x
    torch.cuda.synchronize()
    done += 50
    print(time.monotonic(), done, flush=True)
"""
CUDA_ALONE = 8


class Work:
    """What a process had done at some times, in order: tokens of one text, or products."""

    def __init__(self, points):
        self.points = points

    def speed(self):
        """Returns how much was done per second, from the first point on."""
        (begin, first), (end, last) = (self.points[0], self.points[-1]) if self.points else ((0, 0), (0, 0))
        return (last - first) / (end - begin) if end > begin else 0.0

    def within(self, begin, end):
        """Returns how much was done from one time to another; all points within count."""
        inside = [done for time_of, done in self.points if begin <= time_of <= end]
        return inside[-1] - inside[0] if inside else 0


def cuda_work(process):
    """Returns the work of a CUDA process that has ended."""
    lines = [line.split() for line in process.communicate()[0].splitlines()]
    # The first products take longer.
    return Work([(float(at), int(done)) for at, done in lines[5:]])


def together(all_works):
    """Returns the times (begin, end) in which every process has work in progress, which is a list of works for each."""
    found = []
    for works in itertools.product(*all_works):
        begin, end = max(work.points[0][0] for work in works), min(work.points[-1][0] for work in works)
        if end > begin:
            found.append((begin, end, works))
    return found


class Text:
    """One text of a model: its tokens, the tokens/s of its decode steps, and its faults."""

    def __init__(self, program, device, model, tokens):
        arguments = [program, "generate", "--model", model, "--tokens", PROMPT, "--max-tokens", str(tokens), "--json"]
        arguments += ["--context", str(tokens + 64), "--ignore-eos", "--drafts", "0"]
        arguments += ["--device", device] if device else []
        done = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        errors = []
        reader = threading.Thread(target=lambda: errors.append(done.stderr.read()))
        reader.start()
        lines = [(time.monotonic(), line) for line in done.stdout]
        done.wait()
        reader.join()
        errors = errors[0]
        timed = [(at, json.loads(line)) for at, line in lines if line.startswith("{")]
        events = [event for _, event in timed]
        self.tokens = [token for event in events if event["event"] == "delta" for token in event["token_ids"]]
        decode = [event["timings_ms"]["decode"] for event in events if event["event"] == "finished"]
        self.speed = (len(self.tokens) - 1) * 1000 / decode[0] if decode else 0.0
        deltas = [(at, len(event["token_ids"])) for at, event in timed if event["event"] == "delta"]
        self.work = Work(list(zip([at for at, _ in deltas], itertools.accumulate(count for _, count in deltas))))
        self.faults = errors.count(FAULT)
        self.error = None
        if done.returncode != 0 or len(self.tokens) != tokens:
            self.error = f"status {done.returncode}, {len(self.tokens)} of {tokens} tokens: {errors[-300:]}"


def cuda_process(seconds):
    return subprocess.Popen([sys.executable, "-c", CUDA.format(seconds=seconds)], stdout=subprocess.PIPE, text=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("program")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--device")
    arguments = parser.parse_args()
    models = [(name, int(tokens or 2000)) for name, _, tokens in (model.partition("=") for model in arguments.models)]
    alone = [Text(arguments.program, arguments.device, *model) for model in models]
    for (name, _), text in zip(models, alone):
        if text.error:
            sys.exit(f"{name}: {text.error}")
    cuda = None
    if arguments.cuda:
        cuda_alone = cuda_work(cuda_process(CUDA_ALONE))
    end = time.monotonic() + arguments.seconds
    beside = [[] for _ in models]

    def serve(index):
        while time.monotonic() < end:
            beside[index].append(Text(arguments.program, arguments.device, *models[index]))

    products = []
    if arguments.cuda:
        cuda = cuda_process(arguments.seconds)
        # Its output is read while the texts are generated, so that it never waits for a reader.
        reader = threading.Thread(target=lambda: products.append(cuda_work(cuda)))
        reader.start()
    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if cuda:
        reader.join()
        print(f"CUDA: {products[0].points[-1][1] if products[0].points else 0} products of 4,096 x 4,096")
    bad = bool(cuda and cuda.returncode)
    for (name, tokens), text, others in zip(models, alone, beside):
        different = sum(other.tokens != text.tokens for other in others)
        faults = sum(other.faults for other in others)
        errors = [other.error for other in others if other.error]
        speeds = sorted(other.speed for other in others)
        print(
            f"{name}: {len(others)} texts of {tokens} tokens, {different} differ, {faults} faults, {len(errors)} failed; "
            f"{text.speed:.1f} tokens/s alone, {speeds[len(speeds) // 2]:.1f} beside the others (median)"
        )
        for error in errors[:3]:
            print(f"  {error}")
        bad |= bool(different or faults or errors)
    works = [[other.work for other in others if other.work.points] for others in beside] + ([products] if cuda else [])
    speeds = [text.speed for text in alone] + ([cuda_alone.speed()] if cuda else [])
    windows = together(works)
    length = sum(end - begin for begin, end, _ in windows)
    if length > 0:
        done = [sum(each[index].within(begin, end) for begin, end, each in windows) / length for index in range(len(works))]
        shares = [one / other for one, other in zip(done, speeds)]
        print(f"all at once, for {length:.0f} s: " + " + ".join(f"{one:.1f} of {other:.1f}" for one, other in zip(done, speeds))
              + f" per second, together {sum(shares):.3f} of alone")
    sys.exit(int(bad))


if __name__ == "__main__":
    main()
