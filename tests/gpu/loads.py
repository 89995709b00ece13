#!/usr/bin/env python3
"""Unloads and loads a small model many times, and requires the same text each time and no growing memory.

    loads.py PROGRAM [--device SEL] [--tune KEY=VALUE]... [--times N] [--steps N] [--stored TYPE]... [--validation [--known ID]...]

Each checkpoint (`--stored`: its quantised format; by default one in bfloat16 and one in AWQ) is so wide that programs in PTX
multiply its weights where a GPU takes them. A load tests its kernels, as at every start. After it one stream's text is compared;
now and then 64 streams decode together. At the end one stream decodes N steps in texts of at most 4,000. With --validation, the
Khronos validation layer is loaded, and its messages are errors, apart from those with an id of --known: installed layers do not
know all that a device can do. The status is 1 if a text differs, a load fails, the layer has a message, or the program's or the
device's memory grows.
"""

import pathlib
import subprocess
import sys
import tempfile
import time

import common

SHAPE = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 4096,
         "num_hidden_layers": 2, "tie_word_embeddings": False}
PROMPT = [token % 2000 for token in range(3, 2000, 17)]
TOKENS = 32
STREAMS = 64
LONGEST = 4000
# Memory is compared from this share of the loads on, when allocators and caches have their size.
SETTLED = 0.2
MOST_GROWTH_MIB = 64


def resident_mib(server):
    """Returns the memory of the program's process."""
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


def device_mib():
    """Returns the memory that is in use on the first GPU of NVIDIA's, or 0 where there is none."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0


def change(args, server, verb):
    """Loads or unloads the model."""
    command = [args.program, "models", "--server", server.addresses["grpc"], verb, "m"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(f"{verb}: {ran.stderr.strip()[-300:]}")


def is_wrong(args, entry):
    """Whether an entry of the log is a message of the validation layer, or of a kernel that failed its test."""
    message = entry.get("message", "")
    layer = message.startswith("Vulkan validation") and not any(known in message for known in args.known)
    return layer or "failed its test" in message


def run(args, stored, folder):
    """Returns what is wrong with the loads of a checkpoint."""
    common.checkpoint(args.program, common.dense(**SHAPE), folder, *(("--quantize", stored) if stored else ()))
    wrong, sizes, different = [], [], 0
    keys = {"slots": STREAMS, "context": LONGEST + len(PROMPT) + 8}
    with common.Server(args.program, folder, args.device, args.tune, validation=args.validation, **keys) as server:
        wanted = server.complete([PROMPT], TOKENS)
        began = time.monotonic()
        for turn in range(args.times):
            change(args, server, "unload")
            change(args, server, "load")
            different += server.complete([PROMPT], TOKENS) != wanted
            if turn % 50 == 0:
                server.complete([[*PROMPT, index] for index in range(STREAMS)], TOKENS)
            sizes.append((resident_mib(server), device_mib() if turn % 50 == 49 else 0))
        each = (time.monotonic() - began) / max(args.times, 1)
        left = args.steps
        while left > 0:
            server.complete([PROMPT], min(left, LONGEST))
            left -= LONGEST
        messages = [entry["message"] for entry in server.log if is_wrong(args, entry)]
    wrong += [f"{different} texts differ"] if different else []
    wrong += [f"{len(messages)} messages, the first: {messages[0][:300]}"] if messages else []
    settled = sizes[int(len(sizes) * SETTLED):]
    growth = "no load"
    if settled:
        resident = [size for size, _ in settled]
        device = [size for _, size in settled if size] or [0]
        growth = f"memory {resident[0]} to {resident[-1]} MiB, device {device[0]} to {device[-1]} MiB"
        if resident[-1] - resident[0] > MOST_GROWTH_MIB or device[-1] - device[0] > MOST_GROWTH_MIB:
            wrong.append("memory grows")
    print(f"{stored or 'bfloat16'}: {args.times} loads of {each:.3f} s, {args.steps} steps, {growth}: {'; '.join(wrong) or 'ok'}",
          flush=True)
    return wrong


def main():
    parser = common.arguments(__doc__)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--stored", action="append")
    parser.add_argument("--validation", action="store_true")
    parser.add_argument("--known", action="append", default=[])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        wrong = [run(args, stored, pathlib.Path(root) / f"model{index}")
                 for index, stored in enumerate(args.stored or ["", "awq"])]
    sys.exit(any(wrong))


if __name__ == "__main__":
    main()
