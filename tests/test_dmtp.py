"""
Proves that zero-initialised DMTP is two-anchor DFlash to the bit, and that its first step changes
the input of T1's slot alone; that no gradient reaches the frozen models; that training's tokens,
labels, head states and loss are those of a loop over single blocks; that training and the cached
decoding path give the same logits; and that checkpoints come back bit-equal or end in one line.
"""

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from kit import (TWO_ANCHORS, every_layer, random_tokens, small_config, small_drafter,
                 small_models)
from torch import Tensor

import dmtp
from dflash import DraftConfig
from dmtp import (ARMS, Drafter, block_loss, drafter_checkpoint, fingerprint, load_drafter,
                  load_target, save_checkpoint, start_from, target_checkpoint)
from model import Llama, new_cache
from mtp import MTP
from speculate import Machine, Sampling, draft_step, new_state, prefill, t1_step

every_arm = pytest.mark.parametrize("arm", list(ARMS))
T, S = 40, 8


def close(a: Tensor, b: Tensor, relative: float = 1e-10) -> bool:
    """No element is further apart than `relative` times the largest one."""
    return a.shape == b.shape and bool((a - b).abs().max() <= relative * b.abs().max())


def random_anchors(n_rows: int, N: int, seed: int = 4) -> Tensor:
    """Any places of [1, T - S], the first and the last one among them: (n_rows, N)."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(1, T - S + 1, (n_rows, N), generator=generator)
    anchors[0, 0], anchors[-1, -1] = 1, T - S
    return anchors


class Seen(NamedTuple):
    """What block_loss handed to the drafter and to the loss, and what it gave back."""

    t1_emb: Tensor         # (B, N, C)
    h: Tensor | None       # (B, N, C)
    x: Tensor              # (B, N, S - offset, C)
    states: Tensor         # (B, N, S - offset, C)
    logits: Tensor         # (B, N, n, V)
    labels: Tensor         # (B, N, n, V)
    result: dmtp.BlockLoss


def watch(monkeypatch, target: Llama, mtp: MTP, drafter: Drafter, tokens: Tensor, anchors: Tensor,
          **settings) -> Seen:
    """Run block_loss with three of its calls listened to."""
    calls = {}

    def listened(name, function):
        def call(*args):
            calls[name] = args, function(*args)
            return calls[name][1]
        return call

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "fuse", listened("fuse", drafter.fuse))
        patch.setattr(drafter.dflash, "forward_blocks",
                      listened("blocks", drafter.dflash.forward_blocks))
        patch.setattr(dmtp, "slot_losses", listened("loss", dmtp.slot_losses))
        result = block_loss(target, mtp, drafter, tokens, anchors, **settings)
    (t1_emb, h), _ = calls["fuse"]
    (_, _, x, *_), states = calls["blocks"]
    (logits, labels), _ = calls["loss"]
    return Seen(t1_emb, h, x, states, logits, labels, result)


def zero_init_pair() -> tuple[Llama, MTP, Drafter, Drafter]:
    """Target, head, a DMTP with a newly made fusion, and a two-anchor DFlash of its weights."""
    target, mtp = small_models()
    two = small_drafter(target.cfg, TWO_ANCHORS)
    fresh = Drafter(target.cfg, two.dflash.draft, ARMS["dmtp"]).double()
    fresh.dflash.load_state_dict(two.dflash.state_dict())
    return target, mtp, fresh, two


# ----------------------------------------------------------------------------------------------
# the fusion starts as the identity


def test_zero_initialised_dmtp_is_two_anchor_dflash_to_the_bit(monkeypatch):
    target, mtp, fresh, two = zero_init_pair()
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    assert not fresh.fusion.proj.weight.any()
    a = watch(monkeypatch, target, mtp, fresh, tokens, anchors, measure=True)
    b = watch(monkeypatch, target, mtp, two, tokens, anchors, measure=True)
    assert torch.equal(a.states, b.states) and torch.equal(a.logits, b.logits)
    assert torch.equal(a.result.loss, b.result.loss)
    assert a.result.agreement.any() and torch.equal(a.result.agreement, b.result.agreement)


def test_every_zero_initialised_arm_starts_as_its_arm_without_it(monkeypatch):
    """And `replace` starts as the embedding, at the embedding's usual size."""
    target, mtp = small_models()
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    plain = {1: "conditioned", 0: "conditioned-2"}
    for name in ("low-rank", "masks", "dmtp", "dmtp-d2", "dflash2", "replace", "replace-2"):
        arm = ARMS[name]
        base = small_drafter(target.cfg, plain[arm.offset] if arm.uses_mtp else "dflash")
        rms = target.embed_tokens.weight.square().mean().sqrt().item()
        fresh = Drafter(target.cfg, base.dflash.draft, arm, rms).double()
        fresh.load_state_dict(fresh.state_dict() | base.state_dict())
        a = watch(monkeypatch, target, mtp, fresh, tokens, anchors)
        b = watch(monkeypatch, target, mtp, base, tokens, anchors)
        if arm.injection == "replace":
            slot, t1 = a.x[:, :, 1 - arm.offset], b.x[:, :, 1 - arm.offset]
            size = t1.square().mean(-1, keepdim=True).sqrt()
            assert close(slot / slot.square().mean(-1, keepdim=True).sqrt(), t1 / size, 1e-4)
            assert (slot.square().mean(-1).sqrt() / rms - 1).abs().max() < 1e-3
        else:
            assert torch.equal(a.states, b.states) and torch.equal(a.logits, b.logits)


