"""The target: a small Llama. Positions are an argument, the cache is two tensors a layer.

Because the position of every token is data, not a counter hidden in a cache, one `forward` serves
training, prefill, plain decoding and the verification of a whole block, at any split of the text.

Letters, the same in every file:

    B  rows (sequences) of a batch       L  rows of a cache, at least context + S
    T  training window, tokens           C  width
    P  prompt, tokens                    H  query heads      G  key/value heads (G divides H)
    S  slots in a block (8)              D  head size
    K  proposals in a block, S - 1       V  vocabulary
    N  anchors in a window

Words, the same in every file:

    A           the pending token: emitted, but not yet processed by the target
    T1 .. TK    the proposals for the tokens after A; slot j of a block stands at position pos + j
    state       the target's last hidden vector after the final norm: just what lm_head multiplies
    taps        residual streams after chosen layers, side by side, un-normed: what a drafter reads

Source: the architecture of the public Llama models (RMSNorm, rotate-half RoPE, SwiGLU, no biases),
under their parameter names, with the output matrix apart from the embedding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

MAX_SLOTS = 16  # the longest block a round may verify: RoPE tables reach so far past the context


@dataclass(frozen=True)
class Config:
    vocab_size: int              # V
    context: int                 # T in training, and the longest text (prompt included) in decoding
    n_layer: int
    width: int                   # C
    n_head: int                  # H
    n_kv_head: int               # G: fewer than H is grouped-query attention
    head_dim: int                # D, even
    mlp_width: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head is {self.n_kv_head}, it must divide n_head {self.n_head}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, RoPE rotates pairs: make it even")


# name: (n_layer, width, n_head, head_dim, mlp_width, context)
SIZES = {
    "tiny": (6, 160, 5, 32, 448, 256),
    "6m": (6, 192, 3, 64, 512, 512),
    "10m": (8, 256, 4, 64, 704, 512),
    "28m": (12, 384, 6, 64, 1024, 512),
    "59m": (16, 512, 8, 64, 1376, 512),
}


def preset(size: str, vocab_size: int) -> Config:
    """The configuration of a named size. The sources give totals only; these widths match them."""
    n_layer, width, n_head, head_dim, mlp_width, context = SIZES[size]
    return Config(vocab_size, context, n_layer, width, n_head, n_head, head_dim, mlp_width)


# ----------------------------------------------------------------------------------------------
# positions, masks, caches


def rope_tables(cfg: Config) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, (context + MAX_SLOTS, D) each, made in float64 once.

    A table and not a formula in forward: the same position then gets the same bits wherever its
    token stands in a batch or a block.
    """
    exponent = torch.arange(0, cfg.head_dim, 2, dtype=torch.float64) / cfg.head_dim  # (D / 2,)
    frequency = cfg.rope_theta ** -exponent
    angle = torch.arange(cfg.context + MAX_SLOTS, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)  # (context + MAX_SLOTS, D): i pairs with i + D/2
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, S, heads, D) turned by its positions; rope is cos, sin (B or 1, S, 1, D)."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Rows(NamedTuple):
    """One layer's cache and where this call writes: row = position, for every row of the batch."""

    k: Tensor          # (B, L, G, D)
    v: Tensor          # (B, L, G, D)
    positions: Tensor  # (B, S) rows to write
    kv_len: int        # rows to read: [0, kv_len)

    def write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, S, G, D) in place and give back the live part of the cache.

        A rejected token costs nothing here: its row is stale, no query reaches it (masks go by
        position), and the next block overwrites it. Serving engines with paged caches need
        scratch pages for this.
        """
        b = torch.arange(k.size(0), device=k.device)[:, None]  # (B, 1)
        self.k[b, self.positions] = k
        self.v[b, self.positions] = v
        return self.k[:, :self.kv_len], self.v[:, :self.kv_len]


KV = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # keys and values, (B, L, G, D) a layer


def new_cache(cfg: Config, n_layer: int, n_rows: int, length: int, like: Tensor) -> KV:
    """Keys and values of n_layer layers, (B, L, G, D) each; dtype and device are `like`'s.

    Zeros, not empty: a NaN in a row that nobody wrote leaks through a mask, since 0 x NaN is NaN.
    A tensor a layer, not one for all: a compiled step would copy all of that for every layer.
    """
    shape = (n_rows, length, cfg.n_kv_head, cfg.head_dim)
    keys, values = (tuple(like.new_zeros(shape) for _ in range(n_layer)) for _ in range(2))
    return keys, values


def causal_mask(positions: Tensor, kv_len: int) -> Tensor:
    """True where a query at positions (B, S) may see cache row j <= its own: (B, 1, S, kv_len)."""
    column = torch.arange(kv_len, device=positions.device)
    return column <= positions[:, None, :, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q (B, S, H, D) over k, v (B, L, G, D): (B, S, H D). No mask: causal, L = S."""
    B, S, H, D = q.shape
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, rows, D)
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=H != k.size(1))
    return y.transpose(1, 2).reshape(B, S, H * D)


