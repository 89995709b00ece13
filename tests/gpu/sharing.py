#!/usr/bin/env python3
"""Runs several processes of Ostinato on one GPU for some minutes, and a CUDA program beside them.

    tests/gpu/sharing.py PROGRAM MODEL[=TOKENS] [MODEL[=TOKENS] …] [--seconds 600] [--cuda] [--device SELECTOR]

PROGRAM is `ostinato`; each MODEL, a checkpoint's folder or a GGUF file, is one process at a time, which generates a text of
TOKENS tokens (default 2,000) again and again. Each model's text is generated alone first. Then all models run at once, with
--cuda beside a process of torch that multiplies matrices in a loop, until the time is over. The output has the number of
texts, the tokens/s alone and beside the others, and the faults: calls of decode steps that waited too long for another
call's words.

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
print(done)
"""


class Text:
    """One text of a model: its tokens, the tokens/s of its decode steps, and its faults."""

    def __init__(self, program, device, model, tokens):
        arguments = [program, "generate", "--model", model, "--tokens", PROMPT, "--max-tokens", str(tokens), "--json"]
        arguments += ["--context", str(tokens + 64), "--ignore-eos", "--drafts", "0"]
        arguments += ["--device", device] if device else []
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.tokens = [token for event in events if event["event"] == "delta" for token in event["token_ids"]]
        decode = [event["timings_ms"]["decode"] for event in events if event["event"] == "finished"]
        self.speed = (len(self.tokens) - 1) * 1000 / decode[0] if decode else 0.0
        self.faults = done.stderr.count(FAULT)
        self.error = None
        if done.returncode != 0 or len(self.tokens) != tokens:
            self.error = f"status {done.returncode}, {len(self.tokens)} of {tokens} tokens: {done.stderr[-300:]}"


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
    end = time.monotonic() + arguments.seconds
    beside = [[] for _ in models]

    def serve(index):
        while time.monotonic() < end:
            beside[index].append(Text(arguments.program, arguments.device, *models[index]))

    cuda = None
    if arguments.cuda:
        source = CUDA.format(seconds=arguments.seconds)
        cuda = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if cuda:
        print(f"CUDA: {cuda.communicate()[0].strip()} products of 4,096 x 4,096")
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
    sys.exit(int(bad))


if __name__ == "__main__":
    main()