def test_weights_of_a_dflash_fit_into_a_dmtp():
    target, _ = small_models()
    dflash, fresh = small_drafter(target.cfg, "dflash"), zero_init_pair()[2]
    missing, unexpected = fresh.load_state_dict(dflash.state_dict(), strict=False)
    assert unexpected == [] and missing and all(name.startswith("fusion.") for name in missing)


def test_the_first_step_changes_the_input_of_slot_1_alone(monkeypatch):
    target, mtp, fresh, two = zero_init_pair()
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    block_loss(target, mtp, fresh, tokens, anchors).loss.backward()
    optimizer.step()
    assert fresh.fusion.proj.weight.any()
    # what the step did to DFlash's own weights is taken along, so that only the fusion differs
    two.dflash.load_state_dict(fresh.dflash.state_dict())
    a = watch(monkeypatch, target, mtp, fresh, tokens, anchors).x
    b = watch(monkeypatch, target, mtp, two, tokens, anchors).x
    differs = (a != b).any(dim=-1)  # (B, N, S)
    assert differs[:, :, 1].all() and differs.sum() == differs[:, :, 1].numel()


def test_at_zero_the_fusion_norms_get_no_gradient_and_the_projection_does():
    target, mtp, fresh, _ = zero_init_pair()
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    fusion, norms = fresh.fusion, (fresh.fusion.embed_norm, fresh.fusion.state_norm)
    block_loss(target, mtp, fresh, tokens, anchors).loss.backward()
    e_half, h_half = fusion.proj.weight.grad.chunk(2, dim=1)
    assert e_half.any() and h_half.any()
    assert not any(norm.weight.grad.any() for norm in norms)
    # one step later the norms learn too
    torch.optim.AdamW(fresh.parameters(), lr=1e-2).step()
    fresh.zero_grad()
    block_loss(target, mtp, fresh, tokens, anchors).loss.backward()
    assert all(norm.weight.grad.any() for norm in norms)


def test_the_fusion_adds_a_residual_of_both_normed_vectors():
    target, _ = small_models()
    drafter = small_drafter(target.cfg, "dmtp")
    fusion, C = drafter.fusion, target.cfg.width
    t1_emb, h = torch.randn(2, 5, C, generator=torch.Generator().manual_seed(1)).double()
    normed = []
    for x, norm in ((t1_emb, fusion.embed_norm), (h, fusion.state_norm)):
        rms = (x.square().mean(dim=-1, keepdim=True) + target.cfg.norm_eps).sqrt()
        normed.append(x / rms * norm.weight)
    W_e, W_h = fusion.proj.weight[:, :C], fusion.proj.weight[:, C:]
    assert close(drafter.fuse(t1_emb, h), t1_emb + normed[0] @ W_e.T + normed[1] @ W_h.T)


# ----------------------------------------------------------------------------------------------
# what stands in the block


@every_arm
@pytest.mark.parametrize("lead", [(3,), (3, 5)], ids=["rows", "rows_and_anchors"])
def test_known_tokens_stand_at_the_front_and_masks_everywhere_else(arm, lead):
    target, _ = small_models()
    drafter = small_drafter(target.cfg, arm)
    generator = torch.Generator().manual_seed(1)
    a_emb, t1_emb = torch.randn(2, *lead, target.cfg.width, generator=generator).double()
    h = torch.randn(*lead, target.cfg.width, generator=generator).double()
    x = drafter.block_inputs(a_emb, t1_emb, h)
    mask = drafter.dflash.mask_emb.expand_as(a_emb)
    if arm == "masks":
        fusion = drafter.fusion
        normed = h / (h.square().mean(-1, keepdim=True) + target.cfg.norm_eps).sqrt()
        mask = mask + normed * fusion.state_norm.weight @ fusion.proj.weight.T
    anchors = ARMS[arm].anchors
    assert x.shape == (*lead, S - ARMS[arm].offset, target.cfg.width)
    assert drafter.first == ARMS[arm].offset + len(anchors)
    for slot in range(x.size(-2)):
        known = {"A": a_emb, "T1": t1_emb}[anchors[slot]] if slot < len(anchors) else mask
        assert torch.allclose(x.select(-2, slot), known, rtol=1e-12, atol=1e-12)


