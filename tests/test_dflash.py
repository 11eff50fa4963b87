"""
Proves that both masks are the rule they state (cell by cell, against loops), and the same one; that
anchors follow from (seed, step) alone; that the loss is the position-decayed mean it says; and that
a block depends, to the bit, on nothing but the context before its anchor and its own slots, while
it does see each of those. The oracle is a slow drafter: one query, one head, one key at a time.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kit import random_tokens, small_config, small_drafter, small_models
from torch import Tensor, nn

from dflash import (DFlash, context_seen, decay_weights, decayed_mean, draft_preset, round_mask,
                    sample_anchors, slot_losses, slot_positions, training_mask)
from model import SIZES, Llama, new_cache, preset

WINDOWS = [1, 3, 4096]


def random_anchors(n_rows: int, N: int, T: int, S: int, seed: int) -> Tensor:
    """Any N places of [1, T - S], in any order, some of them equal: (n_rows, N). The first is 1."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(1, T - S + 1, (n_rows, N), generator=generator)
    anchors[:, 0] = 1
    return anchors


def blocks(dflash: DFlash, target: Llama, taps: Tensor, x: Tensor, anchors: Tensor) -> Tensor:
    """forward_blocks, each group over the context that it can see."""
    return dflash.forward_blocks(target, taps, x, anchors, context_seen(anchors, taps.size(1)))


# ----------------------------------------------------------------------------------------------
# masks


