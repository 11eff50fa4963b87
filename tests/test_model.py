"""
Proves that the target is the Llama it says it is, and that a cache never changes what it computes:
a text may be cut anywhere, the rows of a batch may stand anywhere, and cache rows past the live
ones may hold anything. Each fast path is compared with a slow one, in float64.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from kit import every_layer, random_tokens, randomise, small_config, small_models
from torch import Tensor

from model import (KV, MAX_SLOTS, SUM_ROWS, SUM_ROWS_BF16, Config, Llama, attend, causal_mask,
                   join_projections, new_cache, preset, product, rope_tables, rotate, to_public)

N = 12        # tokens of the text
LENGTH = 20   # rows of the cache
TAPS = (0, 2)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def empty_cache(target: Llama, n_rows: int) -> tuple[Tensor, Tensor]:
    return new_cache(target.cfg, target.cfg.n_layer, n_rows, LENGTH, target.lm_head.weight)


def span(start: int, n: int, n_rows: int = 1) -> Tensor:
    """Positions start .. start + n - 1, the same in every row: (n_rows, n)."""
    return torch.arange(start, start + n).expand(n_rows, n)


def cached_forward(target: Llama, tokens: Tensor, chunks: list[int],
                   kv: KV) -> tuple[Tensor, Tensor]:
    """States and taps of tokens (B, S), sent through the cache chunk by chunk."""
    parts, start = [], 0
    for chunk in tokens.split(chunks, dim=1):
        n = chunk.size(1)
        parts.append(target(chunk, span(start, n, len(chunk)), kv, start + n, TAPS))
        start += n
    return tuple(torch.cat(column, dim=1) for column in zip(*parts))


# ----------------------------------------------------------------------------------------------
# the cache


@pytest.mark.parametrize("chunks", [[1] * N, [3] * 4, [N], [5, 1, 4, 2], [1, 11]])
def test_prefill_in_any_chunks_equals_one_forward_without_a_cache(chunks):
    target, _ = small_models()
    tokens = random_tokens(2, N)
    kv, kv_at_once = empty_cache(target, 2), empty_cache(target, 2)
    states, taps = cached_forward(target, tokens, chunks, kv)
    expected_states, expected_taps = target(tokens, tap_layers=TAPS)
    assert_close(states, expected_states)
    assert_close(taps, expected_taps)
    cached_forward(target, tokens, [N], kv_at_once)
    for part, at_once in zip(every_layer(kv), every_layer(kv_at_once)):
        assert_close(part, at_once)


@pytest.mark.parametrize("n_cached", [0, 1, 7])
@pytest.mark.parametrize("n_slots", [1, 2, 8])
@pytest.mark.parametrize("spare", [0, 4])
def test_a_block_over_cached_rows_equals_those_rows_of_one_full_forward(n_cached, n_slots, spare):
    target, _ = small_models()
    tokens = random_tokens(2, n_cached + n_slots)
    kv = empty_cache(target, 2)
    if n_cached:
        target(tokens[:, :n_cached], span(0, n_cached, 2), kv, n_cached)
    kv_len = n_cached + n_slots + spare  # rows that nobody wrote may be in reach
    states, _ = target(tokens[:, n_cached:], span(n_cached, n_slots, 2), kv, kv_len)
    assert_close(states, target(tokens)[0][:, n_cached:])


def test_rows_of_one_batch_may_stand_at_different_positions():
    target, _ = small_models()
    lengths, n_slots = [9, 4, 1], 5
    texts = [random_tokens(1, n + n_slots, seed=n) for n in lengths]
    kv = empty_cache(target, 3)
    # shorter prompts are padded with token 0, whose rows the block has to overwrite
    prompts = torch.zeros(3, 9, dtype=torch.long)
    for row, (text, n) in enumerate(zip(texts, lengths)):
        prompts[row, :n] = text[0, :n]
    target(prompts, span(0, 9, 3), kv, 9)
    block = torch.cat([text[:, n:] for text, n in zip(texts, lengths)])
    positions = torch.cat([span(n, n_slots) for n in lengths])
    states, _ = target(block, positions, kv, kv_len=9 + n_slots)
    for row, (text, n) in enumerate(zip(texts, lengths)):
        assert_close(states[row], target(text)[0][0, n:])


def huge_numbers(target: Llama, kv: KV) -> None:
    for k, v in zip(*kv):
        k.fill_(1e30)
        v.fill_(-1e30)


def rows_of_an_earlier_longer_text(target: Llama, kv: KV) -> None:
    target(random_tokens(2, LENGTH, seed=9), span(0, LENGTH, 2), kv, LENGTH)


@pytest.mark.parametrize("chunks", [[1] * N, [N], [5, 1, 4, 2]])
@pytest.mark.parametrize("poison", [huge_numbers, rows_of_an_earlier_longer_text])
def test_what_cache_rows_past_the_live_ones_hold_changes_no_bit(poison, chunks):
    target, _ = small_models()
    tokens = random_tokens(2, N)
    results = []
    for spoil in (lambda *_: None, poison):
        kv, start, states = empty_cache(target, 2), 0, []
        spoil(target, kv)
        for chunk in tokens.split(chunks, dim=1):
            # all 20 rows are in reach, so only the mask stands between a query and the poison
            states.append(target(chunk, span(start, chunk.size(1), 2), kv, LENGTH)[0])
            start += chunk.size(1)
        results.append(torch.cat(states, dim=1))
    assert torch.equal(*results)
    assert_close(results[0], target(tokens)[0])


def test_a_new_cache_is_zeros_in_the_dtype_it_is_told():
    cfg = small_config()
    shape = (2, 11, cfg.n_kv_head, cfg.head_dim)
    like = torch.zeros(1, dtype=torch.float64)
    # memory that was just given back, full of NaN: where an uninitialised cache would come from
    used = [torch.full(shape, math.nan, dtype=like.dtype) for _ in range(8)]
    del used
    layers = every_layer(new_cache(cfg, 3, 2, 11, like))
    assert len({layer.data_ptr() for layer in layers}) == 2 * 3
    for layer in layers:
        assert layer.shape == shape and layer.dtype == like.dtype and not layer.any()


def test_a_block_at_the_end_of_the_context_has_positions_too():
    short = randomise(Llama(small_config(context=8)), 0)
    long = randomise(Llama(small_config(context=8 + MAX_SLOTS)), 0)
    tokens = random_tokens(1, 8 + MAX_SLOTS)
    assert torch.equal(short(tokens)[0], long(tokens)[0])


# ----------------------------------------------------------------------------------------------
# attention and positions


def attend_by_loops(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """attend as its definition: one row, one head, one query at a time. mask is (B, S, L)."""
    B, S, H, D = q.shape
    G = k.size(2)
    y = q.new_zeros(B, S, H, D)
    for b, h, i in itertools.product(range(B), range(H), range(S)):
        g = h // (H // G)  # neighbouring query heads share a key/value head
        seen = [j for j in range(k.size(1)) if mask[b, i, j]]
        weights = [math.exp((q[b, i, h] @ k[b, j, g]).item() / math.sqrt(D)) for j in seen]
        for weight, j in zip(weights, seen):
            y[b, i, h] += weight / sum(weights) * v[b, j, g]
    return y.reshape(B, S, H * D)


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("kind", ["no mask is causal", "by position", "any mask"])
def test_attention_equals_its_definition_in_loops(kind, n_kv_head):
    random = torch.Generator().manual_seed(5)
    S, L = (5, 5) if kind == "no mask is causal" else (5, 7)
    q = torch.randn(2, S, 4, 8, generator=random, dtype=torch.float64)
    k, v = torch.randn(2, 2, L, n_kv_head, 8, generator=random, dtype=torch.float64)
    if kind == "no mask is causal":
        mask, expected_mask = None, torch.ones(2, S, S).tril().bool()
    elif kind == "by position":
        positions = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]])
        mask = causal_mask(positions, L)
        seen = [[[j <= p for j in range(L)] for p in row] for row in positions.tolist()]
        expected_mask = torch.tensor(seen)
    else:
        expected_mask = torch.rand(2, S, L, generator=random) < 0.5
        expected_mask[:, :, 3] = True  # a query that sees nothing has no average
        mask = expected_mask[:, None]
    assert_close(attend(q, k, v, mask), attend_by_loops(q, k, v, expected_mask))


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_grouped_heads_equal_a_model_whose_key_value_heads_are_repeated(n_kv_head):
    grouped = randomise(Llama(small_config(n_kv_head=n_kv_head)), 0)
    full = Llama(small_config(n_kv_head=4)).double()
    weights = grouped.state_dict()
    for name, w in weights.items():
        if "k_proj" in name or "v_proj" in name:
            heads = w.unflatten(0, (n_kv_head, -1))  # (G, D, C)
            weights[name] = heads.repeat_interleave(4 // n_kv_head, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = random_tokens(2, N)
    assert_close(grouped(tokens)[0], full(tokens)[0])
    states, _ = cached_forward(grouped, tokens, [5, 7], empty_cache(grouped, 2))
    assert_close(states, full(tokens)[0])


def test_rotation_is_multiplication_by_a_complex_number():
    cfg = small_config()
    cos, sin = rope_tables(cfg)
    x = torch.randn(cfg.head_dim, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for position in (0, 1, 30):
        table = cos[position][None, None, None], sin[position][None, None, None]
        turned = rotate(x[None, None, None], table)[0, 0, 0]
        for i in range(cfg.head_dim // 2):
            angle = position * cfg.rope_theta ** (-2 * i / cfg.head_dim)
            j = i + cfg.head_dim // 2
            number = complex(x[i], x[j]) * complex(math.cos(angle), math.sin(angle))
            assert turned[i].item() == pytest.approx(number.real, abs=1e-12)
            assert turned[j].item() == pytest.approx(number.imag, abs=1e-12)


def test_the_model_sees_differences_of_positions_only():
    target, _ = small_models()
    target.cos, target.sin = rope_tables(target.cfg)  # without their rounding to float32
    tokens = random_tokens(1, N)
    states, _ = target(tokens)
    assert_close(target(tokens, span(9, N))[0], states)
    stretched, _ = target(tokens, 2 * span(0, N))
    assert (stretched - states).abs().max() > 0.01


@pytest.mark.parametrize("i", [0, 1, 6, N - 1])
def test_changing_a_token_leaves_every_earlier_state_bit_for_bit(i):
    target, _ = small_models()
    tokens = random_tokens(2, N)
    changed = tokens.clone()
    changed[:, i] = (changed[:, i] + 1) % 23
    states, changed_states = target(tokens)[0], target(changed)[0]
    assert torch.equal(states[:, :i], changed_states[:, :i])
    moved = (states[:, i:] - changed_states[:, i:]).abs().amax(dim=-1)  # (B, N - i)
    assert (moved > 1e-6).all()


def test_taps_are_the_outputs_of_the_named_layers_before_any_norm():
    target, _ = small_models()
    tokens = random_tokens(2, N)
    x, outputs = target.embed_tokens(tokens), []
    for layer in target.layers:
        x = layer(x, target.rope(span(0, N)))
        outputs.append(x)
    for tap_layers in [(0,), (3,), (0, 2), (1, 2, 3)]:
        states, taps = target(tokens, tap_layers=tap_layers)
        assert torch.equal(taps, torch.cat([outputs[i] for i in tap_layers], dim=-1))
        assert torch.equal(states, target.norm(outputs[-1]))
    assert target(tokens)[1] is None


# ----------------------------------------------------------------------------------------------
# configuration, names, sizes


@pytest.mark.parametrize("change, message", [
    (dict(n_kv_head=3), "n_kv_head is 3, it must divide n_head 4"),
    (dict(n_kv_head=8), "n_kv_head is 8, it must divide n_head 4"),
    (dict(head_dim=7), "head_dim is 7"),
])
def test_head_counts_that_cannot_work_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        small_config(**change)


@pytest.mark.parametrize("size, vocab_size, millions", [
    ("6m", 8192, 5.8), ("10m", 8192, 10.6), ("28m", 8192, 27.5), ("59m", 8192, 59.0),
    ("28m", 50257, 59.8),
])
def test_named_sizes_have_the_totals_of_the_sources(size, vocab_size, millions):
    with torch.device("meta"):
        target = Llama(preset(size, vocab_size))
    assert round(sum(p.numel() for p in target.parameters()) / 1e6, 1) == millions


def test_a_fresh_model_is_gpt2s_initialisation():
    n_layer = 8
    target = Llama(Config(500, 16, n_layer, 128, 4, 4, 32, 256))
    for name, p in target.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), name
            continue
        joins = "o_proj" in name or "down_proj" in name  # these two add to the residual stream
        assert p.std().item() == pytest.approx(0.005 if joins else 0.02, rel=0.05), name


def test_parameters_carry_the_names_of_llama_for_causal_lm():
    names = [name if name.startswith("lm_head") else f"model.{name}"
             for name in Llama(small_config(n_layer=1)).state_dict()]
    assert sorted(names) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.norm.weight",
    ]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def llama_by_definition(w: dict[str, Tensor], cfg: Config, tokens: Tensor) -> Tensor:
    """Logits (B, S, V) from a state_dict, with nothing of model.py but the names and the rotation
    that a test above proves."""
    B, S = tokens.shape
    rope = [table[None, :S, None] for table in rope_tables(cfg)]  # (1, S, 1, D)
    causal = torch.ones(B, S, S).tril().bool()
    x = w["embed_tokens.weight"][tokens]  # (B, S, C)
    for i in range(cfg.n_layer):
        layer = {name.removeprefix(f"layers.{i}."): p for name, p in w.items()}
        y = rms_norm(x, layer["input_layernorm.weight"], cfg.norm_eps)
        q, k, v = ((y @ layer[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, cfg.head_dim))
                   for part in "qkv")  # (B, S, heads, D)
        y = attend_by_loops(rotate(q, rope), rotate(k, rope), v, causal)
        x = x + y @ layer["self_attn.o_proj.weight"].T
        y = rms_norm(x, layer["post_attention_layernorm.weight"], cfg.norm_eps)
        gate, up = (y @ layer[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return rms_norm(x, w["norm.weight"], cfg.norm_eps) @ w["lm_head.weight"].T


def test_logits_equal_llama_by_its_definition():
    target, _ = small_models(cfg=small_config(n_layer=2, norm_eps=0.1))
    target.cos, target.sin = rope_tables(target.cfg)  # without their rounding to float32
    tokens = random_tokens(2, 6)
    expected = llama_by_definition(target.state_dict(), target.cfg, tokens)
    assert_close(target.lm_head(target(tokens)[0]), expected)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("rope_theta", [10000.0, 500.0])
def test_logits_equal_those_of_the_public_llama_with_the_same_weights(n_kv_head, rope_theta):
    transformers = pytest.importorskip("transformers")
    target, _ = small_models(cfg=small_config(n_kv_head=n_kv_head, rope_theta=rope_theta))
    settings, weights = to_public(target)
    public = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).double()
    public.load_state_dict(weights)
    tokens = random_tokens(2, 40)
    expected = public(tokens).logits
    # at any dtype the public model makes its angles and its norms in float32
    torch.testing.assert_close(target.lm_head(target(tokens)[0]), expected, rtol=0, atol=1e-4)
    cos, sin = public.model.rotary_emb(expected, torch.arange(40)[None])
    target.cos[:40], target.sin[:40] = cos[0], sin[0]
    for norm in [m for m in public.modules() if type(m).__name__ == "LlamaRMSNorm"]:
        norm.forward = lambda x, norm=norm: norm.weight * x * torch.rsqrt(
            x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    expected = public(tokens).logits
    torch.testing.assert_close(target.lm_head(target(tokens)[0]), expected, rtol=0, atol=1e-10)
    target.cos[7] += 1e-6  # what the tolerance would notice
    assert (target.lm_head(target(tokens)[0]) - expected).abs().max() > 1e-8


# ----------------------------------------------------------------------------------------------
# decoding: few rows, joined matrices


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 8), (64,), (65,), (2, 40), (1,), (), (0,),
                                   (2, 0)])
def test_a_product_is_that_of_the_plain_linear_map_for_any_number_of_rows(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, 24, generator=generator, dtype=torch.float64)
    weight = torch.randn(40, 24, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        y = product(x, weight)
    torch.testing.assert_close(y, F.linear(x, weight), rtol=1e-12, atol=1e-12)
    assert y.shape == (*shape, 40)


@pytest.mark.parametrize("n_rows", [1, 5, SUM_ROWS, SUM_ROWS + 1])
def test_a_compiled_product_of_few_rows_is_the_plain_one_as_sums_without_a_matrix_product(n_rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, n_rows, 24, generator=generator, dtype=torch.float64)
    weight = torch.randn(40, 24, generator=generator, dtype=torch.float64)
    code = []

    def backend(module, _):
        code.append(module.code)
        return module.forward

    with torch.no_grad():
        y = torch.compile(product, backend=backend, fullgraph=True, dynamic=False)(x, weight)
    torch.testing.assert_close(y, F.linear(x, weight), rtol=1e-12, atol=1e-12)
    assert code[0].count(".sum(") == (n_rows if n_rows <= SUM_ROWS else 0), code[0]
    assert ("@" in code[0] or "matmul" in code[0]) == (n_rows > SUM_ROWS), code[0]


@pytest.mark.parametrize("n_rows", [1, SUM_ROWS_BF16, SUM_ROWS_BF16 + 1])
def test_a_compiled_bfloat16_product_is_one_of_sums_for_the_few_rows_that_gain_by_it(n_rows):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_rows, 24, generator=generator).bfloat16()
    weight = torch.randn(40, 24, generator=generator).bfloat16()
    code = []

    def backend(module, _):
        code.append(module.code)
        return module.forward

    with torch.no_grad():
        y = torch.compile(product, backend=backend, fullgraph=True, dynamic=False)(x, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.linear(x, weight), rtol=2 ** -6, atol=2 ** -6)
    assert code[0].count(".sum(") == (n_rows if n_rows <= SUM_ROWS_BF16 else 0), code[0]


def test_a_product_has_gradients_where_they_are_wanted():
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    product(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is not None


def test_joined_projections_give_the_same_states_and_follow_new_weights():
    target, _ = small_models()
    other = small_models(seed=9)[0]
    tokens = random_tokens(2, 12)
    with torch.no_grad():
        before = target(tokens)[0]
        names = list(target.state_dict())
        join_projections(target)
        attn = target.layers[0].self_attn
        assert attn.q_proj.weight.data_ptr() == attn.q_proj.joined.data_ptr()
        torch.testing.assert_close(target(tokens)[0], before, rtol=0, atol=1e-12)
        target.load_state_dict(other.state_dict())
        torch.testing.assert_close(target(tokens)[0], other(tokens)[0], rtol=0, atol=1e-12)
    assert list(target.state_dict()) == names