@every_arm
def test_training_puts_a_and_t1_of_the_text_into_the_block(arm, monkeypatch):
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm)
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    seen = watch(monkeypatch, target, mtp, drafter, tokens, anchors)
    embedding, guesses = target.embed_tokens.weight, 0
    for b in range(3):
        for n, a in enumerate(anchors[b].tolist()):
            t1 = embedding[tokens[b, a + 1]]
            assert torch.equal(seen.t1_emb[b, n], t1)
            h = None if seen.h is None else seen.h[b, n]
            if h is not None:
                guesses += target.lm_head(h).argmax().item() != tokens[b, a + 1]
            known = {"A": embedding[tokens[b, a]], "T1": drafter.fuse(t1, h)}
            for slot, name in enumerate(ARMS[arm].anchors):
                assert close(seen.x[b, n, slot], known[name])
            if arm != "masks":
                assert (seen.x[b, n, len(ARMS[arm].anchors):] == drafter.dflash.mask_emb).all()
    # the head's own guess is another token in most of these blocks, so the text it must be
    assert guesses > 7 or ARMS[arm].injection == "none"


@torch.no_grad()
@pytest.mark.parametrize("arm", [name for name in ARMS if ARMS[name].injection != "none"])
def test_h_is_the_head_after_a_and_the_state_before_a(monkeypatch, arm):
    """The head runs on the prefix alone, one anchor at a time; its last row is a - 1."""
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm)
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    seen = watch(monkeypatch, target, mtp, drafter, tokens, anchors)
    for b in range(3):
        for n, a in enumerate(anchors[b].tolist()):
            states, _ = target(tokens[b:b + 1, :a])
            h = mtp(target, states, tokens[b:b + 1, 1:a + 1])
            assert h.size(1) == a and close(seen.h[b, n], h[0, -1])


def test_arms_without_a_fusion_never_run_the_head(monkeypatch):
    target, _ = small_models()
    for arm in [name for name in ARMS if ARMS[name].injection == "none"]:
        drafter = small_drafter(target.cfg, arm)
        assert drafter.fusion is None
        seen = watch(monkeypatch, target, None, drafter, random_tokens(2, T), random_anchors(2, 3))
        assert seen.h is None and seen.result.loss.isfinite()


# ----------------------------------------------------------------------------------------------
# the loss


@every_arm
def test_labels_stand_at_their_own_positions_and_known_slots_have_none(arm, monkeypatch):
    target, mtp = small_models(cfg=small_config(vocab_size=T))
    drafter = small_drafter(target.cfg, arm)
    anchors = random_anchors(3, 5)
    text = torch.arange(T).expand(3, T)  # token = position
    labels = watch(monkeypatch, target, mtp, drafter, text, anchors).labels
    first = ARMS[arm].first
    for b in range(3):
        for n, a in enumerate(anchors[b].tolist()):
            assert torch.equal(labels[b, n], torch.eye(T)[a + first:a + S].double())


@every_arm
def test_states_of_known_slots_do_not_enter_the_loss(arm, monkeypatch):
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm)
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    loss = block_loss(target, mtp, drafter, tokens, anchors).loss
    forward_blocks = drafter.dflash.forward_blocks
    for slot in range(S - ARMS[arm].offset):
        def with_one_slot_replaced(*args):
            states = forward_blocks(*args).clone()
            states[:, :, slot] = states[:, :, slot].flip(-1)
            return states
        monkeypatch.setattr(drafter.dflash, "forward_blocks", with_one_slot_replaced)
        same = torch.equal(block_loss(target, mtp, drafter, tokens, anchors).loss, loss)
        assert same == (slot + ARMS[arm].offset < ARMS[arm].first)


