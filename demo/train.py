#!/usr/bin/env python3
"""Trains, exports and measures the demo models.

    python3 train.py tokenizer OUT                      train the tokenizer, write it and the configuration files
    python3 train.py hybrid OUT --tokenizer-of model    write the files of a Qwen3.5 model except its weights
    python3 train.py train OUT --minutes 7              train (on a GPU), write OUT/model.safetensors
    python3 train.py evaluate OUT --tasks tasks.jsonl   measure a trained model with transformers, in f32
    python3 train.py drafts OUT                         measure the acceptance of drafts on the hybrid's own replies
    python3 train.py check OUT                          compare the forward pass of this file with that of transformers

OUT is a directory such as `model`. Training generates its own corpus meanwhile: worker processes write chats
(corpus.py) and pack them into rows of 1024 tokens, and the GPU mostly trains on rows that it has not seen before. The
learning rate schedule depends on the elapsed time, so that training ends after --minutes, however fast the machine is.

How `model` was trained, on one NVIDIA H200 with 16 processor cores (torch 2.11, transformers 5.17):

    python3 train.py tokenizer model
    python3 train.py train first --minutes 7.4
    python3 train.py train model --start-from first --minutes 2.05 --lr 0.006 --seed 2

The first run took 444 s (7,219 steps, 1,892 M tokens, of which 961 M were newly generated; 4.45 M tokens per second),
the second 123 s (1,228 steps, 322 M tokens). Between the runs the stories of the corpus changed: their content now
depends on their hero (see `lean` in corpus.py; the commit before the model contains the corpus of the tokenizer and of
the first run). `first` needs the files that `tokenizer` writes.

How `hybrid` was trained, on the same machine, with the current corpus:

    python3 train.py hybrid second --tokenizer-of model; python3 train.py hybrid hybrid --tokenizer-of model
    python3 train.py train second --minutes 8.3 --batch 192
    python3 train.py train hybrid --start-from second --minutes 3.2 --batch 192 --lr 0.006 --seed 2 --drafts 3 --draft 0.3

The first run took 498 s (6,439 steps, 1,266 M tokens, of which 724 M were newly generated; 2.95 M tokens per second
after compilation), the second 192 s (1,290 steps, 254 M tokens, 151 M newly generated; 2.32 M tokens per second).

During training the weights are f32 and the products bf16; the weights are rounded to bf16 at the end.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F

import corpus
import delta
import qwen35

# 7 layers, hidden size 256: 4.65 million weights.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16",
    "eos_token_id": 2, "head_dim": 32, "hidden_act": "silu", "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 512,
    "layer_types": ["full_attention"] * 7, "max_position_embeddings": 1024, "max_window_layers": 7, "model_type": "qwen3",
    "num_attention_heads": 8, "num_hidden_layers": 7, "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": None,
    "tie_word_embeddings": True, "transformers_version": "5.17.0", "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 2048,
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END, START, STOP = 0, 1, 2
ROW = 1024
CHAT_TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
# Splits text into words with the preceding space (or sign), single digits, runs of other signs, and line ends.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------------------------------------------------

def configure_hybrid(out, like):
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (out / name).write_text((like / name).read_text())
    (out / "config.json").write_text(json.dumps(qwen35.CONFIG, indent=2) + "\n")


def train_tokenizer(out):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=CONFIG["vocab_size"], special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=12, show_progress=False)
    rng = random.Random(0)
    texts = ["\n".join(m["content"] for m in corpus.training_chat(rng)) for _ in range(30000)]
    # Each letter must also occur alone.
    texts += [" ".join("abcdefghijklmnopqrstuvwxyz") + " a" + "-".join("abcdefghijklmnopqrstuvwxyz")] * 3000
    tokenizer.train_from_iterator(texts, trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    entry = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    files = {
        "tokenizer_config.json": {"add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": {str(i): {"content": text, **entry} for i, text in enumerate(SPECIAL)}, "bos_token": None,
                                  "chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False, "eos_token": SPECIAL[STOP], "errors": "replace", "model_max_length": ROW, "pad_token": SPECIAL[END],
                                  "split_special_tokens": False, "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None},
        "config.json": CONFIG,
        "generation_config.json": {"do_sample": True, "eos_token_id": [STOP, END], "max_new_tokens": 320, "pad_token_id": END, "temperature": 0.7, "top_p": 0.95, "transformers_version": "5.17.0"},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# Rows: chats as tokens, packed
# ---------------------------------------------------------------------------------------------------------------------

class Encoder:
    """Encodes chats as tokens, with a flag for each token that counts in the loss."""

    def __init__(self, folder):
        from tokenizers import Tokenizer
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.newline = self.tokenizer.encode("\n").ids
        self.role = {role: self.tokenizer.encode(role + "\n").ids for role in ("system", "user", "assistant")}
        self.letter = {c: self.tokenizer.encode(c).ids[0] for c in "abcdefghijklmnopqrstuvwxyz"}
        self.space_letter = {c: self.tokenizer.encode(" " + c).ids for c in self.letter}
        assert all(len(ids) == 1 for ids in self.space_letter.values()) and all(len(self.tokenizer.encode("-" + c).ids) == 1 for c in self.letter)

    def pieces(self):
        """Returns the tokens that consist of at least two lower-case letters, without a leading space; words are built
        from them."""
        words = {token.removeprefix("Ġ") for token in self.tokenizer.get_vocab()}
        return sorted(word for word in words if word.isascii() and word.isalpha() and word.islower() and len(word) > 1)

    def reply(self, text, ids):
        """Returns the tokens of a reply. A reversed word is encoded letter by letter, because its usual tokens would
        require planning ahead."""
        head, sign, word = text.rpartition(" backwards is ")
        if sign and word.isalpha() and word.islower():
            return self.tokenizer.encode(head + sign.rstrip()).ids + self.space_letter[word[0]] + [self.letter[c] for c in word[1:]]
        return ids

    def chats(self, chats):
        encoded = iter(self.tokenizer.encode_batch([m["content"] for chat in chats for m in chat]))
        for chat in chats:
            ids, said = [], []
            for entry in chat:
                content = next(encoded).ids
                head = [START] + self.role[entry["role"]]
                if entry["role"] == "assistant":
                    content = self.reply(entry["content"], content)
                    body = content + [STOP]
                    said += [0] * len(head) + [1] * len(body)
                else:
                    body = content + [STOP]
                    said += [0] * (len(head) + len(body))
                ids += head + body + self.newline
                said += [0] * len(self.newline)
            yield ids, said


def make_rows(encoder, rng, count):
    """Returns `count` rows of ROW + 1 tokens: the ids, the loss flags, and the document of each token in its row (-1
    after the last document)."""
    rows = torch.zeros(count, 3, ROW + 1, dtype=torch.int16)
    rows[:, 2] = -1
    open_rows = [[0, 0, i] for i in range(count)]  # number of tokens, number of documents, index
    active, nxt = [], 0
    misses = 0
    while misses < 40:
        for ids, said in encoder.chats([corpus.training_chat(rng) for _ in range(64)]):
            length = len(ids)
            if length > ROW + 1:
                continue
            place = next((row for row in active if row[0] + length <= ROW + 1), None)
            if place is None:
                if nxt == count:
                    misses += 1
                    continue
                place = open_rows[nxt]
                nxt += 1
                active.append(place)
                if len(active) > 12:
                    active.remove(max(active, key=lambda row: row[0]))
            used, docs, index = place
            rows[index, 0, used:used + length] = torch.tensor(ids, dtype=torch.int16)
            rows[index, 1, used:used + length] = torch.tensor(said, dtype=torch.int16)
            rows[index, 2, used:used + length] = docs
            place[0] += length
            place[1] += 1
    return rows


def worker(folder, seed, index, workers, queue):
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Encoder(Path(folder))
    corpus.PIECES[:] = encoder.pieces()
    chunk = index
    while True:
        queue.put(make_rows(encoder, random.Random(f"{seed}:{chunk}"), 256).numpy())
        chunk += workers


# ---------------------------------------------------------------------------------------------------------------------
# Model: Qwen3, with the names that transformers gives its weights
# ---------------------------------------------------------------------------------------------------------------------

class Layer(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.heads, self.kv, self.d, self.eps = c["num_attention_heads"], c["num_key_value_heads"], d, c["rms_norm_eps"]
        ones, weight = (lambda n: torch.nn.Parameter(torch.ones(n))), (lambda o, i: torch.nn.Parameter(torch.randn(o, i) * 0.5 / math.sqrt(i)))
        scale = 1 / math.sqrt(2 * c["num_hidden_layers"])
        self.input_norm, self.post_norm, self.q_norm, self.k_norm = ones(h), ones(h), ones(d), ones(d)
        self.q, self.k, self.v, self.o = weight(self.heads * d, h), weight(self.kv * d, h), weight(self.kv * d, h), weight(h, self.heads * d)
        self.gate, self.up, self.down = weight(c["intermediate_size"], h), weight(c["intermediate_size"], h), weight(h, c["intermediate_size"])
        with torch.no_grad():
            self.o.mul_(scale)
            self.down.mul_(scale)

    def norm(self, x, weight):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * weight).to(x.dtype)

    def forward(self, x, cos, sin, attend):
        b, t, _ = x.shape
        y = self.norm(x, self.input_norm).to(cos.dtype)
        q = self.norm(F.linear(y, self.q.to(y.dtype)).view(b, t, self.heads, self.d), self.q_norm).transpose(1, 2)
        k = self.norm(F.linear(y, self.k.to(y.dtype)).view(b, t, self.kv, self.d), self.k_norm).transpose(1, 2)
        v = F.linear(y, self.v.to(y.dtype)).view(b, t, self.kv, self.d).transpose(1, 2)
        turn = lambda z: z * cos + torch.cat((-z[..., self.d // 2:], z[..., :self.d // 2]), -1) * sin
        y = attend(turn(q), turn(k), v).transpose(1, 2).reshape(b, t, -1)
        x = x + F.linear(y, self.o.to(y.dtype)).to(x.dtype)
        y = self.norm(x, self.post_norm).to(cos.dtype)
        y = F.silu(F.linear(y, self.gate.to(y.dtype))) * F.linear(y, self.up.to(y.dtype))
        return x + F.linear(y, self.down.to(y.dtype)).to(x.dtype)


class Model(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embed = torch.nn.Parameter(torch.randn(c["vocab_size"], c["hidden_size"]) * 0.02)
        self.layers = torch.nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.final_norm = torch.nn.Parameter(torch.ones(c["hidden_size"]))

    def forward(self, ids, positions, attend, dtype):
        d = self.c["head_dim"]
        angle = positions[:, None, :, None].float() * self.c["rope_theta"] ** (-torch.arange(0, d, 2, device=ids.device).float() / d)
        angle = torch.cat((angle, angle), -1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        x = F.embedding(ids, self.embed)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        x = self.layers[0].norm(x, self.final_norm).to(dtype)
        return F.linear(x, self.embed.to(dtype))

    def loss(self, ids, targets, weights, positions, attend, dtype):
        logits = self(ids, positions, attend, dtype).float()
        each = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
        return ((each * weights.reshape(-1)).sum() / weights.sum())[None]

    def tensors(self):
        """The weights under the names that transformers gives them."""
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.final_norm}
        for i, layer in enumerate(self.layers):
            names = {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.post_norm, "self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm, "self_attn.q_proj": layer.q,
                     "self_attn.k_proj": layer.k, "self_attn.v_proj": layer.v, "self_attn.o_proj": layer.o, "mlp.gate_proj": layer.gate, "mlp.up_proj": layer.up, "mlp.down_proj": layer.down}
            named.update({f"model.layers.{i}.{name}.weight": value for name, value in names.items()})
        return named


def make(folder):
    """Returns a model with random weights, as described by the directory's config.json."""
    c = json.loads((folder / "config.json").read_text())
    return qwen35.Model(c) if c["model_type"] == "qwen3_5_text" else Model(c)


