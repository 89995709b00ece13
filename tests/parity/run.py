#!/usr/bin/env python3
"""Compares Ostinato with Hugging Face transformers at real model sizes, on a machine with a GPU.

For each architecture: `ostinato synth` writes a random bfloat16 checkpoint, `ostinato generate` continues a random
prompt greedily (once per variant), and transformers computes the reference with the same weights in float32 (TF32 off):

  teacher-forced  one forward pass over the prompt and Ostinato's own tokens: for each step, the relative error
                  ||ours - reference|| / ||reference|| over the vocabulary, and whether the token is the reference's
                  argmax. Every mismatch is printed with the reference's gap between the two tokens. It counts as a tie
                  only if the gap is within 6 times the step's root-mean-square error (about 4 standard deviations of
                  the difference of two logits); an error above the limit is replaced by the limit for this test.
  free-running    the reference's own greedy continuation, and the first index at which the two outputs differ.

For a multimodal model only the text model is compared. Mixtures of experts run their experts one after the other. If
the float32 weights would fill the device (or with --upcast), the reference keeps them in bfloat16 as stored and widens
those of each layer while the layer runs. The results are the same, because every bfloat16 value is a float32 value.
`--layers N` compares models of the real widths with fewer layers. If a random router's margin between its last selected
expert and the next one is small, rounding may change the selection: column `route` is the smallest such margin over all
steps and layers, in standard deviations of that router's logits.

The commands of `ostinato` that are used:
  synth --arch NAME --out DIR [--layers N]
  generate --model DIR --tokens 1,2,3 --max-tokens N --temperature 0 --json --dump-logits FILE [--device SEL] [EXTRA]
     stdout has one JSON event per line; the generated ids are the `token_ids` of the `delta` events;
     FILE is a safetensors file with `logits` f32 [steps, vocab], the logits from which each generated token was taken.

Exit status: 0 if all results are within the limit, 1 if some are not, 2 if a command or the setup failed.
"""

import argparse
import gc
import json
import math
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import threading
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Failed(Exception):
    """A command failed or printed unusable output, so the comparison is not possible."""


class Clock:
    """Measures the seconds spent in each part, in order of first occurrence."""

    def __init__(self):
        self.parts = {}

    def __call__(self, name):
        return Part(self, name)


class Part:
    def __init__(self, clock, name):
        self.clock, self.name = clock, name

    def __enter__(self):
        self.start = time.time()

    def __exit__(self, *_):
        self.clock.parts[self.name] = self.clock.parts.get(self.name, 0.0) + time.time() - self.start