@torch.no_grad()
@pytest.mark.parametrize("arm", [name for name in ARMS if not ARMS[name].dflash2])
@pytest.mark.parametrize("window, labels", [(5, "hard"), (4096, "hard"), (5, "soft")])
def test_loss_and_agreement_equal_a_loop_over_single_blocks(arm, window, labels):
    """Each block by itself: the target on the prefix, its taps caught layer by layer."""
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm, tap_layers=(0, 2, 3), window=window, gamma=3.0)
    B, N, first, offset = 3, 4, ARMS[arm].first, ARMS[arm].offset
    tokens, anchors = random_tokens(B, T), random_anchors(B, N)
    streams = []
    hooks = [target.layers[i].register_forward_hook(lambda *args: streams.append(args[2]))
             for i in (0, 2, 3)]
    total = weights = 0.0
    agree = torch.zeros(S - first)
    for b in range(B):
        own = target.lm_head(target(tokens[b:b + 1])[0])[0]  # (T, V)
        for a in anchors[b].tolist():
            streams.clear()
            states, _ = target(tokens[b:b + 1, :a])
            taps = torch.cat(streams, dim=-1)
            head_rows = mtp(target, states, tokens[b:b + 1, 1:a + 1])
            h = head_rows[0, -1]
            a_emb, t1_emb = target.embed_tokens(tokens[b, a:a + 2])
            x = drafter.block_inputs(a_emb, drafter.fuse(t1_emb, h), h)[None, None]
            features = {"context": torch.cat((taps, head_rows), dim=-1),
                        "mtp-context": head_rows}.get(arm, taps)
            out = drafter.dflash.forward_blocks(target, features, x, torch.tensor([[a]]), [a],
                                                offset)[0, 0]
            for slot in range(first, S):
                log_p = target.lm_head(out[slot - offset]).log_softmax(dim=-1)
                row, weight = own[a + slot - 1], math.exp(-(slot - first) / 3.0)
                hard = log_p[tokens[b, a + slot]]
                nats = -hard if labels == "hard" else -(row.softmax(dim=-1) * log_p).sum()
                total += weight * nats.item()
                weights += weight
                agree[slot - first] += (log_p.argmax() == row.argmax()).float() / (B * N)
    for hook in hooks:
        hook.remove()
    result = block_loss(target, mtp, drafter, tokens, anchors, labels, measure=True)
    assert result.loss.item() == pytest.approx(total / weights, rel=1e-10)
    assert result.agreement.tolist() == pytest.approx(agree.tolist(), abs=1e-6)
    quick = block_loss(target, mtp, drafter, tokens, anchors, labels)
    assert torch.equal(quick.loss, result.loss) and not quick.agreement.any()


@pytest.mark.parametrize("n_frozen", ["all", "none"])
@pytest.mark.parametrize("labels", dmtp.LABELS)
def test_logits_in_chunks_give_the_loss_agreement_and_gradients_of_the_plain_form(labels, n_frozen):
    results = []
    for most in (1, 2 * 5 * (S - 2) * 23, 10 ** 9):  # one window, two windows, all three
        target, mtp = small_models()
        drafter = small_drafter(target.cfg, "dmtp")
        target.requires_grad_(n_frozen == "none")
        result = block_loss(target, mtp, drafter, random_tokens(3, T), random_anchors(3, 5), labels,
                            measure=True, max_logits=most)
        result.loss.backward()
        assert (target.lm_head.weight.grad is not None) == (n_frozen == "none")
        every = [*drafter.parameters(), *([target.lm_head.weight] if n_frozen == "none" else [])]
        results.append([*result, *(p.grad for p in every)])
    for chunked in results[:2]:
        for a, b in zip(chunked, results[2]):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_soft_labels_pass_no_gradient_to_the_targets_own_distribution(monkeypatch):
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, "dmtp")
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    seen = watch(monkeypatch, target, mtp, drafter, tokens, anchors, labels="soft")
    assert seen.labels.shape == seen.logits.shape and not seen.labels.requires_grad


@torch.no_grad()
@every_arm
def test_agreement_is_one_where_the_proposal_is_the_targets_own_token(arm, monkeypatch):
    """The drafter's states are replaced by the target's of one row earlier: all proposals hit."""
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm)
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    states, _ = target(tokens)

    def oracle(target, features, x, anchors, seen, offset):
        rows = torch.arange(3)[:, None, None]
        return states[rows, anchors[:, :, None] + torch.arange(offset, S) - 1]

    assert block_loss(target, mtp, drafter, tokens, anchors, measure=True).agreement.max() < 1
    monkeypatch.setattr(drafter.dflash, "forward_blocks", oracle)
    result = block_loss(target, mtp, drafter, tokens, anchors, measure=True)
    assert result.agreement.tolist() == [1.0] * (S - drafter.first)