# ----------------------------------------------------------------------------------------------
# layers

FEW_ROWS = 64                      # for more, W x' is no faster
SUM_ROWS, SUM_ROWS_BF16 = 8, 2     # as many sums as a CPU has registers, or time, for


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (.., n_in) times the transpose of weight (n_out, n_in): (.., n_out), as F.linear.

    For the few rows of decoding a CPU's library is two to three times as fast at W x' as at x W'
    (W: weight), if it is not one row, which goes twice. Compiled, up to a block of eight rows are
    sums of products: one loop, which reads the weights once. In bfloat16 only one or two are
    faster so. README, "What was found and done", has the figures.
    """
    n, low = x.numel() // x.size(-1), x.dtype == torch.bfloat16
    if x.device.type != "cpu" or n > FEW_ROWS or torch.is_grad_enabled():
        return F.linear(x, weight)
    rows = x.reshape(n, x.size(-1))
    if n <= (SUM_ROWS_BF16 if low else SUM_ROWS) and torch.compiler.is_compiling():
        y = torch.stack([(weight * row).sum(dim=-1) for row in rows])
        return y.view(*x.shape[:-1], weight.size(0))
    if low:
        return F.linear(x, weight)
    rows = torch.cat((rows, rows)) if n == 1 else rows
    return (weight @ rows.T)[:, :n].T.reshape(*x.shape[:-1], weight.size(0))


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its gain: torch has none for bfloat16, from autocast, and a gain in
    float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Linear(nn.Linear):
    """A matrix without bias. Several of the same input can be `joined` for decoding."""

    joined: Tensor | None  # (n_out of all, n_in), at the first of them

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)
        # a buffer, so that a compiler may take it for a constant, as it does weights
        self.register_buffer("joined", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


def side_by_side(x: Tensor, *layers: Linear) -> tuple[Tensor, ...]:
    """Every layer's product with x; one product where they are joined."""
    joined = layers[0].joined
    if joined is None:
        return tuple(layer(x) for layer in layers)
    return product(x, joined).split([layer.out_features for layer in layers], dim=-1)


def join_projections(*models: nn.Module) -> None:
    """For decoding: q, k, v, and gate and up, become views of one matrix, so that a step is fewer
    products. To be called when weights have their device and dtype. Loading others in place works,
    but no more after .to(), in a copy, or with assign=True: what is joined would keep the old ones.
    """
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, Attention):
            join(module.q_proj, module.k_proj, module.v_proj)
            module.k_proj.joined = module.q_proj.joined[module.q_proj.out_features:]
        elif isinstance(module, MLP):
            join(module.gate_proj, module.up_proj)


