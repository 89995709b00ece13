"""The Qwen3.5 architecture for train.py: gated delta rule layers (delta.py), gated attention layers, and a draft block.

Weights have the names and layouts of transformers (`Qwen3_5ForCausalLM`) and of released checkpoints. `mtp.*` is the
block for multi-token prediction, which transformers does not load. With h_p the main model's last hidden state at
position p, after the final norm, and e_p+1 the embedding of the next token,

    x = fc [norm(e_p+1) ; norm(h_p)];   x = block(x) at position p;   logits of token p+2 = embedding . norm(x)

For further drafts, norm(x) replaces h, and the drafted token replaces the next token. The block then attends to the
keys and values that it computed from the main model's states up to p, and to those of its own drafts after them. All
norms except that of the delta rule's heads are zero-centered: they multiply by 1 + weight.
"""

import math

import torch
import torch.nn.functional as F

import delta

# 8 layers, hidden size 256: 4.82 million weights with the draft block.
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": None, "dtype": "bfloat16",
    "eos_token_id": 2, "full_attention_interval": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_value_head_dim": 32, "mamba_ssm_dtype": "float32", "max_position_embeddings": 1024, "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4, "num_hidden_layers": 8, "num_key_value_heads": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "rope_parameters": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True, "transformers_version": "5.17.0", "use_cache": True, "vocab_size": 2048,
}
EPS = CONFIG["rms_norm_eps"]


def zeros(n):
    return torch.nn.Parameter(torch.zeros(n))


def weight(o, i, scale=1.0):
    return torch.nn.Parameter(torch.randn(o, i) * 0.5 * scale / math.sqrt(i))


def unit(x):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def norm(x, w):
    return unit(x) * (1 + w)


def linear(x, w):
    return F.linear(x, w.to(x.dtype))


class Place:
    """The position-dependent inputs of layers: positions within documents [rows, tokens], rotary embeddings, and the
    attention function (which also returns the log-sum-exp of the scores on request)."""

    def __init__(self, c, positions, attend, dtype):
        d = int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"])
        angle = positions[:, None, :, None].float() * c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, d, 2, device=positions.device).float() / d)
        angle = torch.cat((angle, angle), -1)
        self.positions, self.attend, self.dtype, self.cos, self.sin = positions, attend, dtype, angle.cos().to(dtype), angle.sin().to(dtype)

    def turn(self, x):
        x, rest = x[..., :self.cos.shape[-1]], x[..., self.cos.shape[-1]:]
        half = x.shape[-1] // 2
        return torch.cat((x * self.cos + torch.cat((-x[..., half:], x[..., :half]), -1) * self.sin, rest), -1)


class Attention(torch.nn.Module):
    def __init__(self, c, scale):
        super().__init__()
        h, d = c["hidden_size"], c["head_dim"]
        self.heads, self.kv, self.d = c["num_attention_heads"], c["num_key_value_heads"], d
        self.q, self.k, self.v, self.o = weight(2 * self.heads * d, h), weight(self.kv * d, h), weight(self.kv * d, h), weight(h, self.heads * d, scale)
        self.q_norm, self.k_norm = zeros(d), zeros(d)

    def parts(self, y, place):
        """Returns query, key and value [rows, heads, tokens, d], and the gate [rows, tokens, heads * d]."""
        b, t, _ = y.shape
        q, gate = linear(y, self.q).view(b, t, self.heads, 2 * self.d).chunk(2, -1)
        q = norm(q, self.q_norm).to(y.dtype).transpose(1, 2)
        k = norm(linear(y, self.k).view(b, t, self.kv, self.d), self.k_norm).to(y.dtype).transpose(1, 2)
        v = linear(y, self.v).view(b, t, self.kv, self.d).transpose(1, 2)
        return place.turn(q), place.turn(k), v, gate.reshape(b, t, -1)

    def result(self, heads, gate):
        return linear(heads.transpose(1, 2).flatten(2) * torch.sigmoid(gate), self.o)

    def forward(self, y, place):
        q, k, v, gate = self.parts(y, place)
        return self.result(place.attend(q, k, v), gate)

    def names(self):
        return {"self_attn.q_proj.weight": self.q, "self_attn.k_proj.weight": self.k, "self_attn.v_proj.weight": self.v, "self_attn.o_proj.weight": self.o,
                "self_attn.q_norm.weight": self.q_norm, "self_attn.k_norm.weight": self.k_norm}