# ----------------------------------------------------------------------------------------------
# gradients


@every_arm
@pytest.mark.parametrize("labels", dmtp.LABELS)
def test_every_weight_of_the_drafter_gets_a_gradient_and_no_feature_passes_one_back(arm, labels):
    """Nothing is frozen here, so a gradient could flow; the shared lm_head may hold one until
    load_target freezes it (the drafter's own gradient goes through it)."""
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm)
    tokens, anchors = random_tokens(3, T), random_anchors(3, 5)
    block_loss(target, mtp, drafter, tokens, anchors, labels, measure=True).loss.backward()
    reached = {name for name, p in target.named_parameters() if p.grad is not None}
    assert reached <= {"lm_head.weight"}
    assert all(p.grad is None for p in mtp.parameters())
    for name, p in drafter.named_parameters():
        assert p.grad is not None and p.grad.any() and p.grad.isfinite().all(), name


@every_arm
def test_a_step_over_all_weights_leaves_a_loaded_target_and_head_as_they_were(arm, tmp_path):
    save_target(tmp_path)
    target, mtp, checkpoint = load_target(tmp_path)
    drafter = small_drafter(target.cfg, arm).float()
    before = fingerprint(target, mtp), [p.clone() for p in drafter.parameters()]
    everything = [*target.parameters(), *mtp.parameters(), *drafter.parameters()]
    optimizer = torch.optim.AdamW(everything, lr=1e-3, weight_decay=0.1)
    block_loss(target, mtp, drafter, random_tokens(3, T), random_anchors(3, 5)).loss.backward()
    optimizer.step()
    assert all(p.grad is None for p in [*target.parameters(), *mtp.parameters()])
    assert fingerprint(target, mtp) == before[0] == checkpoint["fingerprint"]
    assert not any(torch.equal(p, old) for p, old in zip(drafter.parameters(), before[1]))


def test_the_state_enters_the_fusion_detached(monkeypatch):
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, "dmtp")
    t1_emb, h = (torch.randn(5, target.cfg.width).double().requires_grad_() for _ in range(2))
    drafter.fuse(t1_emb, h).square().sum().backward()
    assert h.grad is None and t1_emb.grad.any()
    seen = watch(monkeypatch, target, mtp, drafter, random_tokens(2, T), random_anchors(2, 3))
    assert not seen.h.requires_grad and not seen.t1_emb.requires_grad


# ----------------------------------------------------------------------------------------------
# training path = decoding path

POISON = 1e30


def cached_logits(target: Llama, mtp: MTP, drafter: Drafter, text: Tensor, a: Tensor) -> Tensor:
    """Logits (B, n, V) of one block a row as decoding makes them: caches, prefixes, poison behind.

    The rows of text (B, T) have their anchors at a (B,); the models see text[:, :a], and then A and
    T1. Shorter prefixes are padded with token 0, as in prefill.
    """
    draft, cfg, rows = drafter.dflash.draft, target.cfg, torch.arange(len(text))
    P, length = int(a.max()), cfg.context + S
    positions = torch.arange(P).expand(len(text), P)
    caches = [new_cache(cfg, n, len(text), length, target.lm_head.weight)
              for n in (cfg.n_layer, 1, draft.n_layer)]
    tokens = text[:, :P].masked_fill(positions >= a[:, None], 0)
    next_tokens = text[:, 1:P + 1].masked_fill(positions >= a[:, None], 0)
    for tensor in every_layer(*caches):
        tensor.fill_(POISON)
    states, taps = target(tokens, positions, caches[0], P, draft.tap_layers)
    head_rows = mtp(target, states, next_tokens, positions, caches[1], P)
    h = head_rows[rows, a - 1]
    drafter.dflash.write_context(target, drafter.features(taps, head_rows), positions, caches[2])
    for b in range(len(text)):
        for tensor in every_layer(caches[2]):
            tensor[b, a[b]:] = POISON
    t1_emb = drafter.fuse(target.embed_tokens(text[rows, a + 1]), h)
    x = drafter.block_inputs(target.embed_tokens(text[rows, a]), t1_emb, h)
    offset = drafter.arm.offset
    out = drafter.dflash.forward_round(target, x, a, caches[2], length, offset)
    return target.lm_head(out[:, drafter.first - offset:])


@torch.no_grad()
@every_arm
@pytest.mark.parametrize("window", [1, 5, 4096])
@pytest.mark.parametrize("B", [1, 3])
def test_one_masked_forward_equals_the_cached_path_at_every_anchor(arm, window, B, monkeypatch):
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm, window=window)
    tokens, anchors = random_tokens(B, T), random_anchors(B, 6)
    seen = watch(monkeypatch, target, mtp, drafter, tokens, anchors)
    for n in range(6):
        cached = cached_logits(target, mtp, drafter, tokens, anchors[:, n])
        assert close(seen.logits[:, n], cached)


