#!/usr/bin/env python3
"""Injects faults into every call of steps without barriers that waits for another call, and compares the texts with
undisturbed ones.

    faults.py PROGRAM [--device SEL]... [--tune KEY=VALUE]... [--seconds S] [--only NAME]... [--streams N]... [--steps N]
              [CONFIG.json ...]

Several devices share the layers of each model. Models are small ones of random weights of each kind, or those of the given
configurations; "wide" ones have quantised weights and enough columns for the programs in PTX of a few rows, and do not run on CPU
drivers alone. Each is served undisturbed, twice, and then with a fault in every EVERY-th step (`broken_calls=1`), with one stream
and with eight. A model ends when each call has been broken in N different steps of a text (40), or its share of S seconds is
over. The status is 1 if a text differs from the undisturbed one, or a call was broken in fewer steps. On a CPU driver:
--device cpu --tune fragments=1 --tune tags=1, for constrained rows also --tune gates=1.

Two kinds of models have steps of other kinds in their texts:
- "drafts": steps that verify drafts alternate with decode steps. Both fault, and each call of the decode steps has its turn.
  Steps that fault, or wait behind one that does, are run again without drafts. Such steps round differently, so the texts are
  ones whose tokens no rounding changes (`steady`), and the undisturbed texts are those without drafts. One stream only: a batch
  of more than four sequences does not draft. The last column has the number of plans with drafts that were run again behind a
  fault, and the share of drafts that were accepted. "always drafts": only the last tokens of a text are drawn without drafts, and
  each call of the steps that verify drafts has its turn.
- "constrained": all rows follow a regular expression. Each step waits for the masks of its rows and is a plan of its own.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import common

# The numbers of tokens of the texts, in turn. They differ, so that a call's turn comes at other tokens in each text.
LENGTHS = range(150, 171)
STREAMS = 8
# While the chunks of a first prompt are computed, the others arrive, so that they join in one plan. A CPU driver takes long
# enough for a few small chunks.
CHUNK, CHUNKS = 4096, 10
CPU_CHUNK, CPU_CHUNKS = 64, 2
# Seconds from the first prompt to the others, in turn.
PAUSES = (0.01, 0.02, 0.005, 0.03)
# The steps of a plan behind its first fault run again with barriers. With a large number, every step of a plan has its turn.
EVERY = 29
TRIES = 40
# Undisturbed texts before those that are compared.
WARM = 6
# With drafts. Of a text that always drafts, the last tokens are drawn without; they are others in texts of other lengths.
DRAFT_LENGTHS = range(24, 46)
DRAFTS = 2
# A text is steady if at each token the logits of the two most likely ones are this far apart, and drafts change their
# distance by at most a third of it.
MARGIN = 0.035
MOVED = 1 / 3
# The number of different tokens in a steady text of the longest length: many random models soon repeat one token for ever.
VARIETY = 10
CANDIDATES = 1500
KEPT = 8
# Each step depends on those before it: the mask of a token shows which tokens were drawn.
REGEX = "([a-z]{2,8} )+"


@dataclasses.dataclass
class Model:
    """A model, the keys of its configuration and of its requests, how often a step faults, and the format in which `synth`
    stores it."""

    config: dict
    keys: dict = dataclasses.field(default_factory=dict)
    request: dict = dataclasses.field(default_factory=dict)
    every: int = EVERY
    stored: str | None = None

    @property
    def options(self):
        return ("--quantize", self.stored) if self.stored else ()

    @property
    def sorts_batches(self):
        """Whether its steps of STREAMS rows have barriers: experts that the start quantises, which are too narrow here for programs in PTX."""
        config = self.config.get("text_config", self.config)
        coded = self.keys.get("quantize")
        return bool(coded) and any(key in config for key in ("num_experts", "n_routed_experts"))

    @property
    def drafts(self):
        return self.keys.get("drafts", 0)


# So wide that programs in PTX multiply weights of codes.
WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192,
        "num_hidden_layers": 2, "tie_word_embeddings": False}
WIDE_EXPERTS = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts_per_tok": 6}

MODELS = {
    "dense": Model(common.dense()),
    "dense, five layers": Model(common.dense(num_hidden_layers=5, hidden_size=256, tie_word_embeddings=False)),
    # Workgroups of their own combine the parts of a row's attention.
    "dense, one KV head": Model(common.dense(num_attention_heads=8, num_key_value_heads=1, head_dim=128, hidden_size=256)),
    "experts": Model(common.experts()),
    "hybrid": Model(common.hybrid()),
    # Layers on either side of a split have several attention layers.
    "hybrid, 16 layers": Model(common.hybrid(num_hidden_layers=16)),
    "windows": Model(common.windows()),
    "norms behind": Model(common.branches()),
    "experts beside": Model(common.beside()),
    "routed experts": Model(common.routed()),
    "int8": Model(common.dense(), {"quantize": "int8"}),
    "int4": Model(common.dense(), {"quantize": "int4"}),
    "experts, int4": Model(common.experts(), {"quantize": "int4"}),
    "routed experts, int4": Model(common.routed(), {"quantize": "int4"}),
    "hybrid, int4": Model(common.hybrid(), {"quantize": "int4"}),
    "wide, AWQ": Model(common.dense(**WIDE), stored="awq"),
    "wide, FP8 in blocks": Model(common.dense(**WIDE), stored="fp8-block"),
    "wide experts, AWQ": Model(common.experts(**WIDE_EXPERTS, num_experts=32), stored="awq"),
    "wide experts, MXFP4": Model(common.experts(**WIDE_EXPERTS, num_experts=32), stored="mxfp4"),
    "wide routed experts, AWQ": Model(common.routed(**WIDE_EXPERTS, n_routed_experts=32), stored="awq"),
    "wide hybrid, AWQ": Model(common.hybrid(**WIDE_EXPERTS, num_experts=32), stored="awq"),
    # Without tied embeddings: with them, the text of a model of few layers is one token.
    "dense, drafts": Model(common.dense(tie_word_embeddings=False), {"draft": "lookup", "drafts": DRAFTS}),
    "dense, always drafts": Model(common.dense(tie_word_embeddings=False),
                                  {"draft": "lookup", "drafts": DRAFTS, "drafts_always": True}, every=5),
    "hybrid, drafts": Model(common.hybrid(mtp_num_hidden_layers=1), {"drafts": DRAFTS}),
    "hybrid, always drafts": Model(common.hybrid(mtp_num_hidden_layers=1), {"drafts": DRAFTS, "drafts_always": True}, every=5),
    # A plan has one step, so a fault has no others run with barriers.
    "dense, constrained": Model(common.dense(tie_word_embeddings=False), request={"structured_outputs": {"regex": REGEX}},
                                every=11),
}


def prompt(index):
    """Returns a prompt of 300 tokens: enough pages that several workgroups share a row's attention."""
    return [token + index for token in (5, 80, 300, 7, 1200)] * 60