class GatedDelta(torch.nn.Module):
    def __init__(self, c, scale):
        super().__init__()
        h, self.kh, self.vh, self.dk, self.dv, self.taps = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        self.keys, self.values = self.kh * self.dk, self.vh * self.dv
        self.qkv, self.z, self.b, self.a, self.o = weight(2 * self.keys + self.values, h), weight(self.values, h), weight(self.vh, h), weight(self.vh, h), weight(h, self.values, scale)
        self.conv = torch.nn.Parameter(torch.randn(2 * self.keys + self.values, 1, self.taps) * 0.3)
        self.a_log = torch.nn.Parameter(torch.empty(self.vh).uniform_(1, 16).log())
        step = torch.exp(torch.empty(self.vh).uniform_(math.log(0.001), math.log(0.1)))
        self.dt_bias = torch.nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) is `step`
        self.norm = torch.nn.Parameter(torch.ones(self.dv))

    def forward(self, y, place):
        b, t, _ = y.shape
        u, z, open, decay = linear(y, torch.cat((self.qkv, self.z, self.b, self.a))).split((self.qkv.shape[0], self.values, self.vh, self.vh), -1)
        # The convolution is causal and does not reach back beyond the beginning of the document.
        taps = F.pad(u, (0, 0, self.taps - 1, 0))
        u = sum(taps[:, self.taps - 1 - back:self.taps - 1 - back + t].float() * self.conv[:, 0, self.taps - 1 - back] * (place.positions >= back)[..., None] for back in range(self.taps))
        q, k, v = F.silu(u).split((self.keys, self.keys, self.values), -1)
        direction = lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
        q, k = direction(q.view(b, t, self.kh, self.dk)) / math.sqrt(self.dk), direction(k.view(b, t, self.kh, self.dk))
        g = -self.a_log.exp() * F.softplus(decay.float() + self.dt_bias)
        g = torch.where((place.positions == 0)[..., None], torch.full_like(g, delta.RESET), g)
        rule = delta.delta_rule if y.is_cuda else delta.chunked
        q, k, v = (x.to(y.dtype).contiguous() for x in (q, k, v.view(b, t, self.vh, self.dv)))
        out = rule(q, k, v, g, torch.sigmoid(open.float()))
        out = unit(out) * self.norm * F.silu(z.view(b, t, self.vh, self.dv).float())
        return linear(out.flatten(2).to(y.dtype), self.o)

    def names(self):
        return {"linear_attn.in_proj_qkv.weight": self.qkv, "linear_attn.in_proj_z.weight": self.z, "linear_attn.in_proj_b.weight": self.b, "linear_attn.in_proj_a.weight": self.a,
                "linear_attn.out_proj.weight": self.o, "linear_attn.conv1d.weight": self.conv, "linear_attn.A_log": self.a_log, "linear_attn.dt_bias": self.dt_bias, "linear_attn.norm.weight": self.norm}