def save(model, folder):
    from safetensors.torch import save_file
    save_file({name: value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in model.tensors().items()}, str(folder / "model.safetensors"), metadata={"format": "pt"})


@torch.no_grad()
def restore(model, folder):
    from safetensors.torch import load_file
    stored, names = load_file(str(folder / "model.safetensors")), model.tensors()
    assert stored.keys() == names.keys()
    for name, value in names.items():
        value.copy_(stored[name].float())


class Muon(torch.optim.Optimizer):
    """The Muon optimizer (Jordan et al., 2024): momentum with orthogonalized steps. Matrices of the same shape are
    updated together."""

    def __init__(self, params, lr, momentum=0.95, decay=0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @staticmethod
    def orthogonal(g):
        x = g.bfloat16()
        wide = x.shape[1] <= x.shape[2]
        x = x if wide else x.mT
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            s = x @ x.mT
            x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
        return x if wide else x.mT

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = defaultdict(list)
            for p in group["params"]:
                shapes[p.shape].append(p)
            for shape, params in shapes.items():
                grads = torch.stack([p.grad for p in params])
                state = self.state[params[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(grads)
                state["momentum"].lerp_(grads, 1 - group["momentum"])
                step = self.orthogonal(grads.lerp(state["momentum"], group["momentum"])).float() * max(1, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(params, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(params, list(step.unbind(0)), alpha=-group["lr"])


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------

def masked_attention(mask):
    """Returns an attention function for a mask: a BlockMask for flex attention, or a boolean tensor. With `lse`, the
    function also returns the log-sum-exp of the scores."""
    if isinstance(mask, torch.Tensor):
        def attend(q, k, v, lse=False):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            if not lse:
                return out
            scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
            return out, scores.masked_fill(~mask, float("-inf")).logsumexp(-1)
    else:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        def attend(q, k, v, lse=False):
            if not lse:
                return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
            out, more = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
            return out, more.lse
    return attend


def mask_for(documents, kind, create):
    """Returns the mask of causal attention within each document. documents: [batch, ROW], the document of each
    token."""
    if kind == "dense":
        return (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    return create(lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]), documents.shape[0], None, ROW, ROW, device=documents.device)


def prepare(rows):
    """Returns the inputs of the loss for rows: ids, targets, weights, positions and documents."""
    rows = rows.int()
    ids, targets = rows[:, 0, :-1].contiguous(), rows[:, 0, 1:].long()
    documents = rows[:, 2, :-1].contiguous()
    weights = (rows[:, 1, 1:] * (rows[:, 2, 1:] == documents)).float()
    index = torch.arange(ROW, device=rows.device, dtype=torch.int32).expand_as(documents)
    starts = torch.where(F.pad(documents[:, :-1], (1, 0), value=-2) != documents, index, torch.zeros_like(index)).cummax(1).values
    return ids, targets, weights, index - starts, documents


def train(args):
    started = time.time()
    cuda = torch.cuda.is_available()
    device, dtype, kind = ("cuda", torch.bfloat16, args.attention) if cuda else ("cpu", torch.float32, "dense")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    out = Path(args.out)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=4 * args.workers)
    workers = [context.Process(target=worker, args=(str(out), args.seed, i, args.workers, queue), daemon=True) for i in range(args.workers)]
    for process in workers:
        process.start()

    model = make(out)
    if args.start_from:
        restore(model, Path(args.start_from))
    if isinstance(model, qwen35.Model):
        model.drafts = args.drafts
    model.to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights on {torch.cuda.get_device_name() if cuda else 'cpu'}", flush=True)
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not model.embed]
    others = [p for p in model.parameters() if p.ndim != 2 or p is model.embed]
    muon = Muon(matrices, lr=args.lr)
    adam = torch.optim.AdamW(others, lr=args.lr * 0.2, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)

    def loss_of(ids, targets, weights, positions, mask):
        return model.loss(ids, targets, weights, positions, masked_attention(mask), dtype)

    create_mask = None
    if cuda:
        from torch.nn.attention.flex_attention import create_block_mask
        create_mask = torch.compile(create_block_mask)
        loss_of = torch.compile(loss_of, dynamic=False)

    pool = torch.zeros(args.pool, 3, ROW + 1, dtype=torch.int16, device=device)
    filled = made = 0

    def refill():
        nonlocal filled, made
        while not queue.empty():
            rows = torch.from_numpy(queue.get()).to(device)
            at = made % args.pool
            rows = rows[:args.pool - at]
            pool[at:at + len(rows)] = rows
            made += len(rows)
            filled = min(made, args.pool)

    while filled < 2 * args.batch:
        time.sleep(0.2)
        refill()
        assert all(process.is_alive() for process in workers), "a worker died"
    print(f"first {filled} rows after {time.time() - started:.0f} s", flush=True)
    step, begin, tokens = 0, None, 0
    deadline = started + args.minutes * 60
    fresh = 0  # the number of the first generated row that was not trained on yet
    while True:
        if not cuda or step % 8 == 0:
            refill()
        if made - fresh >= args.batch and made - fresh <= args.pool:
            picked = torch.arange(fresh, fresh + args.batch, device=device) % args.pool
            fresh += args.batch
        else:
            picked = torch.randint(0, filled, (args.batch,), device=device)
        ids, targets, weights, positions, documents = prepare(pool[picked])
        # The loss of the model, followed by those of its drafts if it makes any.
        losses = loss_of(ids, targets, weights, positions, mask_for(documents, kind, create_mask))
        (losses[0] + args.draft * losses[1:].sum()).backward()
        if begin is None:  # the step is compiled now; the time of the schedule starts here
            losses.tolist()
            begin = time.time()
            print(f"first step after {begin - started:.0f} s", flush=True)
        progress = min(1.0, (time.time() - begin) / max(1.0, deadline - begin))
        rate = min(1.0, (step + 1) / 100) * (0.02 + 0.98 * (1 - progress if progress > 0.3 else 0.7) / 0.7)
        for optimizer, base in ((muon, args.lr), (adam, args.lr * 0.2)):
            for group in optimizer.param_groups:
                group["lr"] = base * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += args.batch * ROW
        if step % args.log == 0:
            values = [f"{value:.4f}" for value in losses.tolist()]
            if step % (10 * args.log) == 0 or step == args.log:
                print(f"step {step} {time.time() - started:.0f} s loss {' '.join(values)} rate {rate:.3f} {tokens / (time.time() - begin) / 1e6:.2f} Mtok/s rows made {made} used fresh {fresh}", flush=True)
        if progress >= 1.0 or step == args.steps:
            break
    for process in workers:
        process.kill()
    save(model, out)
    print(f"{step} steps, {tokens / 1e6:.0f} M tokens, {made} rows made ({made * ROW / 1e6:.0f} M tokens), loss {' '.join(f'{value:.4f}' for value in losses.tolist())}, {time.time() - started:.0f} s in all", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------

STORY_PROMPTS = ["Tell me a story about a fox, a lantern and a river.", "Tell me a story about a dragon, a cake and a castle.", "Write a short story about a robot and a flower.", "Tell me a story about a girl named Mira and a key.",
                 "Tell me a story.", "Can you tell me a story about a brave mouse, an owl and a boat?", "tell me a story about a wizard and a spaceship", "Tell me a story about friendship.", "Tell me a story about a knight, a dragon, a sword and a mountain.",
                 "Tell me a story about a cat."]


def load(folder, device):
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).to(device).eval()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt_of(messages):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"


@torch.no_grad()
def replies(model, tokenizer, chats, new_tokens, batch=256, tokens=False, **how):
    """Returns the model's replies to chats, computed in batches of similar length: as text, or as tokens including the
    stop token."""
    encoded = [tokenizer.encode(prompt_of(chat)).ids for chat in chats]
    out = [None] * len(chats)
    order = sorted(range(len(chats)), key=lambda i: len(encoded[i]))
    for at in range(0, len(order), batch):
        part = order[at:at + batch]
        width = max(len(encoded[i]) for i in part)
        ids = torch.tensor([[END] * (width - len(encoded[i])) + encoded[i] for i in part], device=model.device)
        mask = torch.tensor([[0] * (width - len(encoded[i])) + [1] * len(encoded[i]) for i in part], device=model.device)
        got = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, eos_token_id=[STOP, END], pad_token_id=END, **{"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **how})
        for i, row in zip(part, got[:, width:].tolist()):
            stop = next((n for n, token in enumerate(row) if token in (STOP, END)), None)
            if tokens:
                out[i] = row[:stop + 1] if stop is not None else row
                continue
            out[i] = tokenizer.decode(row[:stop]) if stop is not None else tokenizer.decode(row) + " …"
    return out


def evaluate(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = Path(args.out)
    model, tokenizer = load(folder, device)
    tasks = [json.loads(line) for line in open(args.tasks, encoding="utf-8")]
    if args.extra:
        tasks += [{**task, "kind": task["kind"] + " (more)"} for task in corpus.heldout_tasks(args.extra, seed=11)]
    got = replies(model, tokenizer, [task["messages"] for task in tasks], 64)
    right, total, wrong = defaultdict(int), defaultdict(int), []
    for task, text in zip(tasks, got):
        total[task["kind"]] += 1
        right[task["kind"]] += text == task["answer"]
        if text != task["answer"]:
            wrong.append({"kind": task["kind"], "asked": task["messages"][-1]["content"][-300:], "expected": task["answer"], "got": text})
    accuracy = {kind: f"{right[kind]}/{total[kind]} = {100 * right[kind] / total[kind]:.2f} %" for kind in total}
    print(json.dumps(accuracy, indent=1), flush=True)
    for entry in wrong[:args.wrong]:
        print(entry)
    # Chats that ask for a story: whether all the named things occur, and whether the story ends by itself.
    rng = random.Random(5)
    asked, things = [], []
    while len(asked) < args.stories:
        story = corpus.Story(rng)
        if story.held_out():
            named = [story.slots["h"], story.slots["o"], story.slots["p"]]
            asked.append([corpus.message("user", f"Tell me a story about {corpus.a(named[0])}, {corpus.a(named[1])} and {corpus.a(named[2])}.")])
            things.append(named)
    report = {"accuracy": accuracy, "wrong": wrong}
    for title, how in (("greedy", {}), ("temperature 0.7", {"do_sample": True, "temperature": 0.7})):
        torch.manual_seed(1)
        told = replies(model, tokenizer, asked, 320, **how)
        whole = sum(not text.endswith(" …") for text in told)
        used = sum(all(thing in text for thing in named) for text, named in zip(told, things))
        report["stories " + title] = f"{used}/{len(told)} use everything named, {whole}/{len(told)} end"
        print(title, report["stories " + title], flush=True)
        report["samples " + title] = dict(zip(STORY_PROMPTS, replies(model, tokenizer, [[corpus.message("user", text)] for text in STORY_PROMPTS], 320, **how)))
        for ask, text in list(report["samples " + title].items())[:args.show]:
            print(f"\n> {ask}\n{text}", flush=True)
    small = ["Who are you?", "What can you do?", "Hello", "What is the capital of France?", "12+30", "What is 7 times 8?", "Spell elephant.", "Reverse the word lantern.", "Sort these words: pear, apple, fig, banana", "What is 999 + 999?"]
    report["small"] = dict(zip(small, replies(model, tokenizer, [[corpus.message("user", text)] for text in small], 80)))
    print(json.dumps(report["small"], indent=1))
    (folder / "evaluation.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))


@torch.no_grad()
def drafts(args):
    """Prints how often the first, second and third greedy draft is correct for the tokens of the main model's greedy
    replies."""
    folder = Path(args.out)
    model, tokenizer = load(folder, "cuda" if torch.cuda.is_available() else "cpu")
    ours = make(folder)
    restore(ours, folder)
    ours.to(model.device)
    tasks = [json.loads(line) for line in open(args.tasks, encoding="utf-8")]
    rng, chats = random.Random(7), defaultdict(list)
    for task in tasks:
        if len(chats[task["kind"]]) < args.chats:
            chats[task["kind"]].append(task["messages"])
    while len(chats["story"]) < args.chats:
        story = corpus.Story(rng)
        if story.held_out():
            chats["story"].append([corpus.message("user", f"Tell me a story about {corpus.a(story.slots['h'])}, {corpus.a(story.slots['o'])} and {corpus.a(story.slots['p'])}.")])
    # The number of drafts that are correct together with all drafts before them, and the number of drafts.
    counts = defaultdict(lambda: torch.zeros(2, args.count))
    # The number of tokens after a reply's first one, and the number of steps that produced them.
    steps = defaultdict(lambda: torch.zeros(2, args.count))
    for kind, of_kind in chats.items():
        for chat, reply in zip(of_kind, replies(model, tokenizer, of_kind, 320, tokens=True)):
            prompt = tokenizer.encode(prompt_of(chat)).ids
            ids = torch.tensor([prompt + reply], device=model.device)
            length = ids.shape[1] - 1
            attend = masked_attention(torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).tril())
            made = qwen35.drafts(ours, ids, attend, args.count)[:, len(prompt) - 1:].tolist()
            right = []  # for each n: the number of correct drafts after n + 1 tokens of the reply
            for n in range(len(reply) - 1):
                held = 0
                while held < args.count and n + held + 1 < len(reply) and made[held][n] == reply[n + held + 1]:
                    held += 1
                right.append(held)
            for name in (kind, "all"):
                for d in range(args.count):
                    counts[name][:, d] += torch.tensor([sum(held > d for held in right), max(0, len(right) - d)])
                    n = taken = 0
                    while n < len(right):
                        n, taken = n + 1 + min(right[n], d + 1), taken + 1
                    steps[name][:, d] += torch.tensor([len(right), taken])
    for kind in [*chats, "all"]:
        shares, pace = counts[kind][0] / counts[kind][1], steps[kind][0] / steps[kind][1]
        print(f"{kind}: right {' '.join(f'{100 * share:.1f} %' for share in shares)}; tokens a step {' '.join(f'{value:.2f}' for value in pace)}", flush=True)


def check(args):
    """Compares the logits of this file's forward pass with those of transformers: for whole rows, and for rows of
    several documents, where transformers runs each document separately. If OUT has no model, writes one with random
    weights."""
    torch.manual_seed(0)
    folder = Path(args.out)
    ours = make(folder)
    if not (folder / "model.safetensors").exists():
        with torch.no_grad():
            for value in ours.parameters():  # so that no norm keeps its neutral weight
                if value.ndim == 1:
                    value.add_(torch.randn_like(value) * 0.1)
        save(ours, folder)
    restore(ours, folder)
    theirs, _ = load(folder, "cpu")
    ids = torch.randint(3, 2048, (2, ROW))
    documents = torch.stack([torch.zeros(ROW, dtype=torch.int), torch.searchsorted(torch.tensor([5, 64, 66, 301, 302, 700]), torch.arange(ROW), right=True).int()])
    _, targets, weights, positions, documents = prepare(torch.stack([F.pad(x, (0, 1)).int() for x in (ids, torch.ones_like(ids), documents)], 1))
    attend = masked_attention(mask_for(documents, "dense", None))
    with torch.no_grad():
        got = ours(ids, positions, attend, torch.float32)
        difference = (got[0] - theirs(ids[:1]).logits[0]).abs().max().item()
        for document in documents[1].unique():
            part = documents[1] == document
            difference = max(difference, (got[1, part] - theirs(ids[1:, part]).logits[0]).abs().max().item())
    print(f"largest logit {got.abs().max().item():.2f}, largest difference {difference:.2e}")
    assert difference < 1e-3 + 1e-4 * got.abs().max().item()
    if isinstance(ours, qwen35.Model):
        check_rule()
        check_drafts(ours, ids[:1, :40])


def check_rule():
    """Compares the implementations of the gated delta rule, forward and backward. The kernels are included on a GPU,
    and elsewhere with Triton's interpreter (TRITON_INTERPRET=1)."""
    cuda = torch.cuda.is_available()
    forms = [delta.recurrent, delta.chunked] + [delta.delta_rule] * (cuda or os.environ.get("TRITON_INTERPRET") == "1")
    rows, length, dtype = 2, 128, torch.bfloat16 if cuda else torch.float32
    random_of = lambda *shape: torch.randn(*shape, device="cuda" if cuda else "cpu")
    q, k, v, wanted = F.normalize(random_of(rows, length, 2, 16) + 0.5, dim=-1) / 4, F.normalize(random_of(rows, length, 2, 16) + 0.7, dim=-1), random_of(rows, length, 4, 32), random_of(rows, length, 4, 32)
    g, beta = -0.3 * torch.rand_like(v[..., 0]), torch.rand_like(v[..., 0])
    g[:, 37] = g[1, 64] = g[0, 90] = delta.RESET
    results = []
    for form in forms:
        given = [x.detach().requires_grad_() for x in (q.to(dtype), k.to(dtype), v.to(dtype), g, beta)]
        out = form(*given)
        (out.float() * wanted).sum().backward()
        results.append([x.float() for x in (out.detach(), *(x.grad for x in given))])
    errors = [max(((x - y).norm() / y.norm()).item() for x, y in zip(result, results[0])) for result in results[1:]]
    print(f"delta rule: largest relative error of {', '.join(f'{form.__name__} {error:.1e}' for form, error in zip(forms[1:], errors))}")
    assert max(errors) < (1e-2 if cuda else 1e-4)


@torch.no_grad()
def check_drafts(model, ids):
    """Compares the loss of drafts with the formula, computed token by token, and the result of `drafts` with drafting
    one position at a time."""
    named, c = {name: value.double() for name, value in model.tensors().items()}, model.c
    normal = lambda x, name: x / (x.pow(2).mean() + c["rms_norm_eps"]).sqrt() * (1 + named[name])
    d, rotated = c["head_dim"], int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"])

    def turn(x, p):
        x = x.clone()
        for i in range(rotated // 2):
            angle = p * c["rope_parameters"]["rope_theta"] ** (-2 * i / rotated)
            one, other = x[i].item(), x[i + rotated // 2].item()
            x[i], x[i + rotated // 2] = one * math.cos(angle) - other * math.sin(angle), other * math.cos(angle) + one * math.sin(angle)
        return x

    def step(hidden, token, p, cache):
        """Runs one position through the draft block. Returns the normed hidden state, from which drafts are made."""
        w = lambda name: named["mtp.layers.0." + name + ".weight"]
        x = named["mtp.fc.weight"] @ torch.cat((normal(named["model.embed_tokens.weight"][token], "mtp.pre_fc_norm_embedding.weight"), normal(hidden, "mtp.pre_fc_norm_hidden.weight")))
        y = normal(x, "mtp.layers.0.input_layernorm.weight")
        q, k, v = (w("self_attn.q_proj") @ y).view(-1, 2, d), (w("self_attn.k_proj") @ y).view(-1, d), (w("self_attn.v_proj") @ y).view(-1, d)
        cache = cache + [(torch.stack([turn(normal(head, "mtp.layers.0.self_attn.k_norm.weight"), p) for head in k]), v)]
        heads = []
        for h in range(q.shape[0]):
            kv, query = h // (q.shape[0] // k.shape[0]), turn(normal(q[h, 0], "mtp.layers.0.self_attn.q_norm.weight"), p)
            part = torch.stack([query @ keys[kv] / math.sqrt(d) for keys, _ in cache]).softmax(0)
            heads.append(sum(share * values[kv] for share, (_, values) in zip(part, cache)) * torch.sigmoid(q[h, 1]))
        x = x + w("self_attn.o_proj") @ torch.cat(heads)
        y = normal(x, "mtp.layers.0.post_attention_layernorm.weight")
        x = x + w("mlp.down_proj") @ (F.silu(w("mlp.gate_proj") @ y) * (w("mlp.up_proj") @ y))
        return normal(x, "mtp.norm.weight"), cache

    length = ids.shape[1]
    causal = lambda n: masked_attention(torch.ones(1, 1, n, n, dtype=torch.bool).tril())
    padded, whole = F.pad(ids, (0, ROW - length)), torch.arange(ROW)[None]
    hidden = model.hidden(padded, model.place(whole, causal(ROW), torch.float32))[0, :length]
    cache, each, made = [], [[], [], []], [[], [], []]
    embedding = named["model.embed_tokens.weight"]
    for p in range(length - 1):
        state, cache = step(hidden[p].double(), ids[0, p + 1], p, cache)
        drafted, told, ahead, ahead_told = state, state, cache, cache
        for n in range(3):
            if p + n + 2 < length:  # follows the text's own tokens, as in training
                scores = embedding @ told
                each[n].append(torch.logsumexp(scores, 0) - scores[ids[0, p + n + 2]])
                told, ahead_told = step(told, ids[0, p + n + 2], p + n + 1, ahead_told)
            made[n].append((embedding @ drafted).argmax().item())
            drafted, ahead = step(drafted, made[n][-1], p + n + 1, ahead)
    said = torch.zeros(1, ROW)
    said[0, :length - 1] = 1
    model.drafts = 3
    losses = model.loss(padded, F.pad(ids[:, 1:], (0, ROW - length + 1)).long(), said, whole, causal(ROW), torch.float32)[1:]
    expected = torch.stack([torch.stack(part).mean() for part in each])
    print(f"losses of drafts {losses.tolist()}, by the formula {expected.tolist()}")
    assert (losses - expected).abs().max() < 1e-5 * expected.max() and qwen35.drafts(model, ids, causal(length - 1), 3).tolist() == made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tokenizer", help="train the tokenizer, write the configuration files").add_argument("out")
    hybrid = commands.add_parser("hybrid", help="write the configuration files of the hybrid")
    hybrid.add_argument("out")
    hybrid.add_argument("--tokenizer-of", required=True, help="a folder with a tokenizer")
    commands.add_parser("check", help="compare with transformers").add_argument("out")
    fit = commands.add_parser("train", help="train the model")
    fit.add_argument("out")
    fit.add_argument("--minutes", type=float, default=7, help="training ends after so many minutes, all told (default 7)")
    fit.add_argument("--start-from", help="a folder with a model to train further")
    fit.add_argument("--steps", type=int, default=0, help="end after so many steps")
    fit.add_argument("--batch", type=int, default=256, help="rows of 1024 tokens in a step")
    fit.add_argument("--lr", type=float, default=0.02, help="learning rate of the matrices; a fifth of it for the rest")
    fit.add_argument("--draft", type=float, default=0.2, help="weight of each loss of drafts, where the model makes drafts")
    fit.add_argument("--drafts", type=int, default=1, help="how many drafts at a time are trained")
    fit.add_argument("--workers", type=int, default=14, help="processes that write the corpus")
    fit.add_argument("--pool", type=int, default=2_000_000, help="rows kept for training")
    fit.add_argument("--attention", choices=["flex", "dense"], default="flex")
    fit.add_argument("--seed", type=int, default=1)
    fit.add_argument("--log", type=int, default=20)
    measure = commands.add_parser("evaluate", help="measure a written model")
    measure.add_argument("out")
    measure.add_argument("--tasks", default="tasks-heldout.jsonl")
    measure.add_argument("--extra", type=int, default=0, help="so many more held-out tasks of each kind")
    measure.add_argument("--stories", type=int, default=200)
    measure.add_argument("--show", type=int, default=4, help="samples to print")
    measure.add_argument("--wrong", type=int, default=20, help="wrong answers to print")
    ahead = commands.add_parser("drafts", help="measure the drafts of a written hybrid")
    ahead.add_argument("out")
    ahead.add_argument("--tasks", default="tasks-heldout.jsonl")
    ahead.add_argument("--chats", type=int, default=30, help="chats of each kind")
    ahead.add_argument("--count", type=int, default=3, help="drafts at a time")
    args = parser.parse_args()
    if args.command == "tokenizer":
        train_tokenizer(Path(args.out))
    elif args.command == "hybrid":
        configure_hybrid(Path(args.out), Path(args.tokenizer_of))
    else:
        {"train": train, "evaluate": evaluate, "check": check, "drafts": drafts}[args.command](args)


if __name__ == "__main__":
    main()