class Batches:
    """Texts of a server whose batches and prompt steps are the same in every run, because rounding depends on the number of
    rows."""

    def __init__(self, server, streams, first, request, ends=None):
        self.server, self.streams, self.first, self.request, self.turn = server, streams, first, request, 0
        # The length of the server's log before the last texts.
        self.began = 0
        # The numbers of tokens and of rows that draw of the prompt step in which the prompts end; None: those of the next run.
        self.ends = ends

    def texts(self, tokens):
        """Returns the texts of all streams, each of this number of tokens."""
        prompts = [prompt(index) for index in range(self.streams)]
        self.began = len(self.server.log)
        if self.streams == 1:
            return self.server.complete(prompts, tokens, **self.request)
        seen = set()
        for _ in range(TRIES):
            self.turn += 1
            self.began = len(self.server.log)
            records = self.server.steps(0)
            following = records[-1]["number"] + 1 if records else 0
            # Another first prompt each time, so that none is found in the prefix cache.
            first = threading.Thread(target=self.server.complete, args=([[100 + self.turn % 1900] * self.first], 1))
            first.start()
            time.sleep(PAUSES[self.turn % len(PAUSES)])
            texts = self.server.complete(prompts, tokens, **self.request)
            first.join()
            time.sleep(0.01)
            steps = self.server.steps(following)
            rows = [step["rows"] for step in steps if step["phase"] == "decode"]
            ends = [(step["rows"], step["tokens"]) for step in steps if step["phase"] != "decode"][-1:]
            # Other steps have other numbers of rows if the prompts did not join, or if the scheduler tried smaller batches.
            if set(rows) == {self.streams} and (self.ends or ends) == ends:
                self.ends = ends
                return texts
            seen.add((*sorted(set(rows)), *ends))
        raise RuntimeError(f"{self.streams} prompts never ran in one plan, but in steps of {sorted(seen, key=str)} rows")


