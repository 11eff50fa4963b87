"""
Proves that error cancelling changes no bit of the forward, gives head and backbone the gradient of
an explicit KL loss and lm_head the gradient of standard training, and holds no logits for it; that
it fails, visibly, where its preconditions do; and that the head reads, and is trained on, the
tokens it says.

The example to check with a pencil: T = 4, V = 3, and lm_head is the identity, so that a state is
a row of logits. We choose the states as logarithms of these probabilities:

    row i   text        target p_i            head q_i              head's label y
      0     x_1 = 0     (.60 .30 .10)         (.20 .20 .60)         x_2 = 2
      1     x_2 = 2     (.50 .30 .20)         (.10 .80 .10)         x_3 = 1
      2     x_3 = 1     (.10 .80 .10)         (.50 .25 .25)         x_4 = 0
      3     x_4 = 0     (.25 .25 .50)

With weight 0.3 a head position weighs v = 0.3 / 3 = 0.1, a target position u = 1 / 4, so c = 0.4.
The verifier of q_0 is p_1, one row later. The gradients at the head's states are

    row     standard: 0.1 (q_i - y)     error-cancelled: 0.1 (q_i - p_{i+1})
      0     ( .02   .02  -.04)          (-.03  -.01   .04)
      1     ( .01  -.02   .01)          ( 0     0     0  )      q_1 is p_2 already: nothing to learn
      2     (-.05   .025  .025)         ( .025  0    -.025)

In row 0 the text happened to say 2, but its verifier gives 2 only .20: standard training raises the
head's .60 still, error cancelling lowers it. The target's own gradient is (p_i - y) / 4 in both.
"""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from kit import every_layer, random_tokens, small_config, small_models
from torch import Tensor

from model import MAX_LOGITS, Llama, new_cache, through_head
from mtp import (MTP, Losses, MTPLoss, cancel_error, check_cancels, draft_quality, kl_divergence,
                 target_losses)
from train import saved_bytes

EXACT = 1e-12    # max |a - b| / max |b| of gradients that are equal
VISIBLE = 1e-3   # of gradients that are not
WEIGHT = 0.3
T = 12
C_EXACT = WEIGHT * T / (T - 1)


def windows_of(n_tokens: int, n_rows: int = 3) -> Tensor:
    """(n_rows, n_tokens + 1)"""
    return random_tokens(n_rows, n_tokens + 1)


def gradients(total: Tensor, target: Llama, mtp: MTP) -> dict[str, Tensor]:
    """Of every parameter, by name; those of the head's parameters start with "mtp."."""
    named = dict(target.named_parameters()) | {f"mtp.{n}": p for n, p in mtp.named_parameters()}
    return dict(zip(named, torch.autograd.grad(total, list(named.values()))))


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest max |a - b| / max |b| of head and backbone: all parameters but lm_head."""
    assert a.keys() == b.keys() and "embed_tokens.weight" in a and "mtp.proj.weight" in a
    upstream = [n for n in b if n != "lm_head.weight"]
    return max(((a[n] - b[n]).abs().max() / b[n].abs().max()).item() for n in upstream)


def arm(mode: str, windows: Tensor, **settings) -> tuple[Losses, dict[str, Tensor]]:
    """The losses of one arm, and its gradients."""
    target, mtp = small_models()
    losses = target_losses(target, mtp, windows, MTPLoss(mode, **{"weight": WEIGHT, **settings}))
    return losses, gradients(losses.total, target, mtp)


def states_of(target: Llama, mtp: MTP, windows: Tensor) -> tuple[Tensor, Tensor]:
    """s (B, T, C) and h (B, T - 1, C) of windows (B, T + 1)."""
    states, _ = target(windows[:, :-1])
    return states, mtp(target, states[:, :-1], windows[:, 1:-1])


def text_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy of logits (B, rows, V)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing)


def hard_loss(next_logits: Tensor, mtp_logits: Tensor, windows: Tensor) -> Tensor:
    """Standard training's total, of logits (B, T, V) and (B, T - 1, V)."""
    return text_loss(next_logits, windows[:, 1:]) + WEIGHT * text_loss(mtp_logits, windows[:, 2:])