def join(*layers: Linear) -> None:
    joined = torch.cat([layer.weight.detach() for layer in layers])
    for layer, part in zip(layers, joined.split([layer.out_features for layer in layers])):
        layer.weight = nn.Parameter(part, requires_grad=False)
    layers[0].joined = joined


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; qk_norm is Qwen3's form, for the drafter."""

    def __init__(self, cfg: Config, qk_norm: bool):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.q_proj = Linear(cfg.width, cfg.n_head * cfg.head_dim)
        self.k_proj = Linear(cfg.width, cfg.n_kv_head * cfg.head_dim)
        self.v_proj = Linear(cfg.width, cfg.n_kv_head * cfg.head_dim)
        self.o_proj = Linear(cfg.n_head * cfg.head_dim, cfg.width)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if qk_norm else nn.Identity()

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, S, H, D) and k, v (B, S, G, D) of x (B, S, C), at the positions of rope."""
        q, k, v = self.heads(side_by_side(x, self.q_proj, self.k_proj, self.v_proj))
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """k, v alone, of vectors that are only looked at."""
        k, v = self.heads(side_by_side(x, self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), rope), v

    def heads(self, vectors: tuple[Tensor, ...]) -> list[Tensor]:
        """(B, S, heads D) each -> (B, S, heads, D) each."""
        return [y.unflatten(-1, (-1, self.head_dim)) for y in vectors]

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None = None,
                cache: Rows | None = None) -> Tensor:
        """Attention of x (B, S, C) over itself, or over a cache after storing itself there."""
        q, k, v = self.project(x, rope)
        if cache is not None:
            k, v = cache.write(k, v)  # (B, kv_len, G, D)
        return self.o_proj(attend(q, k, v, mask))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.gate_proj = Linear(cfg.width, cfg.mlp_width)
        self.up_proj = Linear(cfg.width, cfg.mlp_width)
        self.down_proj = Linear(cfg.mlp_width, cfg.width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm decoder layer: the target's, the MTP head's and (with qk_norm) the drafter's."""

    def __init__(self, cfg: Config, qk_norm: bool = False):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.width, cfg.norm_eps)
        self.self_attn = Attention(cfg, qk_norm)
        self.post_attention_layernorm = RMSNorm(cfg.width, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None = None,
                cache: Rows | None = None) -> Tensor:
        """x (B, S, C) after one layer."""
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


# ----------------------------------------------------------------------------------------------
# the model


