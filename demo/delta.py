"""The gated delta rule over whole rows, forward and backward: the core of a linear-attention layer of Qwen3.5.

For each value head, with a state S of [DK, DV] that is initially zero, and for each token t

    S <- exp(g_t) S;   d = beta_t (v_t - S'k_t);   S <- S + k_t d';   o_t = S'q_t

`recurrent` computes these formulas directly. The other two functions compute a chunk of C tokens at a time. With G_i
the sum of g up to token i of the chunk, D_ij = exp(G_i - G_j) for i >= j, and S the state before the chunk:

    A = strictly lower part of beta_i (k_i.k_j) D_ij      T = inverse of I + A        P_ij = (q_i.k_j) D_ij, i >= j
    R_i = beta_i (v_i - exp(G_i) S'k_i)                   N = T R                     (N: the d of each token)
    o_i = exp(G_i) S'q_i + (P N)_i                        S <- exp(G_C) S + sum_i exp(G_C - G_i) k_i N_i'

`chunked` is plain torch (on any device, differentiated by torch). `delta_rule` uses Triton kernels for a GPU, whose
matrix products have the type of the inputs and f32 accumulators. In a row with several documents, g is RESET at the
first token of each document.

Shapes: q, k [rows, tokens, key heads, DK], v [rows, tokens, value heads, DV], g and beta f32 [rows, tokens, value
heads]. The number of tokens is a multiple of C, and the number of value heads is a multiple of the number of key heads.
The caller normalizes q and k, and scales q. Value head h uses key head h // (value heads / key heads).
"""

import torch