class Drafted:
    """Texts of one stream with drafts, which may have other plans in each run because rounding changes none of their tokens."""

    def __init__(self, server, prompt_ids):
        self.server, self.prompt = server, prompt_ids
        self.began = 0

    def texts(self, tokens):
        """Returns the text, as a list, of this number of tokens."""
        self.began = len(self.server.log)
        return self.server.complete([self.prompt], tokens)

    def behind(self):
        """Returns the number of plans with drafts that were run again behind a fault."""
        told = "a plan that verifies drafts was queued behind a faulted step"
        return sum(entry.get("message") == told for entry in self.server.log)

    def accepted(self):
        """Returns the share of drafts that were accepted."""
        with urllib.request.urlopen(f"http://{self.server.addresses['admin']}/api/state", timeout=60) as answer:
            replica = json.load(answer)["models"][0]["replicas"][0]
        return replica["accepted_tokens"] / max(replica["drafted_tokens"], 1)


def gaps(server, prompt_ids, tokens):
    """Returns by how much each token of a text is more likely than the second one (of logarithms), and the number of
    different tokens."""
    body = {"model": "m", "prompt": prompt_ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    request = urllib.request.Request(f"http://{server.addresses['http']}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        logprobs = json.load(answer)["choices"][0]["logprobs"]
    likely = [sorted(top.values()) for top in logprobs["top_logprobs"]]
    # Two tokens of the same text have one entry.
    return [top[-1] - top[-2] if len(top) > 1 else 0 for top in likely], len(set(logprobs["tokens"]))


def apart(server, tokens):
    """Returns prompts in whose texts no two tokens are almost equally likely, with their gaps."""
    kept = []
    for index in range(CANDIDATES):
        found, different = gaps(server, prompt(index), tokens)
        if min(found) >= MARGIN and different >= VARIETY:
            kept.append((prompt(index), found))
        if len(kept) == KEPT:
            break
    return kept


def steady(server, candidates):
    """Returns that of the prompts whose texts' gaps drafts move least, and by which share of the gap at most."""
    shares = []
    for found, plain in candidates:
        moved = [abs(one - other) / one for one, other in zip(plain, gaps(server, found, len(plain))[0], strict=True)]
        shares.append((max(moved), found))
    share, found = min(shares, default=(1, None))
    return found, share


def undisturbed(args, model, streams, folder, keys, first):
    """Returns the undisturbed texts by their numbers of tokens, a function that returns the texts of a server, and what speaks
    against the texts ("" if nothing does)."""
    if model.drafts:
        plain = {**keys, "drafts": 0, "drafts_always": False}
        with common.Server(args.program, folder, args.device, args.tune, **plain) as server:
            candidates = apart(server, DRAFT_LENGTHS[-1])
            texts = [{tokens: server.complete([ids], tokens) for tokens in DRAFT_LENGTHS} for ids, _ in candidates]
        with common.Server(args.program, folder, args.device, args.tune, **{**keys, "drafts_always": True}) as server:
            found, share = steady(server, candidates)
            if share > MOVED:
                return {}, None, f"of {len(candidates)} texts none is steady: drafts move a gap by {share:.2f} of it"
        wanted = texts[[ids for ids, _ in candidates].index(found)]
        with common.Server(args.program, folder, args.device, args.tune, **keys) as server:
            batches = Drafted(server, found)
            same = all(batches.texts(tokens) == wanted[tokens] for _ in range(2) for tokens in DRAFT_LENGTHS)
        return wanted, lambda server: Drafted(server, found), "" if same else "undisturbed texts differ"
    with common.Server(args.program, folder, args.device, args.tune, **keys) as server:
        batches = Batches(server, streams, first, model.request)
        # The first steps are planned before their speed is known. How the prompts usually end, they will end again.
        usual = []
        for _ in range(WARM):
            batches.ends = None
            batches.texts(LENGTHS[0])
            usual.append(batches.ends)
        batches.ends = max(usual[1:], key=usual[1:].count)
        wanted = {tokens: batches.texts(tokens) for tokens in LENGTHS}
        same = all(batches.texts(tokens) == texts for tokens, texts in wanted.items())
    ends = batches.ends
    return wanted, lambda server: Batches(server, streams, first, model.request, ends), "" if same else "undisturbed texts differ"


def run(args, name, model, streams, folder, end):
    """Returns the row of the table for a model, and whether it is good."""
    chunk, chunks = (CPU_CHUNK, CPU_CHUNKS) if args.device == ["cpu"] else (CHUNK, CHUNKS)
    first = chunk * chunks + 8
    # The first prompt has a slot as well.
    keys = {"slots": STREAMS + 1, "context": max(first + 8, 512), "drafts": 0, "prefill_chunk": chunk, **model.keys}
    wanted, make, why = undisturbed(args, model, streams, folder, keys, first)
    if why:
        return (name, streams, 0, 0, 0, 0, 0, why), False
    # A split model divides a batch among its devices.
    rows = -(-streams // len(args.device or [""]))
    # The drafts of each step whose calls are broken in turn. On several devices, steps that verify drafts have barriers.
    drafts = model.drafts if model.keys.get("drafts_always") and len(args.device or []) < 2 else 0
    kind = (rows * (drafts + 1), drafts)
    tune = [*args.tune, "broken_calls=1", f"broken_every={model.every}", "retry_ms=0"]
    texts = different = 0
    notes = []
    with common.Server(args.program, folder, args.device, tune, **keys) as server:
        batches = make(server)
        told = [entry["message"] for entry in server.log if "are broken in turn" in entry.get("message", "")]
        failed = [entry["message"] for entry in server.log if "failed its test" in entry.get("message", "")]
        numbers = [re.search(r"(\d+) waits of steps of (\d+) rows(?: with (\d+) drafts)?", line) for line in told]
        # Each stage of a split model tells its own.
        waits = sum(int(of[1]) for of in numbers if (int(of[2]), int(of[3] or 0)) == kind)
        if streams == 1 and not model.drafts:
            # As in the undisturbed texts, the prompt is found in the prefix cache; computed as a whole it rounds differently.
            batches.texts(LENGTHS[0])
        steps, faults, seen = {}, 0, 0
        for tokens in itertools.cycle(wanted):
            if time.monotonic() > end:
                break
            found = batches.texts(tokens)
            texts += len(found)
            different += sum(one != other for one, other in zip(found, wanted[tokens], strict=True))
            # Faults of texts that were not compared do not count.
            for entry in server.log[max(seen, batches.began):]:
                if entry.get("message") == "a test has broken this call" and (entry["rows"], entry["drafts"]) == kind:
                    # The parts of a weight are calls with one name.
                    steps.setdefault((entry["wait"], entry["call"], entry["tag"]), set()).add(entry["token"])
                    faults += 1
            seen = len(server.log)
            if len(steps) == waits > 0 and min(map(len, steps.values())) >= args.steps:
                break
        if model.drafts:
            notes.append(f"{batches.behind()} plans with drafts behind faults, {batches.accepted():.2f} accepted")
    least, most = (min(map(len, steps.values())), max(map(len, steps.values()))) if steps else (0, 0)
    least = least if len(steps) == waits else 0
    why = "; ".join(filter(None, [
        "" if waits else f"no step of {kind[0]} rows with {drafts} drafts without barriers", *failed[:1],
        f"{different} texts differ" if different else "",
        "" if least >= args.steps else f"broken in {least} steps, {args.steps} are asked for",
    ]))
    return (name, streams, waits, faults, least, most, texts, "; ".join([why or "ok", *notes]), different), not why


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("configs", nargs="*", type=pathlib.Path)
    parser.add_argument("--device", action="append")
    parser.add_argument("--tune", action="append", default=[])
    parser.add_argument("--only", action="append", choices=sorted(MODELS))
    parser.add_argument("--streams", action="append", type=int, choices=(1, STREAMS))
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    # A CPU driver multiplies wide models too slowly.
    on_cpu = bool(args.device) and all(device == "cpu" for device in args.device)
    chosen = args.only or [name for name, model in MODELS.items() if not (on_cpu and model.stored)]
    models = {name: MODELS[name] for name in MODELS if name in chosen}
    if args.configs:
        models = {path.stem: Model(json.loads(path.read_text())) for path in args.configs}
    runs = [(name, streams) for name, model in models.items() for streams in args.streams or (1, STREAMS)
            if streams == 1 or not model.drafts and not model.sorts_batches]
    began, good = time.monotonic(), True
    print(f"{'model':24} {'streams':>7} {'calls':>6} {'faults':>7} {'steps a call':>13} {'texts':>6} {'different':>9}  result")
    with tempfile.TemporaryDirectory() as root:
        folders = {}
        for index, (name, streams) in enumerate(runs):
            model = models[name]
            left = args.seconds - (time.monotonic() - began)
            end = time.monotonic() + max(left, 1) / (len(runs) - index)
            try:
                if name not in folders:
                    folders[name] = pathlib.Path(root) / f"model{index}"
                    common.checkpoint(args.program, model.config, folders[name], *model.options)
                row, fine = run(args, name, model, streams, folders[name], end)
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                row, fine = (name, streams, 0, 0, 0, 0, 0, str(getattr(error, "stderr", None) or error).strip()), False
            name, streams, waits, faults, least, most, texts, result, *rest = row
            print(f"{name:24} {streams:7} {waits:6} {faults:7} {f'{least} to {most}':>13} {texts:6} "
                  f"{rest[0] if rest else 0:9}  {result}", flush=True)
            good &= fine
    print("all texts are the undisturbed ones" if good else "FAILED")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
