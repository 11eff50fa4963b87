"""
Proves that DFlash2's three parts are what they say: mixing stays inside a block and starts as the
identity, the walk takes the best pair by pair and starts as the argmax, and the adaptive weights
are D-PACE's. That its arms decode exactly, and train as they decode, is proven with all others.

A walk by hand, three tokens, two slots, two candidates each, after token 0:

    slot    logits         candidates    pair scores after 0 (slot 1), after 1 / after 2 (slot 2)
      1     3.0 2.0 1.0    0, 1          0: -2    1: 0          3 - 2 < 2 + 0: token 1
      2     1.0 0.5 2.0    2, 0          2: -1    0: +0.5       2 - 1 < 1 + 0.5: token 0, after 1
                                         2:  0    0: -1         had slot 1 been 2, it would be 2
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kit import every_layer, random_tokens, small_config, small_drafter, small_models
from torch import Tensor, nn

import speculate
from dflash import (LocalMixing, PathSelector, adaptive_mean, adaptive_weights, decayed_mean,
                    sample_anchors, selector_losses, slot_chances, slot_losses)
from dmtp import ARMS, Drafter, block_loss
from model import SIZES, Llama, preset
from speculate import (Machine, Sampling, decode, draft_step, new_state, noise_step, plain_of,
                       prefill, walk)

S = 8


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


# ----------------------------------------------------------------------------------------------
# mixing


def random_mixing(n_slots: int) -> LocalMixing:
    mixing = LocalMixing(small_config(), n_slots).double()
    for i, p in enumerate(mixing.parameters()):
        p.data = randn(*p.shape, seed=i + 1)
    return mixing


@pytest.mark.parametrize("n_slots", [1, 3, 8])
def test_mixing_equals_a_loop_over_blocks_slots_and_channels(n_slots):
    mixing, x = random_mixing(n_slots), randn(2, 2 * n_slots, 32)

    def by_loop(values: Tensor, when: int) -> Tensor:
        out = torch.zeros_like(values)
        for b in range(2):
            for row in range(2 * n_slots):
                delta = mixing.proj(x[b, row]).view(2, 2, 2)[when]  # (tap, group of 16 channels)
                for c in range(32):
                    w = mixing.base[when, :, c] + delta[:, c // 16]
                    out[b, row, c] = w[0] * values[b, row, c]
                    if row % n_slots:
                        out[b, row, c] += w[1] * values[b, row - 1, c]
        return out

    with torch.no_grad():
        expected = by_loop(torch.tanh(by_loop(x, 0)), 1)
        torch.testing.assert_close(mixing(torch.tanh, x), expected)


def test_new_mixing_is_the_identity_to_the_bit():
    mixing, x = LocalMixing(small_config(), 8).double(), randn(2, 24, 32)
    assert torch.equal(mixing(torch.tanh, x), torch.tanh(x))


def test_mixing_never_crosses_a_block():
    mixing, x = random_mixing(8), randn(1, 24, 32)
    changed = x.clone()
    changed[:, 8:16] = 0
    same = (mixing(torch.tanh, x) == mixing(torch.tanh, changed)).all(dim=-1)[0]
    assert same.tolist() == [True] * 8 + [False] * 8 + [True] * 8


@torch.no_grad()
def test_mixing_does_not_touch_the_context():
    target, _ = small_models()
    drafter = small_drafter(target.cfg, "dflash2")
    s = new_state(Machine(target, None, drafter, S, Sampling()), 1, 0, 1.0)
    _, taps = target(random_tokens(1, 9), tap_layers=(1, 2, 3))
    drafter.dflash.write_context(target, taps, torch.arange(9)[None], s.draft_kv)
    before = [t.clone() for t in every_layer(s.draft_kv)]
    for p in drafter.dflash.mixing.parameters():
        p.data.normal_()
    drafter.dflash.write_context(target, taps, torch.arange(9)[None], s.draft_kv)
    assert all(torch.equal(a, b) for a, b in zip(every_layer(s.draft_kv), before))


# ----------------------------------------------------------------------------------------------
# the walk


def test_the_walk_by_hand(monkeypatch):
    monkeypatch.setattr(speculate, "N_BEST", 2)
    cfg = small_config(vocab_size=3, width=16, head_dim=4)
    drafter = Drafter(cfg, small_drafter(cfg, "dflash").dflash.draft, ARMS["dflash2"]).double()
    pair = torch.zeros(3, 3).double()  # [before, after]
    pair[0] = torch.tensor([-2.0, 0.0, 0.0])
    pair[1] = torch.tensor([0.5, 0.0, -1.0])
    pair[2] = torch.tensor([-1.0, 0.0, 0.0])
    selector = drafter.dflash.selector
    selector.before.weight.data = nn.functional.pad(torch.eye(3).double(), (0, 1))
    selector.after.weight.data = nn.functional.pad(pair.T.contiguous(), (0, 1))
    selector.proj.weight.data = torch.eye(4, 16).double()
    m = Machine(Llama(cfg).double(), None, drafter, 3, Sampling(greedy=True))
    s = new_state(m, 1, 0, 1.0)
    logits = torch.tensor([[[3.0, 2.0, 1.0], [1.0, 0.5, 2.0]]]).double()
    walk(m, s, torch.ones(1, 2, 16).double(), logits, torch.zeros(1, 2, 1))
    assert s.block.tolist() == [[0, 1, 0]]
    s.block[0, 0] = 1  # after token 1 slot 1 keeps 0 (3 + 0.5), and slot 2 its own best, 2
    walk(m, s, torch.ones(1, 2, 16).double(), logits, torch.zeros(1, 2, 1))
    assert s.block.tolist() == [[1, 0, 2]]


@torch.no_grad()
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}])
def test_without_pair_scores_dflash2_proposes_what_dflash_does(temperature, coupled, filters):
    target, _ = small_models()
    two = small_drafter(target.cfg, "dflash2")
    nn.init.zeros_(two.dflash.selector.after.weight)
    for mixing in two.dflash.mixing:
        nn.init.zeros_(mixing.base)
        nn.init.ones_(mixing.base[:, 0])
        nn.init.zeros_(mixing.proj.weight)
    one = small_drafter(target.cfg, "dflash")
    one.load_state_dict(two.state_dict(), strict=False)
    sampling, blocks = Sampling(greedy=temperature == 0, **filters), []
    for drafter in (one, two):
        m = Machine(target, None, drafter, S, sampling, coupled, kv_len=32)
        s = new_state(m, 3, 5, temperature)
        prefill(m, s, [[1, 2, 3], [4], [5] * 9], 20, 0)
        if not sampling.greedy:
            noise_step(m, s)
        draft_step(m, s)
        blocks.append(s.block.clone())
    assert torch.equal(*blocks)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dflash2", "dmtp-d2"])
def test_the_walk_follows_the_tokens_it_chose(name):
    """Each choice again, from the block that came out: the best of its slot after its neighbour."""
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, name)
    drafter.dflash.selector.after.weight.data *= 3
    m = Machine(target, mtp, drafter, S, Sampling(greedy=True))
    s, first = new_state(m, 2, 0, 1.0), drafter.first
    s.block[:, first - 1] = torch.tensor([3, 7])
    states, logits = randn(2, S - first, 32), randn(2, S - first, 23)
    walk(m, s, states, logits, s.noise)
    moved = 0
    for b in range(2):
        for j in range(S - first):
            before, candidates = s.block[b, first - 1 + j], logits[b, j].topk(16).indices
            scores = [logits[b, j, c] + drafter.dflash.selector.pair_scores(
                states[b, j], before, c[None])[0] for c in candidates]
            assert s.block[b, first + j] == candidates[torch.stack(scores).argmax()]
            moved += int(s.block[b, first + j] != logits[b, j].argmax())
    assert moved > 3


def test_text_of_the_walk_is_the_targets_own_with_and_without_coupling():
    cfg = small_config(context=100)
    target, mtp = small_models(cfg=cfg)
    plain = decode(Machine(target, None, None, 1, Sampling()), [[1, 2], [3]], 80, 0, 1.0)
    for coupled in (True, False):
        m = Machine(target, mtp, small_drafter(cfg, "dmtp-d2"), S, Sampling(), coupled)
        assert decode(m, [[1, 2], [3]], 80, 0, 1.0).texts == plain.texts


# ----------------------------------------------------------------------------------------------
# the losses


def test_adaptive_weights_by_hand_and_by_loop():
    """Chances 1/2, 1, 0: s = .75, 1, .5; P = .75, .75, .375; w = 1.875, 1.125, .375."""
    weights = adaptive_weights(torch.tensor([[[0.5, 1.0, 0.0]]]).double())
    torch.testing.assert_close(weights[0, 0], torch.tensor([1.875, 1.125, 0.375]).double())
    losses, chances = randn(2, 3, 6).exp(), randn(2, 3, 6, seed=1).sigmoid()
    weights = adaptive_weights(chances)
    for b in range(2):
        for n in range(3):
            prefix, product = [], 1.0
            for chance in chances[b, n].tolist():
                product *= 0.5 * chance + 0.5
                prefix.append(product)
            for k in range(6):
                assert weights[b, n, k].item() == pytest.approx(sum(prefix[k:]))
    expected = (weights * losses).sum() / 6  # 2 x 3 blocks
    torch.testing.assert_close(adaptive_mean(losses, chances), expected)


def test_a_drafter_that_equals_the_target_has_all_chances_one_however_unsure_both_are():
    logits = randn(2, 3, 6, 23).requires_grad_()
    own, other = logits.detach().softmax(dim=-1), randn(2, 3, 6, 23, seed=1).softmax(dim=-1)
    chances = slot_chances(logits, own)
    assert not chances.requires_grad
    torch.testing.assert_close(chances, torch.ones(2, 3, 6).double())
    torch.testing.assert_close(slot_chances(logits, other), 1 - (own - other).abs().sum(-1) / 2)
    ids = random_tokens(2, 3, 6)
    own_share = logits.softmax(dim=-1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(slot_chances(logits, F.one_hot(ids, 23).double()), own_share)


def test_the_selector_learns_on_slots_whose_gold_token_is_a_candidate(monkeypatch):
    monkeypatch.setattr("dflash.N_BEST", 4)
    selector = small_drafter(small_config(), "dflash2").dflash.selector
    states, logits = randn(2, 3, 6, 32).requires_grad_(), randn(2, 3, 6, 23, seed=1)
    gold = random_tokens(2, 3, 7)
    one_hot = F.one_hot(gold, 23).double()
    losses = selector_losses(selector, states, logits, gold[:, :, :-1], one_hot[:, :, 1:])
    hits = 0
    for b in range(2):
        for n in range(3):
            for k in range(6):
                candidates = logits[b, n, k].topk(4).indices.tolist()
                if gold[b, n, k + 1].item() not in candidates:
                    assert losses[b, n, k] == 0
                    continue
                hits += 1
                scores = torch.stack([logits[b, n, k, c] + selector.pair_scores(
                    states[b, n, k], gold[b, n, k], torch.tensor([c]))[0] for c in candidates])
                expected = -scores.log_softmax(-1)[candidates.index(gold[b, n, k + 1].item())]
                torch.testing.assert_close(losses[b, n, k], expected)
    assert 1 < hits < 30
    losses.sum().backward()
    assert states.grad.any() and all(p.grad.any() for p in selector.parameters())


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("name", ["dflash2", "dmtp-d2"])
def test_the_loss_of_a_block_is_the_adaptive_sum_of_both_parts(name, labels, monkeypatch):
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, name)
    tokens, anchors = random_tokens(3, 40), torch.tensor([[1, 9], [5, 30], [2, 32]])
    seen = {}

    def listened(function):
        def call(*args):
            seen[function.__name__] = args, function(*args)
            return seen[function.__name__][1]
        monkeypatch.setattr(f"dmtp.{function.__name__}", call)

    for function in (slot_losses, selector_losses):
        listened(function)
    loss = block_loss(target, mtp, drafter, tokens, anchors, labels).loss
    (logits, wanted), losses = seen["slot_losses"]
    (*_, walked), walk = seen["selector_losses"]
    assert walked is wanted and (wanted.max(dim=-1).values == 1).all() == (labels == "hard")
    weights = adaptive_weights(slot_chances(logits, wanted))
    torch.testing.assert_close(loss, (weights * (losses + walk)).sum() / 6)
    assert losses.shape == (3, 2, S - drafter.first) and walk.any()
    assert loss != decayed_mean(losses, 4.0)


@pytest.mark.parametrize("size", ["tiny", "10m"])
def test_parameter_counts_follow_the_formula(size):
    """Two mixings a layer of C x 4C/16 + 4C, and a selector of 2 V r + C r with r = C/4."""
    cfg = preset(size, 2048)
    draft = small_drafter(cfg, "dflash").dflash.draft
    C, r = cfg.width, cfg.width // 4
    plain, two = (sum(p.numel() for p in Drafter(cfg, draft, ARMS[name]).parameters())
                  for name in ("dflash", "dflash2"))
    assert two - plain == 2 * draft.n_layer * (C * 4 * (C // 16) + 4 * C) + 2 * 2048 * r + C * r
    assert all(width % 16 == 0 for _, width, *_ in SIZES.values())


def test_a_selector_is_not_trained_like_a_hidden_matrix():
    from train import Recipe, make_optimizers
    cfg = small_config()
    drafter = small_drafter(cfg, "dmtp-d2")
    recipe = Recipe(steps=1, batch=1, optimizer="muon", lr=0.1, lr_rest=0.1, weight_decay=0.0,
                    warmup=1, seed=0, dtype="float32")
    muon, rest = ({id(p) for g in o.param_groups for p in g["params"]}
                  for o in make_optimizers(drafter, recipe))
    selector = drafter.dflash.selector
    assert {id(selector.before.weight), id(selector.after.weight)} <= rest
    assert id(selector.proj.weight) in muon and not muon & rest
    assert muon | rest == {id(p) for p in drafter.parameters()}


def test_path_selector_starts_as_nothing():
    selector = PathSelector(small_config())
    scores = selector.pair_scores(torch.randn(2, 32), torch.tensor([1, 2]), random_tokens(2, 5))
    assert not scores.any() and selector.before.weight.any()


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if not arm.dflash2])
def test_every_arm_takes_dflash2_and_then_trains_and_writes_the_plain_text(name):
    cfg, arm = small_config(), replace(ARMS[name], dflash2=True)
    (target, mtp), drafter = small_models(cfg=cfg), small_drafter(cfg, arm)
    m = Machine(target, mtp if arm.uses_mtp else None, drafter, 8, Sampling())
    texts = [decode(x, [[1, 2, 3], [4]], 30, 7, 1.0).texts for x in (plain_of(m), m)]
    assert texts[0] == texts[1]
    for model in (target, mtp):
        model.requires_grad_(False)
    block_loss(target, mtp, drafter, random_tokens(2, 48), sample_anchors(2, 48, 8, 0, 0),
               "soft").loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