class Layer(torch.nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        h, inner, scale = c["hidden_size"], c["intermediate_size"], 1 / math.sqrt(2 * c["num_hidden_layers"])
        self.mixer = {"linear_attention": GatedDelta, "full_attention": Attention}[kind](c, scale)
        self.input_norm, self.post_norm = zeros(h), zeros(h)
        self.gate, self.up, self.down = weight(inner, h), weight(inner, h), weight(h, inner, scale)

    def mlp(self, x, dtype):
        y = norm(x, self.post_norm).to(dtype)
        return x + linear(F.silu(linear(y, self.gate)) * linear(y, self.up), self.down).to(x.dtype)

    def forward(self, x, place):
        return self.mlp(x + self.mixer(norm(x, self.input_norm).to(place.dtype), place).to(x.dtype), place.dtype)

    def names(self):
        return {**self.mixer.names(), "input_layernorm.weight": self.input_norm, "post_attention_layernorm.weight": self.post_norm,
                "mlp.gate_proj.weight": self.gate, "mlp.up_proj.weight": self.up, "mlp.down_proj.weight": self.down}


class Model(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c["hidden_size"]
        self.c = c
        self.drafts = 1  # the number of tokens after the next one that `loss` drafts
        self.embed = torch.nn.Parameter(torch.randn(c["vocab_size"], h) * 0.02)
        self.layers = torch.nn.ModuleList(Layer(c, kind) for kind in c["layer_types"])
        self.final_norm = zeros(h)
        self.fc, self.embed_norm, self.hidden_norm, self.draft_norm, self.draft = weight(h, 2 * h), zeros(h), zeros(h), zeros(h), Layer(c, "full_attention")

    def place(self, positions, attend, dtype):
        return Place(self.c, positions, attend, dtype)

    def hidden(self, ids, place):
        """Returns the last hidden states, after the final norm, in f32."""
        x = F.embedding(ids, self.embed)
        for layer in self.layers:
            x = layer(x, place)
        return norm(x, self.final_norm)

    def joined(self, hidden, following, dtype):
        """Returns the draft block's input: the hidden state of a position joined with the embedding of the following
        token."""
        return linear(torch.cat((norm(F.embedding(following, self.embed), self.embed_norm), norm(hidden, self.hidden_norm)), -1).to(dtype), self.fc).float()

    def logits(self, hidden, dtype):
        return linear(hidden.to(dtype), self.embed)

    def step_ahead(self, hidden, following, place, own):
        """Runs the draft block over all tokens, each as if the text ended there. Returns the hidden states and `own`
        with the new keys and values. `own` contains those of the previous passes; the first pass used the main model's
        states."""
        layer, mixer = self.draft, self.draft.mixer
        x = self.joined(hidden, following, place.dtype)
        q, k, v, gate = mixer.parts(norm(x, layer.input_norm).to(place.dtype), place)
        if not own:
            heads = place.attend(q, k, v)
        else:
            heads, whole = place.attend(q, *own[0], lse=True)
            behind = [[y.repeat_interleave(mixer.heads // mixer.kv, 1).float() for y in pair] for pair in (*own[1:], (k, v))]
            part = torch.stack([whole.float()] + [(q.float() * key).sum(-1) / math.sqrt(mixer.d) for key, _ in behind], -1).softmax(-1)[..., None]
            heads = (heads.float() * part[..., 0, :] + sum(value * part[..., i + 1, :] for i, (_, value) in enumerate(behind))).to(q.dtype)
        x = layer.mlp(x + mixer.result(heads, gate).to(x.dtype), place.dtype)
        return norm(x, self.draft_norm), own + [(k, v)]

    def forward(self, ids, positions, attend, dtype):
        return self.logits(self.hidden(ids, self.place(positions, attend, dtype)), dtype)

    def loss(self, ids, targets, weights, positions, attend, dtype):
        """Returns the mean losses of the next token, of the first draft, of the second draft and so on."""
        hidden, own = self.hidden(ids, self.place(positions, attend, dtype)), []
        ahead = lambda x, n: F.pad(x[:, n:], (0, n))
        losses = [self.mean_loss(hidden, targets, weights, dtype)]
        for n in range(self.drafts):
            hidden, own = self.step_ahead(hidden, ahead(targets, n), self.place(positions + n, attend, dtype), own)
            # A drafted token counts only if it belongs to the document in which the draft begins, that is, if positions
            # are consecutive.
            on = ahead(positions, n + 1) == positions + n + 1
            losses.append(self.mean_loss(hidden, ahead(targets, n + 1), ahead(weights, n + 1) * on, dtype))
        return torch.stack(losses)

    def mean_loss(self, hidden, targets, weights, dtype):
        each = F.cross_entropy(self.logits(hidden, dtype).float().flatten(0, 1), targets.flatten(), reduction="none")
        return (each * weights.flatten()).sum() / weights.sum()

    def tensors(self):
        """Returns the weights by the names that transformers gives them."""
        named = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.final_norm, "mtp.fc.weight": self.fc, "mtp.pre_fc_norm_embedding.weight": self.embed_norm,
                 "mtp.pre_fc_norm_hidden.weight": self.hidden_norm, "mtp.norm.weight": self.draft_norm}
        for prefix, layer in [*((f"model.layers.{i}.", layer) for i, layer in enumerate(self.layers)), ("mtp.layers.0.", self.draft)]:
            named.update({prefix + name: value for name, value in layer.names().items()})
        return named


@torch.no_grad()
def drafts(model, ids, attend, count):
    """Returns the greedy drafts for a text: [count, tokens - 1], where [n, p] is draft n + 1 after the tokens up to p +
    1, each computed as if the text ended there. ids: [1, tokens]; attend: causal attention over tokens - 1."""
    positions, pad = torch.arange(ids.shape[1] - 1, device=ids.device)[None], (1 - ids.shape[1]) % 64
    causal = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    hidden = model.hidden(F.pad(ids[:, :-1], (0, pad)), model.place(F.pad(positions, (0, pad), value=1), causal, torch.float32))[:, :positions.shape[1]]
    following, own, out = ids[:, 1:], [], []
    for n in range(count):
        hidden, own = model.step_ahead(hidden, following, model.place(positions + n, attend, torch.float32), own)
        following = model.logits(hidden, torch.float32).argmax(-1)
        out.append(following[0])
    return torch.stack(out)
