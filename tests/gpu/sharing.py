#!/usr/bin/env python3
"""Runs several processes of Ostinato on one GPU for some minutes, and a CUDA program beside them.

    tests/gpu/sharing.py PROGRAM MODEL[=TOKENS] [MODEL[=TOKENS] …] [--seconds 600] [--cuda] [--device SELECTOR]

PROGRAM is `ostinato`; each MODEL, a checkpoint's folder or a GGUF file, is one process at a time, which generates a text of
TOKENS tokens (default 2,000) again and again. Each model's text is generated alone first. Then all models run at once, with
--cuda beside a process of torch that multiplies matrices in a loop, until the time is over. The output has the number of
texts, the tokens/s alone and beside the others, and the faults: calls of decode steps that waited too long for another
call's words. With two processes, the last line is the share of its own speed alone that each has while the other works too,
and their sum: processes also spend time with starts, in which the other is not disturbed.

Ends with status 1 if a text differs from the one that its model gave alone, if a process failed, or after a fault. Needs
Python's standard library, and torch for --cuda.
"""

import argparse
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
# Seconds of CUDA alone.
CUDA_ALONE = 5


def cuda_process(seconds):
    return subprocess.Popen([sys.executable, "-c", CUDA.format(seconds=seconds)], stdout=subprocess.PIPE, text=True)


def products(process):
    """Returns the times and numbers of products of a CUDA process, which runs to its end."""
    lines = [line.split() for line in process.communicate()[0].splitlines()]
    # The first products take longer.
    return [(float(at), int(done)) for at, done in lines[5:]]


def overlap(text, spans):
    """Returns for how many seconds a text was decoded within these spans (begin, end), which do not overlap."""
    return sum(max(0.0, min(text.end, end) - max(text.begin, begin)) for begin, end in spans)


def share(alone, texts, spans):
    """Returns the share of its speed alone that a model has within spans: what texts take longer, they have lost there."""
    lost = sum(text.end - text.begin - (len(text.tokens) - 1) / alone.speed for text in texts)
    return 1 - lost / max(sum(overlap(text, spans) for text in texts), 1e-9)


def cuda_share(alone, done, spans):
    """Returns the share of its speed alone that the CUDA process has within spans."""
    (begin, first), (end, last) = alone[0], alone[-1]
    count = length = 0
    for begin_of, end_of in spans:
        inside = [point for point in done if begin_of <= point[0] <= end_of]
        if len(inside) > 1:
            count, length = count + inside[-1][1] - inside[0][1], length + inside[-1][0] - inside[0][0]
    return count / max(length, 1e-9) / ((last - first) / (end - begin))


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
        # When its decode steps ran: the last event comes when they are over.
        self.end = lines[-1][0] if lines else 0.0
        self.begin = self.end - (decode[0] / 1000 if decode else 0.0)
        self.faults = errors.count(FAULT)
        self.error = None
        if done.returncode != 0 or len(self.tokens) != tokens:
            self.error = f"status {done.returncode}, {len(self.tokens)} of {tokens} tokens: {errors[-300:]}"


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
        cuda_alone = products(cuda_process(CUDA_ALONE))
    end = time.monotonic() + arguments.seconds
    beside = [[] for _ in models]

    def serve(index):
        while time.monotonic() < end:
            beside[index].append(Text(arguments.program, arguments.device, *models[index]))

    done = []
    if arguments.cuda:
        cuda = cuda_process(arguments.seconds)
        # Its output is read while the texts are generated, so that it never waits for a reader.
        reader = threading.Thread(target=lambda: done.extend(products(cuda)))
        reader.start()
    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if cuda:
        reader.join()
        print(f"CUDA: {done[-1][1] if done else 0} products of 4,096 x 4,096")
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
    spans = [[(text.begin, text.end) for text in others] for others in beside]
    shares = []
    if cuda and done and len(models) == 1:
        shares = [share(alone[0], beside[0], [(done[0][0], done[-1][0])]), cuda_share(cuda_alone, done, spans[0])]
    elif not cuda and len(models) == 2:
        shares = [share(alone[index], beside[index], spans[1 - index]) for index in (0, 1)]
    if shares:
        print(f"while both work, of alone: {shares[0]:.3f} + {shares[1]:.3f} = {sum(shares):.3f}")
    sys.exit(int(bad))


if __name__ == "__main__":
    main()