def slow_training_mask(anchors: Tensor, T: int, S: int, window: int) -> Tensor:
    cells = []
    for row in anchors.tolist():
        for query in range(len(row) * S):
            a = row[query // S]
            for key in range(T + len(row) * S):
                in_context = key < T and a - window <= key < a
                in_block = key >= T and (key - T) // S == query // S
                cells.append(in_context or in_block)
    return torch.tensor(cells).view(anchors.size(0), 1, anchors.size(1) * S, -1)


def slow_round_mask(pos: Tensor, S: int, window: int, kv_len: int) -> Tensor:
    cells = []
    for a in pos.tolist():
        for key in range(kv_len):
            cells.append(a - window <= key < a or a <= key < a + S)
    return torch.tensor(cells).view(len(pos), 1, 1, kv_len)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("T, S, N", [(8, 2, 1), (12, 4, 5), (17, 3, 2), (16, 8, 4)])
def test_training_mask_equals_loops_over_every_cell(T, S, N, window):
    for seed in range(5):
        anchors = random_anchors(3, N, T, S, seed)
        mask = training_mask(anchors, T, S, window)
        assert torch.equal(mask, slow_training_mask(anchors, T, S, window))


@pytest.mark.parametrize("window", WINDOWS)
def test_groups_of_blocks_give_what_all_blocks_at_once_give(monkeypatch, window):
    """States and gradients, for anchors in any order; a group is cut to the context it can see."""
    target, _ = small_models(cfg=small_config(context=200))
    dflash = small_drafter(target.cfg, "dflash", window=window).dflash
    taps, x = torch.randn(2, 150, 3 * 32).double(), torch.randn(2, 7, 8, 32).double()
    anchors = random_anchors(2, 7, T=150, S=8, seed=1)
    anchors[:, 2:4] = torch.tensor([[3, 60], [64, 2]])  # a group that sees little
    results = []
    for group in (1, 2, 3, 7):
        monkeypatch.setattr("dflash.GROUP", group)
        states = blocks(dflash, target, taps, x, anchors)
        dflash.zero_grad()
        states.square().sum().backward()
        results.append([states, *(p.grad.clone() for p in dflash.parameters()
                                  if p.grad is not None)])
    for grouped in results[:-1]:
        for a, b in zip(grouped, results[-1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_no_group_holds_a_mask_over_all_blocks(monkeypatch):
    seen = []
    monkeypatch.setattr("dflash.training_mask",
                        lambda *a: seen.append(training_mask(*a)) or seen[-1])
    target, _ = small_models(cfg=small_config(context=512))
    dflash = small_drafter(target.cfg, "dflash").dflash
    anchors = sample_anchors(2, 512, 8, seed=0, step=0)
    dflash.forward_blocks(target, torch.randn(2, 512, 96).double(),
                          torch.randn(2, 64, 8, 32).double(), anchors, context_seen(anchors, 512))
    assert len(seen) == 8 and sum(m.numel() for m in seen) < 0.4 * 2 * 512 * (512 + 512)


def test_training_mask_example():
    mask = training_mask(torch.tensor([[2]]), T=4, S=2, window=4096)
    assert mask.int().tolist() == [[[[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1]]]]


def test_training_mask_example_of_two_overlapping_blocks_and_a_window_of_one():
    mask = training_mask(torch.tensor([[1, 2]]), T=4, S=2, window=1)
    first, second = [1, 0, 0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0, 1, 1]
    assert mask.int().tolist() == [[[first, first, second, second]]]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("S, kv_len", [(1, 10), (4, 12), (8, 40)])
def test_round_mask_equals_loops_over_every_cell(S, kv_len, window):
    pos = torch.arange(1, kv_len - S + 1)  # every place that a block fits
    assert torch.equal(round_mask(pos, S, window, kv_len), slow_round_mask(pos, S, window, kv_len))


@pytest.mark.parametrize("window", WINDOWS)
def test_both_masks_show_the_same_positions(window):
    T, S, N = 20, 4, 6
    for seed in range(5):
        anchors = random_anchors(1, N, T, S, seed)
        mask = training_mask(anchors, T, S, window)[0, 0].view(N, S, -1)
        blocks = slot_positions(anchors[0], S).flatten().tolist()
        key_positions = [*range(T), *blocks]
        cached = round_mask(anchors[0], S, window, T)[:, 0, 0]
        for n in range(N):
            expected = cached[n].nonzero().flatten().tolist()
            for slot in range(S):
                keys = mask[n, slot].nonzero().flatten().tolist()
                assert sorted(key_positions[key] for key in keys) == expected


def test_slot_positions_count_from_the_anchor():
    assert slot_positions(torch.tensor([[1, 7]]), 3).tolist() == [[[1, 2, 3], [7, 8, 9]]]


# ----------------------------------------------------------------------------------------------
# anchors


@pytest.mark.parametrize("T, S", [(16, 8), (17, 8), (256, 8), (40, 4), (20, 10)])
def test_anchors_are_distinct_ascending_and_leave_room_on_both_sides(T, S):
    for step in range(20):
        anchors = sample_anchors(5, T, S, seed=7, step=step)
        assert anchors.dtype == torch.int64 and anchors.shape == (5, T // 8)
        for row in anchors.tolist():
            assert row == sorted(set(row))
            assert 1 <= row[0] and row[-1] <= T - S


def test_every_allowed_anchor_is_drawn_about_equally_often():
    T, S, n_rows = 24, 8, 4000
    counts = torch.bincount(sample_anchors(n_rows, T, S, seed=1, step=2).flatten(), minlength=T)
    expected = n_rows * (T // 8) / (T - S)  # 750, standard deviation about 25
    assert counts[0] == 0 and counts[T - S + 1:].sum() == 0
    assert ((counts[1:T - S + 1] - expected).abs() < 150).all()


def test_anchors_follow_from_seed_and_step_alone():
    first = sample_anchors(4, 256, 8, seed=1, step=2)
    torch.manual_seed(5)
    np.random.seed(5)
    assert torch.equal(sample_anchors(4, 256, 8, seed=1, step=2), first)


def test_anchors_are_drawn_again_for_every_step_seed_and_row():
    draws = [sample_anchors(3, 256, 8, seed, step) for seed in range(4) for step in range(10)]
    rows = {tuple(row) for anchors in draws for row in anchors.tolist()}
    assert len(rows) == 3 * 4 * 10


@pytest.mark.parametrize("T, S", [(15, 8), (0, 8), (7, 4)])
def test_a_window_of_less_than_two_blocks_is_one_line(T, S):
    with pytest.raises(ValueError, match=f"has {T} tokens.* at least {2 * S}$") as e:
        sample_anchors(2, T, S, seed=0, step=0)
    assert "\n" not in str(e.value)


# ----------------------------------------------------------------------------------------------
# the loss


def test_decay_weights_by_hand():
    weights = decay_weights(7, 4.0, torch.zeros((), dtype=torch.float64))
    by_hand = [1.0, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]  # exp(-k / 4)
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx(by_hand, abs=5e-5)


@pytest.mark.parametrize("gamma", [1.5, 4.0])
@pytest.mark.parametrize("B, N, n", [(1, 1, 1), (2, 3, 7), (3, 2, 6)])
def test_decayed_cross_entropy_equals_a_loop(B, N, n, gamma):
    V = 11
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(B, N, n, V, dtype=torch.float64, generator=generator)
    labels = random_tokens(B, N, n, vocab_size=V)
    total = weights = 0.0
    for b in range(B):
        for block in range(N):
            for k in range(n):
                z, label = logits[b, block, k].tolist(), labels[b, block, k].item()
                nats = math.log(sum(math.exp(x) for x in z)) - z[label]
                total += math.exp(-k / gamma) * nats
                weights += math.exp(-k / gamma)
    loss = decayed_mean(slot_losses(logits, F.one_hot(labels, V).double()), gamma)
    assert loss.item() == pytest.approx(total / weights, rel=1e-12)


def test_the_loss_of_a_distribution_is_its_mean_over_single_tokens():
    B, N, n, V = 2, 3, 6, 11
    generator = torch.Generator().manual_seed(1)
    logits, wanted = 3 * torch.randn(2, B, N, n, V, dtype=torch.float64, generator=generator)
    wanted = wanted.softmax(dim=-1)
    total = weights = 0.0
    for b in range(B):
        for block in range(N):
            for k in range(n):
                log_q, weight = logits[b, block, k].log_softmax(dim=-1), math.exp(-k / 4)
                total -= weight * sum(wanted[b, block, k, i] * log_q[i] for i in range(V)).item()
                weights += weight
    loss = decayed_mean(slot_losses(logits, wanted), 4.0)
    assert loss.item() == pytest.approx(total / weights, rel=1e-12)


def test_the_first_predicted_slot_weighs_most():
    n, V = 7, 5
    labels = torch.zeros(1, 2, n, V, dtype=torch.float64)
    labels[..., 0] = 1
    losses = []
    for slot in range(n):
        logits = torch.zeros(1, 2, n, V, dtype=torch.float64)
        logits[:, :, slot, 1] = 20.0  # sure of the wrong token in this slot, undecided elsewhere
        losses.append(decayed_mean(slot_losses(logits, labels), 4.0).item() - math.log(V))
    ratios = [late / early for early, late in zip(losses, losses[1:])]
    assert min(losses) > 0 and ratios == pytest.approx([math.exp(-1 / 4)] * (n - 1), rel=1e-9)


# ----------------------------------------------------------------------------------------------
# what a block depends on


def small_dflash(**changes) -> tuple[Llama, DFlash]:
    target, _ = small_models()
    return target, small_drafter(target.cfg, "dflash", **changes).dflash


def random_inputs(dflash: DFlash, B: int, N: int, T: int, seed: int) -> tuple[Tensor, Tensor]:
    """taps (B, T, n_tap C) and block inputs (B, N, S, C)."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(B, T, dflash.fc.in_features, dtype=torch.float64, generator=generator)
    shape = (B, N, dflash.draft.n_slots, dflash.fc.out_features)
    return taps, torch.randn(shape, dtype=torch.float64, generator=generator)


def turn(x: Tensor, target: Llama, position: int) -> Tensor:
    """One head's vector (D,), its pairs (i, i + D/2) turned by their angles at a position."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        cos, sin = target.cos[position, i], target.sin[position, i]
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def slow_block(target: Llama, dflash: DFlash, taps: Tensor, x: Tensor, a: int) -> Tensor:
    """States (S, C) of one block x (S, C) at a, from taps (T, n_tap C)."""
    cfg, S = target.cfg, len(x)
    H, G, D = cfg.n_head, cfg.n_kv_head, cfg.head_dim
    start = max(0, a - dflash.draft.window)
    context = dflash.hidden_norm(dflash.fc(taps[start:a]))
    for layer in dflash.layers:
        attn, inside = layer.self_attn, layer.input_layernorm(x)
        keys, values = [], []
        # the context is normed once, by hidden_norm; only the block goes through the layer's norm
        for position, row in enumerate(torch.cat((context, inside)), start):
            k, v = attn.k_proj(row).view(G, D), attn.v_proj(row).view(G, D)
            keys.append([turn(attn.k_norm(k[g]), target, position) for g in range(G)])
            values.append([v[g] for g in range(G)])
        out = torch.zeros(S, H, D, dtype=x.dtype)
        for slot in range(S):
            for head in range(H):
                g = head * G // H
                q = attn.q_norm(attn.q_proj(inside[slot]).view(H, D)[head])
                q = turn(q, target, a + slot)
                scores = torch.stack([q @ k[g] for k in keys]) / math.sqrt(D)
                for weight, v in zip(scores.softmax(dim=0), values):
                    out[slot, head] += weight * v[g]
        x = x + attn.o_proj(out.view(S, H * D))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return dflash.norm(x)


@torch.no_grad()
@pytest.mark.parametrize("window", [5, 4096])
def test_many_blocks_in_one_forward_equal_one_query_one_head_one_key_at_a_time(window):
    T = 20
    target, dflash = small_dflash(window=window)
    taps, x = random_inputs(dflash, 1, 3, T, seed=1)
    anchors = torch.tensor([[1, 9, 12]])
    states = blocks(dflash, target, taps, x, anchors)
    for n, a in enumerate(anchors[0].tolist()):
        slow = slow_block(target, dflash, taps[0], x[0, n], a)
        torch.testing.assert_close(states[0, n], slow, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 5, 4096])
def test_a_block_does_not_move_by_one_bit_when_everything_else_changes(window):
    T, S, N = 40, 8, 6
    target, dflash = small_dflash(window=window)
    for seed in range(4):
        taps, x = random_inputs(dflash, 2, N, T, seed)
        anchors = random_anchors(2, N, T, S, seed)
        states = blocks(dflash, target, taps, x, anchors)
        for n in range(N):
            a = anchors[0, n].item()
            # other rows, other blocks and their anchors, taps outside [a - window, a): all replaced
            other_taps, other_x = random_inputs(dflash, 2, N, T, seed + 100)
            other_taps, other_x = 50 * other_taps, 50 * other_x
            other_anchors = random_anchors(2, N, T, S, seed + 100)
            start = max(0, a - window)
            other_taps[0, start:a] = taps[0, start:a]
            other_x[0, n], other_anchors[0, n] = x[0, n], a
            moved = blocks(dflash, target, other_taps, other_x, other_anchors)
            assert torch.equal(moved[0, n], states[0, n])
            assert not torch.equal(moved[0, n - 1], states[0, n - 1])


@torch.no_grad()
@pytest.mark.parametrize("n_layer", [1, 2])
@pytest.mark.parametrize("window", [1, 5, 4096])
def test_every_slot_reads_exactly_the_context_rows_of_the_window(window, n_layer):
    """Each row of taps is replaced in turn; the set of rows that move a slot is [a - window, a)."""
    T, S = 24, 8
    target, dflash = small_dflash(window=window, n_layer=n_layer)
    taps, x = random_inputs(dflash, 1, 5, T, seed=1)
    anchors = torch.tensor([[1, 4, 5, 13, T - S]])  # overlapping, and at both ends
    states = blocks(dflash, target, taps, x, anchors)
    movers = [[set() for _ in range(S)] for _ in anchors[0]]
    for row in range(T):
        changed = taps.clone()
        changed[0, row] = -changed[0, row]
        moved = blocks(dflash, target, changed, x, anchors)
        for n, slot in (moved != states)[0].any(dim=-1).nonzero().tolist():
            movers[n][slot].add(row)
    for n, a in enumerate(anchors[0].tolist()):
        assert movers[n] == [set(range(max(0, a - window), a))] * S


@torch.no_grad()
@pytest.mark.parametrize("n_layer", [1, 2])
def test_every_slot_sees_every_slot_of_its_block_and_no_other(n_layer):
    T, S, N = 24, 8, 3
    target, dflash = small_dflash(n_layer=n_layer)
    taps, x = random_inputs(dflash, 1, N, T, seed=1)
    anchors = torch.tensor([[4, 5, 12]])
    states = blocks(dflash, target, taps, x, anchors)
    for n in range(N):
        for slot in range(S):
            changed = x.clone()
            changed[0, n, slot] = -changed[0, n, slot]
            moved = blocks(dflash, target, taps, changed, anchors)
            moves = (moved != states)[0].any(dim=-1)  # (N, S)
            assert moves[n].all() and moves.sum() == S


@torch.no_grad()
def test_a_block_at_the_last_position_of_the_context_has_angles_and_cache_rows():
    target, dflash = small_dflash()
    cfg, S = target.cfg, dflash.draft.n_slots
    kv = new_cache(cfg, dflash.draft.n_layer, 1, cfg.context + S, target.lm_head.weight)
    taps, x = random_inputs(dflash, 1, 1, cfg.context - 1, seed=1)
    dflash.write_context(target, taps, torch.arange(cfg.context - 1)[None], kv)
    pos = torch.tensor([cfg.context - 1])
    states = dflash.forward_round(target, x[:, 0], pos, kv, cfg.context + S)
    slow = slow_block(target, dflash, taps[0], x[0, 0], cfg.context - 1)
    torch.testing.assert_close(states[0], slow, rtol=1e-10, atol=1e-10)


# ----------------------------------------------------------------------------------------------
# taps and sizes


class Stamp(nn.Module):
    """A layer that writes its own number into its channel, and leaves all others alone."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def forward(self, x, rope, mask=None, cache=None, context=None):
        x = x.clone()
        x[..., self.index] = self.index + 1
        return x


@torch.no_grad()
@pytest.mark.parametrize("tap_layers", [(1, 3, 5), (0, 2), (5,)])
def test_taps_are_the_streams_after_the_named_layers_before_any_norm(tap_layers):
    cfg = small_config(n_layer=6)
    target = Llama(cfg).double()
    target.layers = nn.ModuleList(Stamp(i) for i in range(6))
    tokens = random_tokens(2, 9)
    _, taps = target(tokens, tap_layers=tap_layers)
    for tap, layer in zip(taps.chunk(len(tap_layers), dim=-1), tap_layers, strict=True):
        expected = target.embed_tokens(tokens)
        for i in range(layer + 1):
            expected[..., i] = i + 1
        assert torch.equal(tap, expected)


def test_draft_preset_taps_from_the_second_layer_to_the_last():
    taps = {size: draft_preset(preset(size, 23), size).tap_layers for size in SIZES}
    assert taps == {"tiny": (1, 3, 5), "6m": (1, 3, 5), "10m": (1, 4, 7), "28m": (1, 6, 11),
                    "59m": (1, 8, 15)}


@pytest.mark.parametrize("n_layer", range(2, 9))
def test_draft_preset_names_distinct_layers_of_the_target_in_order(n_layer):
    taps = draft_preset(small_config(n_layer=n_layer), "tiny").tap_layers
    assert list(taps) == sorted(set(taps)) and taps[0] == 1 and taps[-1] == n_layer - 1
    target, _ = small_models(cfg=small_config(n_layer=n_layer))
    drafter = small_drafter(target.cfg, "dflash", tap_layers=taps).dflash
    assert target(random_tokens(1, 3), tap_layers=taps)[1].size(-1) == drafter.fc.in_features


def test_draft_preset_is_the_stated_block_and_depth():
    for size in SIZES:
        draft = draft_preset(preset(size, 23), size)
        assert (draft.n_slots, draft.window, draft.gamma) == (8, 4096, 4.0)
        assert draft.n_layer == (3 if size in ("28m", "59m") else 2)


def test_the_drafter_owns_no_vocabulary_and_one_fc_for_all_layers():
    target, dflash = small_dflash(tap_layers=(0, 1, 3), n_layer=3)
    cfg = target.cfg
    shapes = {name: tuple(p.shape) for name, p in dflash.named_parameters() if "layers" not in name}
    assert shapes == {"fc.weight": (cfg.width, 3 * cfg.width), "hidden_norm.weight": (cfg.width,),
                      "norm.weight": (cfg.width,), "mask_emb": (cfg.width,)}
    assert len(dflash.layers) == 3
    assert all(layer.self_attn.q_norm.weight.shape == (cfg.head_dim,) for layer in dflash.layers)