class Llama(nn.Module):
    """The target. `forward` gives states; `lm_head(states)` gives logits.

    Its parameters carry the names of the public LlamaForCausalLM (to_public).
    """

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.width)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.lm_head = Linear(cfg.width, cfg.vocab_size)
        cos, sin = rope_tables(cfg)
        self.register_buffer("cos", cos.float(), persistent=False)  # (context + MAX_SLOTS, D)
        self.register_buffer("sin", sin.float(), persistent=False)
        init_weights(self, cfg.n_layer)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin (B or 1, S, 1, D) at positions (B or 1, S)."""
        return self.cos[positions][:, :, None], self.sin[positions][:, :, None]

    def forward(self, tokens: Tensor, positions: Tensor | None = None,
                kv: KV | None = None, kv_len: int = 0,
                tap_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """States (B, S, C) of tokens (B, S), and taps (B, S, n_tap C), in layer order, or None.

        Without kv: the whole text at once, causal. With kv: the tokens are written to the cache
        rows of their positions (B, S), and read rows [0, kv_len) up to their own position.
        """
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)[None]  # (1, S)
        rope = self.rope(positions)
        mask = None if kv is None else causal_mask(positions, kv_len)
        x = self.embed_tokens(tokens)  # (B, S, C)
        taps = []
        for i, layer in enumerate(self.layers):
            cache = None if kv is None else Rows(kv[0][i], kv[1][i], positions, kv_len)
            x = layer(x, rope, mask, cache)
            if i in tap_layers:
                taps.append(x)
        return self.norm(x), torch.cat(taps, dim=-1) if taps else None


def init_weights(module: nn.Module, n_layer: int) -> None:
    """As GPT-2: N(0, 0.02), and 1/sqrt(2 n_layer) of that where a branch joins the residual."""
    for name, p in module.named_parameters():
        if p.dim() < 2:
            continue  # norm gains start at one
        joins = name.endswith(("o_proj.weight", "down_proj.weight"))
        nn.init.normal_(p, std=0.02 / math.sqrt(2 * n_layer) if joins else 0.02)


def to_public(target: Llama) -> tuple[dict, dict[str, Tensor]]:
    """The settings of a public LlamaConfig, and the weights of its LlamaForCausalLM."""
    cfg = target.cfg
    settings = dict(
        vocab_size=cfg.vocab_size, hidden_size=cfg.width, intermediate_size=cfg.mlp_width,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, head_dim=cfg.head_dim,
        num_key_value_heads=cfg.n_kv_head, rms_norm_eps=cfg.norm_eps, tie_word_embeddings=False,
        max_position_embeddings=cfg.context, rope_theta=cfg.rope_theta)
    weights = {name if name.startswith("lm_head") else f"model.{name}": weight
               for name, weight in target.state_dict().items()}
    return settings, weights


# ----------------------------------------------------------------------------------------------
# losses over a large vocabulary


MAX_LOGITS = 1 << 25  # at a time: 134 MB in float32


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or as it is if that is more.

    subtle: autocast does not do this for a loss. On a GPU its cross_entropy, on a CPU its kl_div
    takes the log_softmax of bfloat16 logits in bfloat16.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def through_head(lm_head: nn.Linear, states: list[Tensor], loss_of: Callable,
                 max_logits: int = MAX_LOGITS) -> tuple[Tensor, Tensor]:
    """What loss_of gives, summed over windows: the loss (), and measures (k,) without gradient.

    loss_of(logits, part) takes a list of logits (b, rows, V), in float32 or better, one of each of
    the states (B, rows, C), and the slice of windows that they are of. With more than max_logits
    numbers the windows are taken a few at a time, or one, each part's gradient at once, and its
    logits are dropped: nothing of size (B, rows, V) is ever held. The gradients are those of the
    plain form.
    """
    B, n_rows = states[0].size(0), sum(x.size(1) for x in states)
    n = max(1, max_logits // (n_rows * lm_head.weight.size(0)))
    if n >= B:
        return loss_of([at_least_float32(lm_head(x)) for x in states], slice(0, B))
    return ChunkedHead.apply(lm_head.weight, loss_of, n, *states)


class ChunkedHead(torch.autograd.Function):
    """through_head, n windows at a time. Nothing is computed twice: forward makes the gradients of
    the states and of the weight, and backward only scales them."""

    @staticmethod
    def forward(ctx, weight: Tensor, loss_of: Callable, n: int, *states: Tensor):
        wants_weight = ctx.needs_input_grad[0]
        grads = [torch.zeros_like(weight) if wants_weight else None,
                 *(torch.empty_like(x) for x in states)]
        loss = measures = 0
        for first in range(0, states[0].size(0), n):
            part = slice(first, first + n)
            logits = [at_least_float32(F.linear(x[part], weight)).requires_grad_()
                      for x in states]
            with torch.enable_grad():
                part_loss, part_measures = loss_of(logits, part)
            for x, grad, z in zip(states, grads[1:], torch.autograd.grad(part_loss, logits)):
                grad[part] = z @ weight
                if wants_weight:
                    grads[0] += z.flatten(0, 1).T @ x[part].flatten(0, 1)
            loss, measures = loss + part_loss.detach(), measures + part_measures
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(measures)
        return loss, measures

    @staticmethod
    def backward(ctx, g: Tensor, _):
        weight, *states = (None if grad is None else g * grad for grad in ctx.saved_tensors)
        return weight, None, None, *states
