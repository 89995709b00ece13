#!/usr/bin/env python3
"""Draws small shapes of models at random, and requires that decode steps without barriers give one output, without a fault.

    shapes.py PROGRAM [--device SEL] [--tune KEY=VALUE]... [--shapes N] [--starts R] [--parallel P] [--seconds S] [--seed X]

Each shape is started R times, each time with 64 greedy tokens after a prompt of 5, and once with barriers: a fault is
injected before the first step (`fault_at=1`), after which all steps have them. (`tags=0` rounds activations in another way.)
The status is 1 if a start tells of a kernel that waited too long, or of a step without barriers that failed its test, if it
fails or draws other tokens, and if no shape ran without barriers. On a CPU driver: --device cpu --tune fragments=1 --tune tags=1.
"""

import concurrent.futures
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time

import common

TOKENS = 64
NO_OVERLAP = "no step ran without barriers"
# All steps have barriers.
BARRIERS = ["fault_at=1", "retry_ms=3600000"]
MOST_SECONDS = 600


def shape(draw):
    """Returns a configuration, and the further arguments with which it is started."""
    kv = draw.choice([1, 1, 2, 4])
    heads = draw.choice([heads for heads in range(kv, 33, kv) if heads // kv <= 16])
    vocabulary = draw.randrange(200, 4001)
    change = dict(hidden_size=draw.randrange(32, 385, 32), num_attention_heads=heads, num_key_value_heads=kv,
                  head_dim=draw.choice([32, 64, 96, 128]), intermediate_size=draw.randrange(32, 513, 32),
                  num_hidden_layers=draw.randrange(1, 6), vocab_size=vocabulary,
                  tie_word_embeddings=draw.random() < 0.5, bos_token_id=1, eos_token_id=2)
    extra = []
    if draw.random() < 0.25:
        extra = ["--quantize", draw.choice(["int4", "int8"])]
    # From 1,024 hidden values on, rows of codes are multiplied by programs in PTX where a GPU takes them.
    if draw.random() < (0.5 if extra else 0.1):
        change.update(hidden_size=draw.randrange(1024, 4001, 32), intermediate_size=draw.randrange(896, 4001, 32))
    kind = draw.random()
    if kind < 0.15:
        return common.experts(**{**change, "moe_intermediate_size": draw.choice([32, 64, 96])}), extra
    if kind < 0.25:
        own = {key: change[key] for key in ("hidden_size", "vocab_size")}
        return common.hybrid(**own), [*extra, "--drafts", "0"]
    if kind < 0.35:
        return common.windows(vocab_size=vocabulary, num_hidden_layers=draw.choice([2, 4])), extra
    if kind < 0.45:
        return common.branches(**{**change, "num_hidden_layers": draw.choice([4, 6])}), extra
    if kind < 0.5:
        return common.beside(vocab_size=vocabulary, vocab_size_per_layer_input=vocabulary,
                             hidden_size=change["hidden_size"]), extra
    if kind < 0.55:
        own = {key: change[key] for key in ("hidden_size", "vocab_size", "head_dim", "num_hidden_layers")}
        return common.routed(**own), extra
    if kind < 0.7:
        # Biases of queries, keys and values, and no norms of heads.
        change.update(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    return common.dense(**change), extra


def generate(args, folder, extra, tune, vocabulary, faults=False):
    """Returns the tokens that a start draws, and what is wrong with it. `faults`: whether a fault is nothing wrong."""
    prompt = ",".join(str(token % vocabulary) for token in (5, 80, 300, 7, 120))
    command = [args.program, "generate", "--model", folder, "--tokens", prompt, "--max-tokens", str(TOKENS),
               "--ignore-eos", "--json", "--verbose", "--context", "256", *extra]
    command += ["--device", args.device] if args.device else []
    command += ["--tune", ",".join(tune)] if tune else []
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"not finished in {MOST_SECONDS} s"
    if ran.returncode != 0:
        return None, f"status {ran.returncode}: {ran.stderr.strip()[-300:]}"
    tokens = []
    for line in ran.stdout.splitlines():
        event = json.loads(line)
        if event["event"] == "delta":
            tokens += event["token_ids"]
    failed = [line for line in ran.stderr.splitlines() if "failed its test" in line]
    if failed:
        return tokens, failed[0]
    if ("waited too long" in ran.stderr) != faults:
        return tokens, NO_OVERLAP if faults else "a kernel waited too long"
    return (tokens, None) if len(tokens) == TOKENS else (tokens, f"{len(tokens)} tokens, {TOKENS} are asked for")


def check(args, number, config, extra, folder, end):
    """Returns the number of starts of a shape, and what is wrong; None and a reason if the loader refuses the shape."""
    try:
        common.checkpoint(args.program, config, folder)
    except subprocess.CalledProcessError as error:
        return None, [error.stderr.strip()[-200:]]
    vocabulary = config.get("text_config", config)["vocab_size"]
    wanted, wrong = generate(args, folder, extra, [*args.tune, *BARRIERS], vocabulary, faults=True)
    if wrong == NO_OVERLAP or wanted is None:
        return 0, [wrong]
    starts, wrongs = 0, [wrong] if wrong else []
    for _ in range(args.starts):
        if time.monotonic() > end and starts > 0:
            break
        tokens, wrong = generate(args, folder, extra, args.tune, vocabulary)
        starts += 1
        if wrong:
            wrongs.append(wrong)
        elif tokens != wanted:
            at = next(index for index, (one, other) in enumerate(zip(tokens, wanted)) if one != other)
            wrongs.append(f"token {at} is not that of the run with barriers")
    return starts, wrongs


def main():
    parser = common.arguments(__doc__)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    draw = random.Random(args.seed)
    shapes = [(number, *shape(draw)) for number in range(args.shapes)]
    lock, counts = threading.Lock(), {"shapes": 0, "starts": 0, "refused": 0, "barriers": 0, "failed": 0, "left": 0}

    def one(item):
        number, config, extra = item
        if time.monotonic() > end:
            with lock:
                counts["left"] += 1
            return
        with tempfile.TemporaryDirectory() as root:
            starts, wrongs = check(args, number, config, extra, pathlib.Path(root) / "model", end)
        with lock:
            if wrongs == [NO_OVERLAP]:
                counts["barriers"] += 1
                return
            if starts is None:
                counts["refused"] += 1
                print(f"shape {number} is refused: {wrongs[0]}", flush=True)
                return
            counts["shapes"] += 1
            counts["starts"] += starts
            if wrongs:
                counts["failed"] += 1
                print(f"shape {number} FAILED in {len(wrongs)} of {starts} starts: {sorted(set(wrongs))}\n"
                      f"  {' '.join(extra)} {json.dumps(config)}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        list(pool.map(one, shapes))
    print(f"{counts['shapes']} shapes, {counts['starts']} starts: {counts['failed']} shapes failed; "
          f"{counts['barriers']} more have barriers in all steps, "
          f"{counts['refused']} were refused by the loader, {counts['left']} not run for lack of time (seed {args.seed})")
    sys.exit(0 if counts["shapes"] > 0 and counts["failed"] == 0 else 1)


if __name__ == "__main__":
    main()