@torch.no_grad()
@every_arm
def test_the_steps_of_a_round_propose_what_training_ranks_first(arm, monkeypatch):
    """prefill, t1_step and draft_step themselves, on prompts of several lengths."""
    target, mtp = small_models()
    drafter = small_drafter(target.cfg, arm, window=5)
    head = mtp if ARMS[arm].uses_mtp else None
    if drafter.dflash.selector:
        torch.nn.init.zeros_(drafter.dflash.selector.after.weight)  # the walk is then the argmax
    m = Machine(target, head, drafter, S, Sampling(greedy=True), kv_len=target.cfg.context + S)
    s = new_state(m, 4, seed=0, temperature=1.0)
    lengths = [1, 4, 9, 24]
    text = random_tokens(4, T)
    prefill(m, s, [text[b, :n].tolist() for b, n in enumerate(lengths)], n_new=20, first_request=0)
    for step in (*([t1_step] if head else []), draft_step):
        step(m, s)
    for b, n in enumerate(lengths):
        text[b, n:n + 2] = s.block[b, :2]  # A, and T1 where the arm has one
    anchors = torch.tensor(lengths)[:, None]
    seen = watch(monkeypatch, target, mtp, drafter, text, anchors)
    assert torch.equal(s.block[:, drafter.first:], seen.logits[:, 0].argmax(dim=-1))
    if head:
        own = target.lm_head(mtp(target, target(text)[0][:, :-1], text[:, 1:]))
        assert torch.equal(s.block[:, 1], own[torch.arange(4), anchors[:, 0] - 1].argmax(dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("piece", [1, 3, 8])
def test_context_written_in_pieces_equals_one_write(piece):
    target, _ = small_models()
    dflash = small_drafter(target.cfg, "dmtp").dflash
    _, taps = target(random_tokens(2, 24), tap_layers=dflash.draft.tap_layers)
    whole, parts = (new_cache(target.cfg, 2, 2, 24, taps) for _ in range(2))
    dflash.write_context(target, taps, torch.arange(24)[None], whole)
    for start in range(0, 24, piece):
        rows = torch.arange(start, start + piece)[None]
        dflash.write_context(target, taps[:, start:start + piece], rows, parts)
    for a, b in zip(every_layer(whole), every_layer(parts)):
        assert a.abs().amin(dim=(0, 2, 3)).all() and close(b, a, 1e-12)


@torch.no_grad()
def test_rounds_that_keep_1_to_8_rows_leave_no_hole_in_the_context():
    """A block's scratch, then eight rows of which the last are wrong: overwritten in time."""
    target, _ = small_models()
    dflash = small_drafter(target.cfg, "dmtp").dflash
    cfg, generator = target.cfg, torch.Generator().manual_seed(5)
    length = cfg.context + S
    _, taps = target(random_tokens(2, cfg.context), tap_layers=dflash.draft.tap_layers)
    whole, kv = (new_cache(cfg, 2, 2, length, taps) for _ in range(2))
    dflash.write_context(target, taps, torch.arange(cfg.context)[None], whole)
    dflash.write_context(target, taps[:, :1], torch.zeros(1, 1, dtype=torch.int64), kv)
    pos = torch.tensor([1, 1])
    for kept in ([8, 1], [1, 8], [3, 8], [8, 2], [8, 8], [5, 1]):
        x = torch.randn(2, S, cfg.width, generator=generator).double()
        dflash.forward_round(target, x, pos, kv, length)
        rows = pos[:, None] + torch.arange(S)
        block = taps[torch.arange(2)[:, None], rows].clone()
        for b in range(2):
            block[b, kept[b]:] = 100.0
        dflash.write_context(target, block, rows, kv)
        pos += torch.tensor(kept)
        for b in range(2):
            for a, w in zip(every_layer(kv), every_layer(whole)):
                assert close(a[b, :pos[b]], w[b, :pos[b]], 1e-12)


# ----------------------------------------------------------------------------------------------
# checkpoints

SETTINGS = dict(rope_theta=5000.0, norm_eps=1e-5)  # none of them the default


def float_models(seed: int = 0) -> tuple[Llama, MTP]:
    target, mtp = small_models(seed, small_config(**SETTINGS))
    return target.float(), mtp.float()


def save_target(out: Path, seed: int = 0) -> tuple[Llama, MTP]:
    target, mtp = float_models(seed)
    whole = target_checkpoint(target, mtp, {"kind": "bytes", "n": 3})
    save_checkpoint(out / "target.pt", whole | {"training": {}, "size": "tiny", "data": "x"})
    return target, mtp


def save_drafter(out: Path, arm, name: str, target: Llama, mtp: MTP) -> Drafter:
    drafter = small_drafter(target.cfg, arm, tap_layers=(0, 2, 3), window=5, gamma=3.0, n_slots=6)
    drafter = drafter.float()
    mark = fingerprint(target, mtp)
    save_checkpoint(out / f"{name}.pt", drafter_checkpoint(name, drafter, mark))
    return drafter


def refusal(path: Path, load, *args) -> str:
    """The one line that load(*args) ends in; it names the file."""
    with pytest.raises(ValueError) as e:
        load(*args)
    line = str(e.value)
    assert "\n" not in line and str(path) in line
    return line


@every_arm
def test_a_round_trip_gives_equal_bits_and_settings(arm, tmp_path):
    target, mtp = save_target(tmp_path)
    drafter = save_drafter(tmp_path, arm, "mine", target, mtp)
    loaded_target, loaded_mtp, rest = load_target(tmp_path)
    loaded = load_drafter(tmp_path, "mine", target.cfg, rest["fingerprint"])
    assert rest["tokenizer"] == {"kind": "bytes", "n": 3}
    assert rest["fingerprint"] == fingerprint(loaded_target, loaded_mtp) == fingerprint(target, mtp)
    assert loaded_target.cfg == target.cfg and loaded.dflash.draft == drafter.dflash.draft
    assert isinstance(loaded.dflash.draft.tap_layers, tuple)
    assert loaded.first == drafter.first
    assert dataclasses.replace(loaded.arm, about="") == dataclasses.replace(drafter.arm, about="")
    for old, new in ((target, loaded_target), (mtp, loaded_mtp), (drafter, loaded)):
        assert list(old.state_dict()) == list(new.state_dict())
        for a, b in zip(old.state_dict().values(), new.state_dict().values()):
            assert torch.equal(a, b) and a.dtype == b.dtype
        assert not any(p.requires_grad for p in new.parameters())
    tokens, anchors = random_tokens(2, T), random_anchors(2, 3)
    assert torch.equal(block_loss(target, mtp, drafter, tokens, anchors).loss,
                       block_loss(loaded_target, loaded_mtp, loaded, tokens, anchors).loss)


@every_arm
def test_files_hold_plain_types_and_tensors_only(arm, tmp_path):
    target, mtp = save_target(tmp_path)
    save_drafter(tmp_path, arm, "mine", target, mtp)
    for name, kind in (("target", "target"), ("mine", "drafter")):
        assert torch.load(tmp_path / f"{name}.pt", weights_only=True)["kind"] == kind


@pytest.mark.parametrize("older", [True, False], ids=["older_file", "no_file"])
@pytest.mark.parametrize("failure, seen", [(RuntimeError, OSError), (OSError, OSError),
                                           (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_save_that_stops_midway_keeps_the_older_file(failure, seen, older, tmp_path, monkeypatch):
    path = tmp_path / "target.pt"
    if older:
        save_target(tmp_path)
    before = [(p.name, p.read_bytes()) for p in tmp_path.iterdir()]

    def stops_midway(checkpoint, where):
        Path(where).write_bytes(b"half of it")
        raise failure("unexpected pos 64 vs 0\nand a second line")

    monkeypatch.setattr(torch, "save", stops_midway)
    with pytest.raises(seen) as e:
        save_target(tmp_path, seed=9)
    if failure is RuntimeError:
        assert "\n" not in str(e.value) and str(path) in str(e.value)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == before


def test_a_save_replaces_the_older_file_and_leaves_nothing_else(tmp_path):
    save_target(tmp_path, seed=1)
    target, mtp = save_target(tmp_path, seed=2)
    assert load_target(tmp_path)[2]["fingerprint"] == fingerprint(target, mtp)
    assert [p.name for p in tmp_path.iterdir()] == ["target.pt"]


def test_a_save_into_no_folder_is_an_os_error_with_the_path(tmp_path):
    path = tmp_path / "none" / "target.pt"
    with pytest.raises(OSError) as e:
        save_checkpoint(path, {"kind": "target"})
    assert str(path) in str(e.value) and "\n" not in str(e.value)


NOT_CHECKPOINTS = {
    "empty": b"", "html": b"<!DOCTYPE html>\n<html><body>404</body></html>\n",
    "line": b"version https://git-lfs.github.com/spec/v1\n", "number": b"1\n", "word": b"a",
    "brace": b'{"kind": "target"}\n', "zeros": bytes(5000), "zip": b"PK\x03\x04" + bytes(60),
}


@pytest.mark.parametrize("content", NOT_CHECKPOINTS.values(), ids=list(NOT_CHECKPOINTS))
def test_a_file_that_is_no_checkpoint_is_one_line(content, tmp_path):
    path = tmp_path / "target.pt"
    path.write_bytes(content)
    line = refusal(path, load_target, tmp_path)
    assert f"{len(content)} bytes" in line and "train.py" in line


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_checkpoint_is_one_line(share, tmp_path):
    save_target(tmp_path)
    path = tmp_path / "target.pt"
    content = path.read_bytes()
    path.write_bytes(content[:int(share * len(content))])
    assert "cut short" in refusal(path, load_target, tmp_path)


FOREIGN = {
    "dict": {"model": {"w": torch.zeros(2)}}, "empty": {}, "list": [1, 2], "tensor": torch.zeros(3),
    "number": 7, "path": {"kind": "target", "n": Path("x")}, "class": DraftConfig((1,)),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
def test_a_foreign_checkpoint_is_one_line(content, tmp_path):
    path = tmp_path / "target.pt"
    torch.save(content, path)
    assert "train.py" in refusal(path, load_target, tmp_path)


def test_a_checkpoint_of_the_other_kind_or_none_is_one_line(tmp_path):
    target, mtp = save_target(tmp_path)
    save_drafter(tmp_path, "dmtp", "dmtp", target, mtp)
    mark = fingerprint(target, mtp)
    (tmp_path / "target.pt").rename(tmp_path / "kept.pt")
    line = refusal(tmp_path / "target.pt", load_target, tmp_path)
    assert line.startswith("there is no ") and "train.py --ec-mtp" in line
    (tmp_path / "dmtp.pt").rename(tmp_path / "target.pt")
    assert "not a target checkpoint" in refusal(tmp_path / "target.pt", load_target, tmp_path)
    (tmp_path / "kept.pt").rename(tmp_path / "dmtp.pt")
    line = refusal(tmp_path / "dmtp.pt", load_drafter, tmp_path, "dmtp", target.cfg, mark)
    assert "not a drafter checkpoint" in line and "--drafter dmtp" in line
    line = refusal(tmp_path / "dflash.pt", load_drafter, tmp_path, "dflash", target.cfg, mark)
    assert line.startswith("there is no ") and "--drafter dflash" in line


@pytest.mark.parametrize("change", [{"draft_config": None}, {"draft_config": {"old": 1}}, "newer"])
def test_weights_of_another_layout_are_no_start(change, tmp_path):
    target, mtp = save_target(tmp_path)
    save_drafter(tmp_path, "dflash", "dflash", target, mtp)
    path = tmp_path / "dflash.pt"
    whole = torch.load(path)
    if change == "newer":
        change = {"draft_config": whole["draft_config"] | {"newer": 1}}
    torch.save({k: v for k, v in (whole | change).items() if v is not None}, path)
    line = refusal(path, start_from, path, small_drafter(target.cfg, "dmtp").float(),
                   fingerprint(target, mtp))
    assert "another layout" in line


@every_arm
def test_a_drafter_of_another_target_is_refused_with_both_fingerprints(arm, tmp_path):
    target, mtp = save_target(tmp_path)
    save_drafter(tmp_path, arm, "mine", target, mtp)
    other = fingerprint(*save_target(tmp_path, seed=9))  # the same shapes, other weights
    path = tmp_path / "mine.pt"
    line = refusal(path, load_drafter, tmp_path, "mine", target.cfg, other)
    mine = fingerprint(target, mtp)
    assert mine != other and mine in line and other in line and "--overwrite" in line


def test_the_fingerprint_changes_with_any_single_weight():
    target, mtp = float_models()
    marks = [fingerprint(target, mtp)]
    parameters = [*target.parameters(), *mtp.parameters()]
    for p in parameters:
        for i in (0, -1):
            old = p.data.view(-1)[i].item()
            p.data.view(-1)[i] = math.nextafter(old, math.inf) + 1e-6
            marks.append(fingerprint(target, mtp))
            p.data.view(-1)[i] = old
    assert len(set(marks)) == len(marks) == 1 + 2 * len(parameters)
    assert fingerprint(target, mtp) == marks[0] and len(bytes.fromhex(marks[0])) == 8
