import sys, json, random, time, os, math
from fz import *
L_, W_ = "6d657361-3232-2e33-2e36-000000000000", "53776966-7453-6861-6465-725555494400"
BOTH = {"VK_DRIVER_FILES": LVP + ":/usr/lib/chromium/vk_swiftshader_icd.json"}
def scase(family, seed, folder):
    r = random.Random(f"s-{family}-{seed}")
    config = gen.FAMILIES[family](r); text = config.get("text_config", config); rec = {"family": family, "seed": seed, "config": config}; t0 = time.time()
    split = r.choice(["tensor", "tensor", "layers"])
    if split == "layers" and text["num_hidden_layers"] < 2: split = "tensor"
    rec["split"] = split
    order = r.choice([[L_, W_], [W_, L_]])
    shares = r.choice(["", "", ", shares = [3, 1]", ", shares = [1, 4]"])
    try: model = build(family, config, seed, folder)
    except Exception as e: rec["result"] = "reference failed"; rec["why"] = f"{type(e).__name__}: {e}"[:300]; return rec
    V = text["vocab_size"]
    hybrid = family.startswith("qwen3_5") or family == "qwen3_next"
    chunk = r.choice([None, 64] if hybrid else [None, 16, 40])
    mk = f'context = 128\nkv_format = "{r.choice(["f32", "f32", "f16"])}"\nslots = 4\n' + (f"prefill_chunk = {chunk}\n" if chunk else "")
    rep = "{ devices = [" + ", ".join(f'"{x}"' for x in order) + f'], split = "{split}"{shares if split == "layers" else ""} }}'
    tune = r.choice([[], [], ["vocabulary_rows=2"], ["vocabulary_rows=0"]]) if split == "tensor" else []
    rec["keys"] = mk + rep; rec["tune"] = tune; pr = random.Random(seed)
    short = config.get("_short_prompts")
    prompts = [[pr.randrange(V) for _ in range(L)] for L in ((5 if short else 2), 50, 7)]
    try: s = Server(folder, mk, f"tune = {json.dumps(tune)}\n" if tune else "", extra_env=BOTH, replicas=rep)
    except Refused as e: rec["result"] = "refused"; rec["why"] = e.args; return rec
    try:
        n = 10
        runs = [("alone", prompts[1], s.gen(prompts[1], n, salt="o", prompt_lp=2))]
        runs += [("many", p, x) for p, x in zip(prompts, s.many(prompts, n=n))]
        f16 = '"f16"' in mk; noise = 6e-4 if f16 else 3e-6; floor = 5e-3 if f16 else 1e-3
        worst, det, ratio = 0.0, [], 0
        for what, p, x in runs:
            if isinstance(x, Exception): det.append((what, str(x)[:300])); ratio = 1e9; continue
            w, where, regret, pw, lp = compare(model, p, x[0], x[1], x[2])
            w = max(w, pw) if w == w and pw == pw else float("nan")
            if len(x[0]) != n: ratio = 1e9; det.append((what, len(p), len(x[0])))
            if not w <= floor:
                sens = sensitivity(model, p, x[0], noise)
                if not math.isfinite(w): ratio = 1e9; det.append((what, len(p), "nan", where)); continue
                q = w / max(sens, floor / 10); ratio = max(ratio, q)
                if q > 10: det.append((what, len(p), f"{w:.2e} at {where} prompt {pw:.1e} regret {regret:.2e} own {sens:.2e}"))
            worst = max(worst, w)
        rec["worst"] = worst; rec["ratio"] = ratio; rec["detail"] = det; rec["result"] = "equal" if ratio <= 10 else "WRONG"
    finally:
        rc, err = s.stop()
        if rc != 0 or "panicked" in err: rec["exit"] = (rc, err[-1500:]); rec["result"] = "CRASH"
    rec["seconds"] = round(time.time() - t0, 1)
    return rec
if __name__ == "__main__":
    a, b, log, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    fams = sys.argv[5].split(",") if len(sys.argv) > 5 and sys.argv[5] else list(gen.FAMILIES)
    for seed in range(a, b):
        for f in fams:
            try: rec = scase(f, seed, f"{folder}-{f}")
            except Exception as e:
                import traceback; rec = {"family": f, "seed": seed, "result": "HARNESS", "why": traceback.format_exc()[-600:]}
            open(log, "a").write(json.dumps(rec) + "\n")
            w = rec.get("why", "")
            if rec["result"] == "refused":
                try: w = " ".join(json.loads(x)["fields"]["message"][:300] for x in w[1].strip().split("\n") if '"ERROR"' in x)
                except Exception: w = str(w)[-400:]
            print(f, seed, rec.get("split"), rec["result"], f"{rec.get('worst', 0):.1e}", f"x{rec.get('ratio', 0):.1f}", rec.get("seconds"), w, (rec.get("detail") or "") if rec["result"] != "equal" else "", rec.get("exit", ""), flush=True)