def by_hand(windows: Tensor, c: float, cancel=cancel_error) -> dict[str, Tensor]:
    """The gradients of error cancelling with any coefficient."""
    target, mtp = small_models()
    states, h = states_of(target, mtp, windows)
    s = cancel(states, h, c)
    return gradients(hard_loss(target.lm_head(s), target.lm_head(h), windows), target, mtp)


class Cancel(torch.autograd.Function):
    """cancel_error without its arithmetic: s as it is, and (g, -c g[:, k:]) in backward."""

    @staticmethod
    def forward(ctx, s: Tensor, h: Tensor, c: float, k: int = 1) -> Tensor:
        ctx.c, ctx.k = c, k
        return s.view_as(s)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g, -ctx.c * g[:, ctx.k:], None, None


# ----------------------------------------------------------------------------------------------
# the identity


class Chosen(nn.Module):
    """A target whose states are given, and lm_head the identity: a state is a row of logits."""

    def __init__(self, probabilities: list[list[float]]):
        super().__init__()
        self.states = torch.tensor([probabilities], dtype=torch.float64).log().requires_grad_()
        self.lm_head = nn.Linear(3, 3, bias=False)
        self.lm_head.weight.data = torch.eye(3, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        return self.states, None


@pytest.mark.parametrize("mode, at_head", [
    ("standard", [[.02, .02, -.04], [.01, -.02, .01], [-.05, .025, .025]]),
    ("ec", [[-.03, -.01, .04], [0, 0, 0], [.025, 0, -.025]]),
    ("kl", [[-.03, -.01, .04], [0, 0, 0], [.025, 0, -.025]]),
])
def test_pencil_example(mode, at_head):
    target = Chosen([[.60, .30, .10], [.50, .30, .20], [.10, .80, .10], [.25, .25, .50]])
    head = Chosen([[.20, .20, .60], [.10, .80, .10], [.50, .25, .25]])
    windows = torch.tensor([[1, 0, 2, 1, 0]])  # x_0 .. x_4
    losses = target_losses(target, lambda *_: head.states, windows, MTPLoss(mode, weight=0.3))
    losses.total.backward()
    at_target = [[-.4, .3, .1], [.5, .3, -.8], [.1, -.2, .1], [-.75, .25, .5]]  # p_i - y
    for actual, expected in ((head.states.grad, at_head), (4 * target.states.grad, at_target)):
        torch.testing.assert_close(actual, torch.tensor([expected], dtype=torch.float64))
    assert losses.next_loss.item() == pytest.approx(-math.log(.60 * .20 * .80 * .25) / 4)
    if mode != "kl":
        assert losses.mtp_loss.item() == pytest.approx(-math.log(.60 * .80 * .50) / 3)


@pytest.mark.parametrize("n_tokens", [2, 3, T])
def test_the_forward_of_error_cancelling_is_standards_bit_for_bit(n_tokens):
    windows = windows_of(n_tokens)
    ec, standard = arm("ec", windows)[0], arm("standard", windows)[0]
    for name, a, b in zip(Losses._fields, ec, standard):
        assert torch.equal(a, b), name  # equal states give equal logits, through one matrix


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize("n_tokens", [3, 5, T])
def test_head_and_backbone_get_the_gradient_of_kl_and_lm_head_that_of_standard(
        n_tokens, weight, label_smoothing):
    windows = windows_of(n_tokens)
    ec, kl, standard = (arm(mode, windows, weight=weight, label_smoothing=label_smoothing)[1]
                        for mode in ("ec", "kl", "standard"))
    assert difference(ec, kl) <= EXACT
    assert torch.equal(ec["lm_head.weight"], standard["lm_head.weight"])
    # the arms are far apart, so that neither equality is for nothing
    assert difference(ec, standard) > 0.1
    moved = (ec["lm_head.weight"] - kl["lm_head.weight"]).abs().max()
    assert moved > 0.01 * kl["lm_head.weight"].abs().max()


def test_the_kl_arm_is_the_definition_of_kl_with_the_verifier_held_fixed():
    windows = windows_of(T)
    target, mtp = small_models()
    states, h = states_of(target, mtp, windows)
    next_logits, mtp_logits = target.lm_head(states), target.lm_head(h)
    p, q = next_logits[:, 1:].softmax(-1).detach(), mtp_logits.softmax(-1)
    kl = (p * (p.log() - q.log())).sum() / (3 * (T - 1))
    expected = gradients(text_loss(next_logits, windows[:, 1:]) + WEIGHT * kl, target, mtp)
    losses, actual = arm("kl", windows)
    torch.testing.assert_close(losses.mtp_loss, kl)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


@pytest.mark.parametrize("n_tokens", [2, 3, T])
def test_the_coefficient_follows_from_the_numbers_of_labels(n_tokens):
    windows = windows_of(n_tokens)
    actual = arm("ec", windows)[1]
    assert difference(actual, by_hand(windows, c=WEIGHT * n_tokens / (n_tokens - 1))) <= EXACT
    assert difference(actual, by_hand(windows, c=WEIGHT)) > VISIBLE


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_part_of_the_coefficient_gives_that_part_of_the_way_from_standard_to_kl(alpha):
    windows = windows_of(T)
    kl, standard = arm("kl", windows)[1], arm("standard", windows)[1]
    between = {name: (1 - alpha) * standard[name] + alpha * kl[name] for name in kl}
    actual = by_hand(windows, c=alpha * C_EXACT)
    assert difference(actual, between) <= EXACT
    assert torch.equal(actual["lm_head.weight"], standard["lm_head.weight"])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_line_and_autograd_function_agree_at_every_depth(k):
    random = torch.Generator().manual_seed(7)
    s, g = torch.randn(2, 2, 6, 4, generator=random, dtype=torch.float64)
    h = torch.randn(2, 6 - k, 4, generator=random, dtype=torch.float64).requires_grad_()
    s.requires_grad_()
    for cancel in (cancel_error, Cancel.apply):
        out = cancel(s, h, 0.7, k)
        assert torch.equal(out, s)
        at_s, at_h = torch.autograd.grad(out, (s, h), g)
        assert torch.equal(at_s, g)
        assert torch.equal(at_h, -0.7 * g[:, k:])


def test_an_autograd_function_without_arithmetic_has_the_same_gradients():
    windows = windows_of(T)
    actual, oracle = arm("ec", windows)[1], by_hand(windows, C_EXACT, Cancel.apply)
    assert difference(actual, oracle) <= EXACT
    assert torch.equal(actual["lm_head.weight"], oracle["lm_head.weight"])


# ----------------------------------------------------------------------------------------------
# where it must fail


def wrong_coefficient(target, mtp, windows):
    states, h = states_of(target, mtp, windows)
    s = cancel_error(states, h, WEIGHT)
    return hard_loss(target.lm_head(s), target.lm_head(h), windows)


def before_the_norm(target, mtp, windows):
    """The same line on the residual streams that the two final norms read."""
    streams = []
    hooks = [m.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
             for m in (target, mtp)]
    _, h = states_of(target, mtp, windows)
    for hook in hooks:
        hook.remove()
    s = target.norm(cancel_error(*streams, C_EXACT))
    return hard_loss(target.lm_head(s), target.lm_head(h), windows)


def cancelled_logits(target, mtp, windows):
    """Logits of target and head with the exact coefficient: the losses on them break the proof."""
    states, h = states_of(target, mtp, windows)
    return target.lm_head(cancel_error(states, h, C_EXACT)), target.lm_head(h)


def smoothing_of_one_loss(target, mtp, windows):
    next_logits, mtp_logits = cancelled_logits(target, mtp, windows)
    next_loss = text_loss(next_logits, windows[:, 1:], label_smoothing=0.1)
    return next_loss + WEIGHT * text_loss(mtp_logits, windows[:, 2:])


def z_loss(target, mtp, windows):
    next_logits, mtp_logits = cancelled_logits(target, mtp, windows)
    z = next_logits.logsumexp(-1)  # (B, T)
    return hard_loss(next_logits, mtp_logits, windows) + 0.01 * z.square().mean()


def softcap(target, mtp, windows):
    capped = [3 * torch.tanh(logits / 3) for logits in cancelled_logits(target, mtp, windows)]
    return hard_loss(*capped, windows)


@pytest.mark.parametrize("control, kl_settings", [
    (wrong_coefficient, {}),
    (before_the_norm, {}),
    (smoothing_of_one_loss, dict(label_smoothing=0.1)),
    (z_loss, dict(z_loss=0.01)),
    (softcap, dict(softcap=3.0)),
])
def test_without_a_precondition_the_gradient_is_not_that_of_kl(control, kl_settings):
    windows = windows_of(T)
    target, mtp = small_models()
    broken = gradients(control(target, mtp, windows), target, mtp)
    assert difference(broken, arm("kl", windows, **kl_settings)[1]) > VISIBLE


@pytest.mark.parametrize("settings, message", [
    (dict(mode="ec", z_loss=1e-4), "z_loss is 0.0001"),
    (dict(mode="ec", softcap=30.0), "softcap is 30.0"),
    (dict(mode="mse"), "'mse', allowed: standard, ec, kl"),
    (dict(weight=-0.1), "weight is -0.1"),
])
def test_losses_that_cannot_cancel_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MTPLoss(**settings)


class Scaled(nn.Linear):
    """Linear, but not with the weight that is trained."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tie(target, mtp):
    target.lm_head.weight = target.embed_tokens.weight


def own_output_matrix(target, mtp):
    mtp.lm_head = nn.Linear(32, 23, bias=False)


def another_class_of_lm_head(target, mtp):
    target.lm_head = Scaled(32, 23, bias=False)


@pytest.mark.parametrize("spoil, message", [
    (tie, "tied to the embedding"),
    (own_output_matrix, r"output matrix of its own \(lm_head.weight\)"),
    (another_class_of_lm_head, "lm_head is a Scaled"),
])
def test_models_that_cannot_cancel_are_refused(spoil, message):
    target, mtp = small_models()
    check_cancels(target, mtp)
    spoil(target, mtp)
    with pytest.raises(ValueError, match=message):
        check_cancels(target, mtp)


@pytest.mark.parametrize("mode", ["standard", "kl"])
def test_z_loss_and_softcap_are_what_they_say_where_they_are_allowed(mode):
    windows = windows_of(T)
    plain, _ = arm(mode, windows)
    losses, _ = arm(mode, windows, z_loss=0.01, softcap=3.0)
    target, _ = small_models()
    capped = [3 * torch.tanh(target.lm_head(x) / 3) for x in (plain.states, plain.mtp_states)]
    torch.testing.assert_close(losses.next_loss, text_loss(capped[0], windows[:, 1:]))
    if mode == "standard":
        torch.testing.assert_close(losses.mtp_loss, text_loss(capped[1], windows[:, 2:]))
    z = capped[0].exp().sum(-1).log()
    expected = losses.next_loss + WEIGHT * losses.mtp_loss + 0.01 * (z * z).mean()
    torch.testing.assert_close(losses.total, expected)


# ----------------------------------------------------------------------------------------------
# what it costs


def saved_by(total_of) -> int:
    """saved_bytes of total_of(target, mtp)."""
    target, mtp = small_models()
    return saved_bytes(lambda: total_of(target, mtp))


def test_error_cancelling_holds_one_state_tensor_at_most_and_kl_holds_logits():
    windows = windows_of(T)
    state, logits = 8 * 3 * T * 32, 8 * 3 * (T - 1) * 23  # bytes of (B, T, C) and (B, T - 1, V)

    def mode(name: str) -> int:
        return saved_by(lambda target, mtp: target_losses(
            target, mtp, windows, MTPLoss(name, WEIGHT)).total)

    def function_form(target, mtp):
        states, h = states_of(target, mtp, windows)
        s = Cancel.apply(states, h, C_EXACT)
        return hard_loss(target.lm_head(s), target.lm_head(h), windows)

    standard = mode("standard")
    assert 0 <= mode("ec") - standard <= state
    assert saved_by(function_form) == standard
    assert mode("kl") - standard > 0.9 * logits  # not quite all: it has no labels to hold


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01, "softcap": 3}])
@pytest.mark.parametrize("max_logits", [1, 2 * (2 * T - 1) * 23])  # one window, two windows
@pytest.mark.parametrize("mode", ["standard", "ec", "kl"])
def test_logits_in_chunks_give_the_losses_and_gradients_of_the_plain_form(mode, max_logits,
                                                                         settings):
    if mode == "ec" and "z_loss" in settings:
        settings = {}
    windows, results = windows_of(T), []
    for most in (max_logits, 10 ** 9):
        target, mtp = small_models()
        losses = target_losses(target, mtp, windows, MTPLoss(mode, **settings), measure=True,
                               max_logits=most)
        # scaled, as by accumulation: the gradients made in the forward pass must follow
        results.append((losses, gradients(3 * losses.total, target, mtp)))
    (chunked, chunked_gradients), (plain, plain_gradients) = results
    for a, b in zip(chunked, plain):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for name in plain_gradients:
        torch.testing.assert_close(chunked_gradients[name], plain_gradients[name], rtol=1e-11,
                                   atol=1e-13)
    assert chunked.agreement > 0 and not chunked.agreement.requires_grad


def test_logits_in_chunks_hold_two_gradients_of_states_in_place_of_all_logits():
    """Saved for backward: (B, T, V) several times, against (B, T, C) twice and (V, C) once."""
    cfg = small_config(vocab_size=997)
    target, mtp = Llama(cfg), MTP(cfg)
    windows = random_tokens(4, T + 1, vocab_size=997)
    logits = 4 * 4 * (T - 1) * 997  # bytes of (B, T - 1, V)
    for mode, copies in (("standard", 2), ("ec", 2), ("kl", 3)):
        held = [saved_bytes(lambda: target_losses(
            target, mtp, windows, MTPLoss(mode), max_logits=most).total) for most in (1, 10 ** 9)]
        assert held[1] - held[0] > (copies - 0.1) * logits - 4 * 997 * 32, mode


@pytest.mark.parametrize("mode", ["standard", "ec", "kl"])
def test_with_weight_0_the_backbone_gets_the_next_token_gradient_bit_for_bit(mode):
    windows = windows_of(T)
    target, mtp = small_models()
    text_loss(target.lm_head(target(windows[:, :-1])[0]), windows[:, 1:]).backward()
    actual = arm(mode, windows, weight=0.0)[1]
    for name, p in target.named_parameters():
        assert torch.equal(actual[name], p.grad), name
    for name, _ in mtp.named_parameters():
        assert not actual[f"mtp.{name}"].any(), name


def test_under_bfloat16_autocast_the_losses_are_standards_bit_for_bit():
    # not so the gradients: they are differences of rounded vectors, so training is in float32
    target, mtp = (m.float() for m in small_models())
    with torch.autocast("cpu", torch.bfloat16):
        ec, standard = (target_losses(target, mtp, windows_of(T), MTPLoss(mode))
                        for mode in ("ec", "standard"))
    assert ec.next_loss.dtype == torch.float32
    assert ec.next_loss != arm("ec", windows_of(T))[0].next_loss  # autocast was on
    for name, a, b in zip(Losses._fields, ec, standard):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("max_logits", [1, MAX_LOGITS])
def test_a_loss_is_handed_float32_logits_under_autocast_and_else_those_that_are(max_logits):
    for autocast, dtype in ((True, torch.float32), (False, torch.float64)):
        lm_head, states, seen = nn.Linear(4, 9, bias=False).to(dtype), torch.randn(3, 2, 4), []

        def loss_of(logits: list[Tensor], part: slice) -> tuple[Tensor, Tensor]:
            seen.extend(logits)
            return logits[0].sum(), torch.zeros(1)

        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert not autocast or lm_head(states.to(dtype)).dtype == torch.bfloat16
            through_head(lm_head, [states.to(dtype)], loss_of, max_logits)
        assert len(seen) == (3 if max_logits == 1 else 1)
        assert all(z.dtype == dtype for z in seen)


# ----------------------------------------------------------------------------------------------
# what the head reads, and what it is trained on


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mode", ["standard", "ec"])
def test_text_0_1_2_3_trains_row_i_of_the_head_on_token_i_plus_2(mode, label_smoothing):
    target, mtp = small_models()
    text = torch.arange(T + 1)[None]

    def loss_of(logits: Tensor, label: int) -> Tensor:
        nats = -logits.log_softmax(-1)  # (V,); smoothing gives every token an equal share of it
        return (1 - label_smoothing) * nats[label] + label_smoothing * nats.mean()

    next_loss, mtp_loss = [], []
    for i in range(T):
        states, _ = target(text[:, :i + 1])  # x_0 .. x_i and no more
        next_loss.append(loss_of(target.lm_head(states)[0, -1], i + 1))
        if i < T - 1:
            h = mtp(target, states, text[:, 1:i + 2])
            mtp_loss.append(loss_of(target.lm_head(h)[0, -1], i + 2))
    losses = target_losses(target, mtp, text, MTPLoss(mode, label_smoothing=label_smoothing))
    torch.testing.assert_close(losses.next_loss, sum(next_loss) / T)
    torch.testing.assert_close(losses.mtp_loss, sum(mtp_loss) / (T - 1))


def test_the_first_losses_of_a_fresh_model_are_ln_v():
    cfg = small_config(vocab_size=97)
    windows = random_tokens(8, 33, vocab_size=97)
    losses = target_losses(Llama(cfg), MTP(cfg), windows, MTPLoss())
    assert losses.next_loss.item() == pytest.approx(math.log(97), abs=0.05)
    assert losses.mtp_loss.item() == pytest.approx(math.log(97), abs=0.05)


@pytest.mark.parametrize("mode", ["standard", "ec", "kl"])
@pytest.mark.parametrize("i", [0, 3, T - 2])
def test_row_i_of_the_head_sees_token_i_plus_1_and_nothing_later(i, mode):
    target, mtp = small_models()

    def head_logits(windows: Tensor) -> Tensor:
        return target.lm_head(target_losses(target, mtp, windows, MTPLoss(mode)).mtp_states)

    windows = windows_of(T)
    logits = head_logits(windows)
    later = windows.clone()
    later[:, i + 2:] = (later[:, i + 2:] + 1) % 23
    assert torch.equal(head_logits(later)[:, :i + 1], logits[:, :i + 1])
    newest = windows.clone()
    newest[:, i + 1] = (newest[:, i + 1] + 1) % 23
    moved = (head_logits(newest) - logits).abs().amax(-1)  # (B, T - 1)
    assert (moved[:, i] > 1e-6).all() and not moved[:, :i].any()


@pytest.mark.parametrize("chunks", [[1] * 11, [3, 3, 3, 2], [11], [5, 1, 4, 1]])
def test_the_head_over_its_cache_equals_the_head_without_at_any_split(chunks):
    target, mtp = small_models()
    states, expected = states_of(target, mtp, windows_of(T))
    next_tokens = windows_of(T)[:, 1:-1]
    kv = new_cache(target.cfg, 1, 3, T + 4, states)
    for part in every_layer(kv):
        part.fill_(1e30)  # rows that nobody wrote are in reach, but masked
    parts, start = [], 0
    for s, t in zip(states[:, :-1].split(chunks, dim=1), next_tokens.split(chunks, dim=1)):
        positions = torch.arange(start, start + t.size(1)).expand(3, -1)
        parts.append(mtp(target, s, t, positions, kv, T + 4))
        start += t.size(1)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-12)


def test_rows_of_one_batch_of_the_head_may_stand_at_different_positions():
    target, mtp = small_models()
    windows = windows_of(T)
    states, expected = states_of(target, mtp, windows)
    next_tokens, starts, n = windows[:, 1:-1], [7, 0, 4], 4
    kv = new_cache(target.cfg, 1, 3, T, states)
    mtp(target, states[:, :7], next_tokens[:, :7], torch.arange(7).expand(3, -1), kv, 7)
    positions = torch.tensor(starts)[:, None] + torch.arange(n)  # (B, n)
    rows = torch.arange(3)[:, None]
    h = mtp(target, states[rows, positions], next_tokens[rows, positions], positions, kv, T - 1)
    torch.testing.assert_close(h, expected[rows, positions], rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------------------------
# how good a draft is


def random_logits(seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(3 * torch.randn(2, 5, 23, generator=random, dtype=torch.float64) for _ in range(2))


def test_draft_quality_of_an_example_of_three_tokens():
    # p (.5 .3 .2), q (.2 .2 .6): tv (.3 + .1 + .4) / 2 = .4, q says token 2, p says 0, p[2] = .2
    # p (.1 .8 .1), q (.1 .7 .2): tv (.0 + .1 + .1) / 2 = .1, both say token 1, p[1] = .8
    p = torch.tensor([[.5, .3, .2], [.1, .8, .1]])
    q = torch.tensor([[.2, .2, .6], [.1, .7, .2]])
    kl = [.5 * math.log(.5 / .2) + .3 * math.log(.3 / .2) + .2 * math.log(.2 / .6),
          .8 * math.log(.8 / .7) + .1 * math.log(.1 / .2)]
    expected = {"tv": .25, "accept_sampled": .75, "accept_greedy": .5, "accept_argmax_draft": .5,
                "kl": sum(kl) / 2}
    actual = draft_quality(p.log() + 5, q.log() - 2)  # a constant on all logits is no change
    assert {name: x.item() for name, x in actual.items()} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_accept_sampled_is_the_acceptance_of_rejection_sampling_and_one_minus_tv(seed):
    p_logits, q_logits = random_logits(seed)
    quality = draft_quality(p_logits, q_logits)
    assert (quality["accept_sampled"] + quality["tv"]).item() == pytest.approx(1, abs=1e-6)
    # x is drafted with probability q(x) and kept with min(1, p(x) / q(x))
    p, q = p_logits.softmax(-1).flatten(0, 1).tolist(), q_logits.softmax(-1).flatten(0, 1).tolist()
    kept = [sum(qx * min(1, px / qx) for px, qx in zip(*row)) for row in zip(p, q)]
    overlap = [sum(min(px, qx) for px, qx in zip(*row)) for row in zip(p, q)]
    for expected in (kept, overlap):
        mean = sum(expected) / len(expected)
        assert quality["accept_sampled"].item() == pytest.approx(mean, abs=1e-6)


def test_kl_is_positive_zero_for_equal_logits_and_not_symmetric():
    p_logits, q_logits = random_logits(0)
    kl = kl_divergence(p_logits, q_logits)  # (2, 5)
    assert kl.shape == (2, 5) and (kl > 0).all()
    assert not kl_divergence(p_logits, p_logits).any()
    assert (kl - kl_divergence(q_logits, p_logits)).abs().min() > 1e-3
    equal = draft_quality(p_logits, p_logits)
    assert equal["kl"] == 0 and equal["tv"] == 0
    assert equal["accept_sampled"] == 1 and equal["accept_greedy"] == 1