def command(line, timeout):
    """Runs a program and returns its stdout. Raises Failed with the end of its output on an error."""
    print("+ " + " ".join(shlex.quote(x if len(x) < 200 else x[:60] + "…") for x in line), flush=True)
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise Failed(f"{line[1]} took more than {timeout} s")
    except OSError as e:
        raise Failed(f"cannot run {line[0]}: {e}")
    if done.returncode != 0:
        raise Failed(f"{line[1]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def tokens_of(stdout):
    """Returns the token ids of all `delta` events; `stdout` has one JSON object per line."""
    tokens, finished = [], False
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == "delta":
            tokens += event["token_ids"]
        finished = finished or (isinstance(event, dict) and event.get("event") == "finished")
    if not finished:
        raise Failed(f"no `finished` event on stdout:\n{stdout[-1000:]}")
    return tokens


class Background(threading.Thread):
    """Imports torch and transformers, which takes seconds, while Ostinato runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.error, self.seconds = None, 0.0
        self.start()

    def run(self):
        start = time.time()
        try:
            import torch
            import transformers
            from transformers import AutoModelForCausalLM  # noqa: F401 (lazily loaded modules)
            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
            torch.set_float32_matmul_precision("highest")
        except Exception as e:  # reported by wait(), in the main thread
            self.error = e
        self.seconds = time.time() - start

    def wait(self):
        self.join()
        if self.error is not None:
            raise Failed(f"cannot import the reference: {self.error}")


def module_name(name):
    """Returns the name that transformers gives a tensor of a checkpoint, and which expert's part of it the tensor is
    (or None). Returns None for a tensor that is not part of the text model."""
    if name.startswith(("mtp.", "model.mtp.", "model.visual.")):
        return None
    name = name.replace("model.language_model.", "model.")
    before, found, after = name.partition(".experts.")
    if not found or not after[0].isdigit():
        return name, None
    expert, projection, _ = after.split(".")
    fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
    return f"{before}.experts.{fused}", (int(expert), projection)


class Reference:
    """The checkpoint in transformers, in float32. Forward passes are cached by text, so that variants with equal tokens
    share one."""

    def __init__(self, folder, device, upcast):
        import torch
        from safetensors import safe_open
        from transformers import AutoConfig, AutoModelForCausalLM
        self.torch, self.device, self.passes, self.texts, self.margins = torch, device, {}, {}, {}
        self.config = config = AutoConfig.from_pretrained(folder).get_text_config()
        if hasattr(config, "num_experts"):
            config._experts_implementation = "eager"
        files = sorted(pathlib.Path(folder).glob("model*.safetensors"))
        if upcast is None:
            stored = sum(file.stat().st_size for file in files)
            upcast = device.startswith("cuda") and 2 * stored > 0.8 * torch.cuda.mem_get_info()[0]
        # The model is created on the device with arbitrary weights and then filled shard by shard, so that host memory
        # never holds a float32 copy.
        previous = torch.get_default_dtype()
        try:
            with torch.device(device):
                self.model = AutoModelForCausalLM.from_config(
                    config, dtype=torch.bfloat16 if upcast else torch.float32, attn_implementation="eager").eval()
        finally:
            torch.set_default_dtype(previous)
        self.model.tie_weights()
        want = dict(self.model.named_parameters(remove_duplicate=False))
        missing, experts = set(want), {}
        for file in files:
            with safe_open(file, framework="pt", device=device) as tensors:
                for name in tensors.keys():
                    found = module_name(name)
                    if found is None:
                        continue
                    target, part = found
                    if target not in want:
                        raise Failed(f"{file.name}: {name} is no tensor of {config.architectures or config.model_type}")
                    with torch.no_grad():
                        value, place = tensors.get_tensor(name), want[target]
                        if part is not None:
                            expert, projection = part
                            place = place[expert]
                            if projection != "down_proj":
                                place = place.chunk(2)[projection == "up_proj"]
                            experts.setdefault(target, set()).add(part)
                        if value.shape != place.shape:
                            raise Failed(f"{name} is {list(value.shape)}, the model has {list(place.shape)}")
                        place.copy_(value)
                    missing.discard(target)
        for target, parts in experts.items():
            expected = want[target].shape[0] * (1 if target.endswith("down_proj") else 2)
            if len(parts) != expected:
                raise Failed(f"{target}: {len(parts)} of {expected} parts are there")
        if config.tie_word_embeddings:
            missing.discard("lm_head.weight")
        if missing:
            raise Failed(f"{folder} lacks {sorted(missing)[:5]} ({len(missing)} in all)")
        if upcast:
            self.widen()
        self.routers = [m for m in self.model.modules() if type(m).__name__.endswith("TopKRouter")]

    def widen(self):
        """Keeps weights in bfloat16, except those of the layer that runs. Rotary frequencies are already float32."""
        torch, kept = self.torch, {}

        def before(module, *_):
            if next(module.parameters()).dtype == torch.bfloat16 and not self.narrow:
                kept[module] = [(p, p.data) for p in module.parameters()]
                for p, data in kept[module]:
                    p.data = data.float()

        def after(module, *_):
            for p, data in kept.pop(module, []):
                p.data = data

        self.narrow = False
        body = self.model.model
        for module in [body.embed_tokens, *body.layers, body.norm, self.model.lm_head]:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)

    def margin(self, prompt, tokens):
        """Returns for every step the smallest margin of any router at its position; None if there are no routers."""
        return self.margins.get((tuple(prompt), tuple(tokens)))

    def forced(self, prompt, tokens):
        key = (tuple(prompt), tuple(tokens))
        if key not in self.passes:
            torch, least = self.torch, []

            def look(router, _, result):
                count = router.num_experts if hasattr(router, "num_experts") else self.config.num_experts
                chosen = router.top_k if hasattr(router, "top_k") else self.config.num_experts_per_tok
                logits = next(r for r in result if r.shape[-1] == count)[-len(tokens):].float()
                if chosen < count:
                    best = logits.sort(dim=-1, descending=True).values
                    least.append((best[:, chosen - 1] - best[:, chosen]) / logits.std(dim=-1))

            hooks = [router.register_forward_hook(look) for router in self.routers]
            with torch.no_grad():
                ids = torch.tensor([prompt + tokens[:-1]], device=self.device)
                out = self.model(input_ids=ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
            for hook in hooks:
                hook.remove()
            self.passes[key] = out
            if least:
                self.margins[key] = torch.stack(least).min(dim=0).values.tolist()
        return self.passes[key]

    def free(self, prompt, steps):
        key = (tuple(prompt), steps)
        if key not in self.texts:
            from transformers.cache_utils import DynamicCache
            torch, cache, out = self.torch, DynamicCache(config=self.config), []
            ids = torch.tensor([prompt], device=self.device)
            with torch.no_grad():
                for _ in range(steps):
                    logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                    ids = logits[:, -1].argmax(-1, keepdim=True)
                    out.append(ids)
            self.texts[key] = torch.cat(out).flatten().tolist()
        return self.texts[key]

    def in_bf16(self, texts):
        """Returns the logits of the same passes computed by transformers in bfloat16. The model is bfloat16
        afterwards."""
        torch = self.torch
        buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        f32, self.passes = self.passes, {}
        self.narrow = True
        self.model.to(torch.bfloat16)
        for name, buffer in self.model.named_buffers():
            buffer.data = buffers[name]  # from_pretrained leaves the rotary frequencies in float32 too
        for prompt, tokens in texts:
            self.forced(prompt, tokens)
        bf16, self.passes = self.passes, f32
        return bf16


def compare(torch, logits, tokens, ref, limit):
    """Returns the results of one variant. `logits` are ours, `ref` the reference's, both [steps, vocab]."""
    difference = logits - ref
    relative = difference.norm(dim=-1) / ref.norm(dim=-1)
    centred = difference.norm(dim=-1) / (ref - ref.mean(dim=-1, keepdim=True)).norm(dim=-1)
    rms = difference.norm(dim=-1) / math.sqrt(ref.shape[-1])
    # The error counts up to the limit only, so that a large error does not turn mismatches into ties.
    close = 6 * torch.minimum(rms, limit * ref.norm(dim=-1) / math.sqrt(ref.shape[-1]))
    top = ref.topk(2, dim=-1)
    gap = top.values[:, 0] - top.values[:, 1]
    best = top.indices[:, 0].tolist()
    own = logits.max(dim=-1).values
    mismatches = []
    for step, (token, wanted) in enumerate(zip(tokens, best)):
        if token == wanted:
            continue
        between = (ref[step, wanted] - ref[step, token]).item()
        mismatches.append({
            "step": step, "ours": token, "reference": wanted,
            "reference_top2_gap": gap[step].item(), "reference_gap_between": between,
            "our_logit_of_ours": logits[step, token].item(), "our_logit_of_reference": logits[step, wanted].item(),
            "rms_error": rms[step].item(), "tie": between <= close[step].item(),
        })
    unlike = [s for s, t in enumerate(tokens) if logits[s, t].item() < own[s].item()]
    finite = bool(torch.isfinite(logits).all())
    worst = relative.max().item()
    problems = []
    if not finite:
        problems.append("logits hold values that are not finite")
    if not worst <= limit:
        problems.append(f"logit error {worst:.2e} at step {int(relative.argmax())} is over {limit:.0e}")
    if unlike:
        problems.append(f"tokens at steps {unlike[:8]} are not the best of the dumped logits")
    wrong = [m["step"] for m in mismatches if not m["tie"]]
    if wrong:
        problems.append(f"tokens at steps {wrong[:8]} differ where the reference is sure")
    return {
        "steps": len(tokens), "equal": len(tokens) - len(mismatches), "ties": len(mismatches) - len(wrong),
        "error_max": worst, "error_median": relative.median().item(), "error_centred_max": centred.max().item(),
        "error_first": relative[0].item(), "error_rest_max": relative[1:].max().item() if len(tokens) > 1 else None,
        "error_per_step": [float(f"{x:.4g}") for x in relative.tolist()],
        "reference_gap_median_over_std": (gap / ref.std(dim=-1)).median().item(),
        "distinct_tokens": len(set(tokens)), "mismatches": mismatches, "problems": problems,
    }


def short(x):
    return "-" if x is None or x != x else f"{x:.1e}"


def prompt_for(config, length, seed):
    import numpy
    text = config.get("text_config", config)
    return numpy.random.RandomState(seed + length).randint(0, text["vocab_size"], length).tolist()


def eos_of(folder):
    out = set()
    for file in ("config.json", "generation_config.json"):
        path = pathlib.Path(folder) / file
        if path.exists():
            eos = json.loads(path.read_text()).get("eos_token_id")
            out |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    return out


def judge(args, name, folder, variants, clock, background):
    """Returns the results of all variants and prompt lengths of one checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    runs, broken = [], []
    for length in args.prompt_lens:
        prompt = prompt_for(config, length, args.seed)
        for variant, extra in variants:
            dump = args.work / f"logits-{os.getpid()}-{len(runs) + len(broken)}.safetensors"
            line = [args.ostinato, "generate", "--model", str(folder), "--tokens", ",".join(map(str, prompt)),
                    "--max-tokens", str(args.tokens), "--temperature", "0", "--json", "--dump-logits", str(dump)]
            line += (["--device", args.device] if args.device else []) + extra
            entry = {"arch": name, "variant": variant, "prompt_len": length, "extra": extra}
            start = time.time()
            try:
                with clock(f"{name}: generate {variant}"):
                    tokens = tokens_of(command(line, args.timeout))
                if not tokens:
                    raise Failed("no token was generated")
                if not dump.exists():
                    raise Failed(f"{dump.name} was not written")
                runs.append((entry, prompt, tokens, dump))
            except Failed as e:
                print(f"{name} {variant}: {e}", flush=True)
                broken.append({**entry, "failed": str(e), "problems": [str(e).splitlines()[0]]})
            entry["generate_s"] = round(time.time() - start, 2)
    results = list(broken)
    if not runs:
        return results
    with clock("import transformers (waited)"):
        background.wait()
    import torch
    from safetensors.torch import load_file
    device = args.torch_device
    with clock(f"{name}: load reference"):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        reference = Reference(folder, device, args.upcast)
    eos = eos_of(folder)
    texts = []
    for entry, prompt, tokens, dump in runs:
        try:
            with clock(f"{name}: compare"):
                logits = load_file(dump, device=device)["logits"].float()
                dump.unlink()
                vocab = config.get("text_config", config)["vocab_size"]
                if list(logits.shape) != [len(tokens), vocab]:
                    raise Failed(f"logits are {list(logits.shape)}, not {[len(tokens), vocab]}")
                if not all(0 <= t < vocab for t in tokens):
                    raise Failed(f"a token is outside the vocabulary of {vocab}")
                ref = reference.forced(prompt, tokens)
                result = {**entry, **compare(torch, logits, tokens, ref, args.limit), "tokens": tokens}
                margins = reference.margin(prompt, tokens)
                if margins is not None:
                    result["route_margin_per_step"] = [float(f"{x:.3g}") for x in margins]
                texts.append((prompt, tokens, result))
            if len(tokens) < args.tokens and tokens[-1] not in eos:
                result["problems"].append(f"{len(tokens)} tokens instead of {args.tokens}, and no end of sequence")
            if args.free_run:
                with clock(f"{name}: free run"):
                    free = reference.free(prompt, args.tokens)[:len(tokens)]
                result["diverges_at"] = next((i for i, (a, b) in enumerate(zip(tokens, free)) if a != b), None)
            else:
                # Up to this index both continue the same text, so it is the same index except for the reference's own
                # rounding.
                result["diverges_at"] = result["mismatches"][0]["step"] if result["mismatches"] else None
            results.append(result)
        except Failed as e:
            results.append({**entry, "failed": str(e), "problems": [str(e)]})
    if args.bf16:
        with clock(f"{name}: reference in bf16"):
            passes = reference.in_bf16([(p, t) for p, t, _ in texts])
            for prompt, tokens, result in texts:
                ref = reference.passes[(tuple(prompt), tuple(tokens))]
                low = passes[(tuple(prompt), tuple(tokens))]
                relative = (low - ref).norm(dim=-1) / ref.norm(dim=-1)
                result["hf_bf16_error_max"] = relative.max().item()
                result["hf_bf16_error_median"] = relative.median().item()
                result["hf_bf16_equal"] = int((low.argmax(-1) == ref.argmax(-1)).sum())
            del passes
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"{name}: reference peak {peak:.1f} GiB on {torch.cuda.get_device_name()}", flush=True)
    del reference
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return results


def table(results):
    head = ["architecture", "variant", "prompt", "equal", "ties", "err max", "err median", "hf bf16", "route", "parts at", "verdict"]
    rows = [head]
    for r in results:
        verdict = "; ".join(r["problems"]) or "ok"
        if "failed" in r:
            rows.append([r["arch"], r["variant"], str(r["prompt_len"]), *["-"] * 7, verdict])
            continue
        rows.append([r["arch"], r["variant"], str(r["prompt_len"]), f"{r['equal']}/{r['steps']}", str(r["ties"]),
                     short(r["error_max"]), short(r["error_median"]), short(r.get("hf_bf16_error_max")),
                     short(min(r["route_margin_per_step"])) if "route_margin_per_step" in r else "-",
                     "never" if r["diverges_at"] is None else str(r["diverges_at"]), verdict])
    width = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, width)) + "  " + row[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ostinato", required=True, help="the program")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--arch", help="one architecture that `synth` knows")
    what.add_argument("--archs", help="several, separated by commas")
    what.add_argument("--model", help="an existing checkpoint instead of a synthetic one; it is kept")
    parser.add_argument("--work", required=True, type=pathlib.Path, help="folder for checkpoints and dumps")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-len", default="100", help="one length, or several separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt")
    parser.add_argument("--device", help="passed on to `ostinato generate`")
    parser.add_argument("--variant", action="append", default=[], metavar="'NAME:EXTRA ARGS'",
                        help="may be repeated; without it one variant `default` with no extra arguments")
    parser.add_argument("--layers", type=int, help="as many layers of the architectures' widths, not all")
    parser.add_argument("--upcast", action="store_true", default=None,
                        help="the reference keeps its weights in bfloat16 and widens each layer's while it runs")
    parser.add_argument("--synth-args", default="", help="extra arguments for `ostinato synth`")
    parser.add_argument("--limit", type=float, default=2e-3, help="largest relative logit error allowed at any step")
    parser.add_argument("--torch-device", default="cuda")
    parser.add_argument("--no-free-run", dest="free_run", action="store_false", help="derive the parting point instead")
    parser.add_argument("--bf16", action="store_true", help="also measure transformers' own bfloat16 error, to compare")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one command")
    parser.add_argument("--keep", action="store_true", help="keep the synthetic checkpoints")
    parser.add_argument("--out", type=pathlib.Path, help="JSON with everything")
    args = parser.parse_args()
    args.prompt_lens = [int(x) for x in args.prompt_len.split(",")]
    variants = []
    for text in args.variant or ["default:"]:
        name, _, extra = text.partition(":")
        variants.append((name, shlex.split(extra)))
    args.work.mkdir(parents=True, exist_ok=True)
    background, clock, results, began = Background(), Clock(), [], time.time()

    def save():
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"limit": args.limit, "results": results, "seconds": clock.parts}, indent=1))

    for name in [pathlib.Path(args.model).name] if args.model else (args.archs or args.arch).split(","):
        folder = pathlib.Path(args.model) if args.model else args.work / f"{name}-{os.getpid()}"  # a new directory
        try:
            if not args.model:
                shutil.rmtree(folder, ignore_errors=True)
                with clock(f"{name}: synth"):
                    command([args.ostinato, "synth", "--arch", name, "--out", str(folder)]
                            + (["--layers", str(args.layers)] if args.layers else [])
                            + shlex.split(args.synth_args), args.timeout)
            results += judge(args, name, folder, variants, clock, background)
        except Failed as e:
            print(f"{name}: {e}", flush=True)
            results.append({"arch": name, "variant": "-", "prompt_len": "-", "failed": str(e),
                            "problems": [str(e).splitlines()[0]]})
        except Exception as e:  # an error must not discard the results of the other architectures
            import traceback
            traceback.print_exc()
            results.append({"arch": name, "variant": "-", "prompt_len": "-", "failed": repr(e), "problems": [repr(e)[:200]]})
        finally:
            if not args.model and not args.keep:
                shutil.rmtree(folder, ignore_errors=True)
            for dump in args.work.glob(f"logits-{os.getpid()}-*.safetensors"):
                dump.unlink()
            save()

    print("\nseconds: " + ", ".join(f"{k} {v:.1f}" for k, v in clock.parts.items()) + f"; all {time.time() - began:.1f}")
    for r in results:
        for m in r.get("mismatches", []):
            print(f"{r['arch']} {r['variant']} step {m['step']}: ours {m['ours']}, reference {m['reference']}; reference gap "
                  f"{m['reference_gap_between']:.2e} (top two {m['reference_top2_gap']:.2e}), our logits "
                  f"{m['our_logit_of_ours']:.5f} and {m['our_logit_of_reference']:.5f}, rms error {m['rms_error']:.1e}: "
                  + ("a tie" if m["tie"] else "NOT a tie"))
    print()
    table(results)
    if any("failed" in r for r in results):
        return 2
    return 1 if any(r["problems"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