RESET = -64.0  # exp(RESET) is negligible beside 1, and a sum that contains a few RESETs is precise enough in f32
C = 32

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def recurrent(q, k, v, g, beta):
    """Computes the rule token by token. Differentiable, but slow."""
    share = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(share, 2).float() for x in (q, k))
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], device=v.device)
    out = []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t].float() - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * change[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def chunked(q, k, v, g, beta, size=64):
    """Computes the rule chunk by chunk, in f32."""
    b, t, h, _ = v.shape
    share = h // k.shape[2]
    q, k = (x.repeat_interleave(share, 2) for x in (q, k))
    q, k, v = (x.float().transpose(1, 2).unflatten(2, (t // size, size)) for x in (q, k, v))
    sums, beta = (x.float().transpose(1, 2).unflatten(2, (t // size, size)) for x in (g, beta))
    sums = sums.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    decay = (sums[..., :, None] - sums[..., None, :]).masked_fill(~lower, -1e30).exp()
    a = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    p = (q @ k.mT) * decay
    e, rest, whole = sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None], sums[..., -1].exp()[..., None, None]
    state = torch.zeros(b, h, k.shape[-1], v.shape[-1], device=v.device)
    out = []
    for n in range(t // size):
        r = beta[:, :, n, :, None] * (v[:, :, n] - e[:, :, n] * (k[:, :, n] @ state))
        change = torch.linalg.solve_triangular(a[:, :, n], r, upper=False, unitriangular=True)
        out.append(e[:, :, n] * (q[:, :, n] @ state) + p[:, :, n] @ change)
        state = whole[:, :, n] * state + (k[:, :, n] * rest[:, :, n]).mT @ change
    return torch.cat(out, 2).transpose(1, 2)


if triton is not None:
    @triton.jit
    def prepare_kernel(K, LOG, BETA, SUMS, T, length, KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, C: tl.constexpr):
        """Computes one chunk of one value head: the sums of g, and T by forward substitution (on A transposed, row by
        row)."""
        n, row, head = tl.program_id(0), tl.program_id(1) // VH, tl.program_id(1) % VH
        i, d = tl.arange(0, C), tl.arange(0, DK)
        token = row * length + n * C + i
        k = tl.load(K + (token[:, None] * KH + head // (VH // KH)) * DK + d[None, :])
        beta = tl.load(BETA + token * VH + head)
        sums = tl.cumsum(tl.load(LOG + token * VH + head), 0)
        tl.store(SUMS + token * VH + head, sums)
        later = i[:, None] < i[None, :]
        a = tl.dot(k, tl.trans(k)) * beta[None, :] * tl.exp(tl.where(later, sums[None, :] - sums[:, None], -1e30))
        t = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for at in range(1, C):
            column = tl.sum(tl.where(i[None, :] == at, a, 0.0), 1)
            t = tl.where(i[:, None] == at, t - tl.sum(column[:, None] * t, 0)[None, :], t)
        tl.store(T + ((tl.program_id(1) * (length // C) + n) * C + i[:, None]) * C + i[None, :], t.to(k.dtype))

    @triton.jit
    def forward_kernel(Q, K, V, BETA, SUMS, T, O, S, length, KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr):
        """Computes one value head of one row, chunk by chunk, and stores the state at the start of each chunk."""
        row, head = tl.program_id(0) // VH, tl.program_id(0) % VH
        i, dk, dv = tl.arange(0, C), tl.arange(0, DK), tl.arange(0, DV)
        lower = i[:, None] >= i[None, :]
        s = tl.zeros([DK, DV], tl.float32)
        for n in range(length // C):
            token = row * length + n * C + i
            key = (token[:, None] * KH + head // (VH // KH)) * DK + dk[None, :]
            value = (token[:, None] * VH + head) * DV + dv[None, :]
            block = tl.program_id(0) * (length // C) + n
            q, k, v = tl.load(Q + key), tl.load(K + key), tl.load(V + value)
            beta, sums = tl.load(BETA + token * VH + head), tl.load(SUMS + token * VH + head)
            last = tl.load(SUMS + (row * length + n * C + C - 1) * VH + head)
            t = tl.load(T + (block * C + i[:, None]) * C + i[None, :])
            e = tl.exp(sums)[:, None]
            state = s.to(k.dtype)
            tl.store(S + (block * DK + dk[:, None]) * DV + dv[None, :], state)
            r = beta[:, None] * (v.to(tl.float32) - e * tl.dot(k, state))
            change = tl.dot(t, r.to(k.dtype)).to(k.dtype)
            p = tl.dot(q, tl.trans(k)) * tl.exp(tl.where(lower, sums[:, None] - sums[None, :], -1e30))
            tl.store(O + value, (e * tl.dot(q, state) + tl.dot(p.to(k.dtype), change)).to(v.dtype))
            rest = (k.to(tl.float32) * tl.exp(last - sums)[:, None]).to(k.dtype)
            s = tl.exp(last) * s + tl.dot(tl.trans(rest), change)

    @triton.jit
    def backward_kernel(Q, K, V, BETA, SUMS, T, S, DO, DQ, DKEY, DVALUE, DBETA, DLOG, length,
                        KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr):
        """Computes one value head of one row, from the last chunk to the first. `ds` is the gradient of the state after
        the chunk."""
        row, head = tl.program_id(0) // VH, tl.program_id(0) % VH
        i, dk, dv = tl.arange(0, C), tl.arange(0, DK), tl.arange(0, DV)
        lower, below = i[:, None] >= i[None, :], i[:, None] > i[None, :]
        ds = tl.zeros([DK, DV], tl.float32)
        for back in range(length // C):
            n = length // C - 1 - back
            token = row * length + n * C + i
            key = (token[:, None] * KH + head // (VH // KH)) * DK + dk[None, :]
            value = (token[:, None] * VH + head) * DV + dv[None, :]
            block = tl.program_id(0) * (length // C) + n
            q, k, v, do = tl.load(Q + key), tl.load(K + key), tl.load(V + value), tl.load(DO + value)
            beta, sums = tl.load(BETA + token * VH + head), tl.load(SUMS + token * VH + head)
            last = tl.load(SUMS + (row * length + n * C + C - 1) * VH + head)
            t = tl.load(T + (block * C + i[:, None]) * C + i[None, :])
            s = tl.load(S + (block * DK + dk[:, None]) * DV + dv[None, :])
            e, rest = tl.exp(sums)[:, None], tl.exp(last - sums)[:, None]
            decay = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], -1e30))
            kk = tl.dot(k, tl.trans(k)) * tl.where(below, decay, 0.0)
            p = tl.dot(q, tl.trans(k)) * decay
            seen = e * tl.dot(k, s)
            r = v.to(tl.float32) - seen  # R without the factor beta
            change = tl.dot(t, (beta[:, None] * r).to(k.dtype)).to(k.dtype)
            after = ds.to(k.dtype)
            # Backpropagates first through the output and the next state, which depend on P, N, Q, K and S; then through
            # N, which depends on T and R; then through T, which depends on A.
            dchange = tl.dot(tl.trans(p).to(k.dtype), do) + rest * tl.dot(k, after)
            dr = tl.dot(tl.trans(t), dchange.to(k.dtype))
            dp = tl.where(lower, tl.dot(do, tl.trans(change)), 0.0)
            da = tl.where(below, -tl.dot(dr.to(k.dtype), tl.trans(change)), 0.0)
            dqk, dkk = (dp * decay).to(k.dtype), (da * decay * beta[:, None]).to(k.dtype)
            dseen = -beta[:, None] * dr
            dstate = (dseen * e).to(k.dtype)
            read = e * tl.dot(do, tl.trans(s))  # the part of dQ that comes through S
            kept = rest * tl.dot(change, tl.trans(after))  # the part of dK that comes through the next state
            tl.store(DQ + (token[:, None] * VH + head) * DK + dk[None, :], (read + tl.dot(dqk, k)).to(k.dtype))
            dkey = tl.dot(tl.trans(dqk), q) + kept + tl.dot(dstate, tl.trans(s)) + tl.dot(dkk, k) + tl.dot(tl.trans(dkk), k)
            tl.store(DKEY + (token[:, None] * VH + head) * DK + dk[None, :], dkey.to(k.dtype))
            tl.store(DVALUE + value, (beta[:, None] * dr).to(v.dtype))
            tl.store(DBETA + token * VH + head, tl.sum(dr * r, 1) + tl.sum(da * kk, 1))
            both = da * kk * beta[:, None] + dp * p
            carried = tl.sum(k.to(tl.float32) * kept, 1)
            dsums = tl.sum(both, 1) - tl.sum(both, 0) + tl.sum(dseen * seen, 1) + tl.sum(q.to(tl.float32) * read, 1) - carried
            dlast = tl.exp(last) * tl.sum(tl.sum(ds * s.to(tl.float32), 1), 0) + tl.sum(carried, 0)
            tl.store(DLOG + token * VH + head, dlast + tl.sum(dsums, 0) - tl.cumsum(dsums, 0) + dsums)
            ds = tl.exp(last) * ds + tl.dot(tl.trans((q.to(tl.float32) * e).to(k.dtype)), do) + tl.dot(tl.trans(k), dstate)


def sizes(k, v):
    return {"KH": k.shape[2], "VH": v.shape[2], "DK": k.shape[3], "DV": v.shape[3], "C": C}


@torch.library.custom_op("demo::delta", mutates_args=())
def forward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the output and, for the backward pass, the sums of g, T of each chunk and the state before each chunk."""
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    (rows, length, heads, _), s = v.shape, sizes(k, v)
    out, sums = torch.empty_like(v), torch.empty_like(g)
    t, states = v.new_empty(rows * heads * length // C, C, C), v.new_empty(rows * heads * length // C, s["DK"], s["DV"])
    prepare_kernel[(length // C, rows * heads)](k, g, beta, sums, t, length, s["KH"], s["VH"], s["DK"], C, num_warps=1)
    forward_kernel[(rows * heads,)](q, k, v, beta, sums, t, out, states, length, **s, num_warps=1, num_stages=1)
    return out, sums, t, states


@forward_op.register_fake
def _(q, k, v, g, beta):
    count = v.shape[0] * v.shape[2] * v.shape[1] // C
    return v.new_empty(v.shape), g.new_empty(g.shape), v.new_empty(count, C, C), v.new_empty(count, k.shape[3], v.shape[3])


@torch.library.custom_op("demo::delta_backward", mutates_args=())
def backward_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, sums: torch.Tensor, t: torch.Tensor, states: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, beta, dout = (x.contiguous() for x in (q, k, v, beta, dout))
    (rows, length, heads, _), s = v.shape, sizes(k, v)
    dq, dk = v.new_empty(rows, length, heads, s["DK"]), v.new_empty(rows, length, heads, s["DK"])
    dv, dbeta, dg = torch.empty_like(v), torch.empty_like(beta), torch.empty_like(beta)
    backward_kernel[(rows * heads,)](q, k, v, beta, sums, t, states, dout, dq, dk, dv, dbeta, dg, length, **s, num_warps=2, num_stages=1)
    dq, dk = (x.unflatten(2, (s["KH"], heads // s["KH"])).float().sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta


@backward_op.register_fake
def _(q, k, v, beta, sums, t, states, dout):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), beta.new_empty(beta.shape), beta.new_empty(beta.shape)


def remember(ctx, inputs, output):
    q, k, v, _, beta = inputs
    ctx.save_for_backward(q, k, v, beta, *output[1:])


forward_op.register_autograd(lambda ctx, dout, *_: backward_op(*ctx.saved_tensors, dout), setup_context=remember)


def delta_rule(q, k, v, g, beta):
    return forward_op(q, k, v, g, beta)[0]
