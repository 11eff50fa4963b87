"""One head that guesses one token further, and three ways to train it.

The target turns x_0 .. x_i into state_i, and lm_head(state_i) predicts x_{i+1}. The MTP head makes

    h_i = MTP(state_i, E(x_{i+1})),    and the same lm_head(h_i) predicts x_{i+2}.

When the head drafts, its guess for x_{i+2} is checked by a *verifier*: the target itself, one row
later, at state_{i+1}. Both have seen x_0 .. x_{i+1}. So the head should agree with row i + 1 of the
target, right or wrong; standard training asks it to agree with the text instead.

    row i          0        1        2        3
    text           the      cat      sat      down
    target         cat?     sat?     down?    .?
    MTP            sat?     down?    .?                h_0 reads state_0 and E(cat)
    its verifier   row 1    row 2    row 3

Error cancelling in five lines. M is lm_head, y the text's token as a one-hot vector, c = v/u, where
u and v are the weights of one position in the next-token and in the head's loss.

    the head's gradient at h_i          v M'(q_i - y)              q_i = softmax(M h_i)
    the verifier's own, at s_{i+1}      u M'(p_{i+1} - y)          p = softmax(M s)
    now let s_{i+1} be s_{i+1} + c (sg(h_i) - h_i): the same number, but its gradient also
      reaches h_i, times -c             v M'(q_i - y) - c u M'(p_{i+1} - y)
    which is                            v M'(q_i - p_{i+1})        the gradient of v KL(sg(p) || q)

The text has cancelled. Nothing of size (B, T, V) was added, and M's own gradient has not changed.
Source: Error-cancelled MTP; the module has the form of DeepSeek-V3's.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from model import (KV, MAX_LOGITS, Block, Config, Linear, Llama, RMSNorm, Rows, causal_mask,
                   init_weights, through_head)

LOSSES = ("standard", "ec", "kl")


class MTP(nn.Module):
    """One more decoder layer, fed with a state and the embedding of the token that came next.

    States go in, and come out, after a final norm; so the head's output can be fed back to it for
    a further token (an approximation: training shows it the target's states only). The embedding
    and lm_head are the target's own.
    """

    def __init__(self, cfg: Config):
        super().__init__()
        self.embed_norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.state_norm = RMSNorm(cfg.width, cfg.norm_eps)
        self.proj = Linear(2 * cfg.width, cfg.width)
        self.block = Block(cfg)
        self.norm = RMSNorm(cfg.width, cfg.norm_eps)
        init_weights(self, cfg.n_layer)

    def forward(self, target: Llama, states: Tensor, next_tokens: Tensor,
                positions: Tensor | None = None, kv: KV | None = None,
                kv_len: int = 0) -> Tensor:
        """Row i: the state (B, S, C) that predicts the token after next_tokens (B, S).

        positions (B, S) are those of `states`, one less than those of next_tokens; kv as in
        Llama.forward, with one layer.
        """
        if positions is None:
            positions = torch.arange(states.size(1), device=states.device)[None]  # (1, S)
        mask = None if kv is None else causal_mask(positions, kv_len)
        cache = None if kv is None else Rows(kv[0][0], kv[1][0], positions, kv_len)
        embedded = self.embed_norm(target.embed_tokens(next_tokens))  # (B, S, C)
        x = self.proj(torch.cat((embedded, self.state_norm(states)), dim=-1))  # (B, S, C)
        # under autocast the residual stream keeps the dtype of the target's
        x = x.to(states.dtype)
        return self.norm(self.block(x, target.rope(positions), mask, cache))


# ----------------------------------------------------------------------------------------------
# the three losses


@dataclass(frozen=True)
class MTPLoss:
    """How the head is trained. Each setting that would break the cancelling is refused here.

    The proof needs both losses to be the same function of logits, linear in the token's one-hot
    vector, over one output matrix. A z-loss on the next-token logits would leak -c times its
    gradient into the head; a soft-cap gives the two rows different Jacobians; label smoothing keeps
    the proof only where both losses have it, which is why there is one number for both.
    """

    mode: str = "ec"              # standard | ec | kl
    weight: float = 0.3           # of the head's loss in the total
    label_smoothing: float = 0.0  # of both losses
    z_loss: float = 0.0           # weight of mean(logsumexp^2) of the next-token logits
    softcap: float = 0.0          # logits become softcap * tanh(logits / softcap); 0 is off

    def __post_init__(self):
        if self.mode not in LOSSES:
            raise ValueError(f"the MTP loss is {self.mode!r}, allowed: {', '.join(LOSSES)}")
        if self.weight < 0:
            raise ValueError(f"the MTP loss weight is {self.weight}, it must not be negative")
        for name in ("z_loss", "softcap"):
            if self.mode == "ec" and getattr(self, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)}: error cancelling is exact only without it, "
                    f"so set {name} to 0 or train with mode standard or kl")


def check_cancels(target: Llama, mtp: MTP) -> None:
    """ValueError unless head and verifier share one linear map, apart from the embedding."""
    if type(target.lm_head) is not Linear:
        raise ValueError(f"lm_head is a {type(target.lm_head).__name__}: error cancelling needs "
                         "a plain matrix")
    if target.lm_head.weight is target.embed_tokens.weight:
        raise ValueError("lm_head is tied to the embedding: its gradient would then be neither "
                         "standard MTP's nor KL's, so untie them")
    own = [name for name, _ in mtp.named_parameters() if "head" in name]
    if own:
        raise ValueError(f"the MTP head has an output matrix of its own ({', '.join(own)}): error "
                         "cancelling needs head and verifier to share the target's lm_head")


def cancel_error(s: Tensor, h: Tensor, c: float, k: int = 1) -> Tensor:
    """s (B, T, C) unchanged; but the gradient of its row i + k also reaches h_i, times -c.

    h (B, T - k, C) is the head's state of depth k. Source: Error-cancelled MTP, its one line.
    """
    s = s + F.pad(c * (h.detach() - h), (0, 0, k, 0))
    return s


class Losses(NamedTuple):
    total: Tensor       # (), what is minimised
    next_loss: Tensor   # (), nats a token: the target's cross entropy
    mtp_loss: Tensor    # (), nats a token: the head's cross entropy, or its KL in mode kl
    agreement: Tensor   # (), share of rows where head and verifier have one argmax (if measured)
    states: Tensor      # (B, T, C), what lm_head multiplied for the next token
    mtp_states: Tensor  # (B, T - 1, C); row i is to be compared with row i + 1 of states


def target_losses(target: Llama, mtp: MTP, windows: Tensor, loss: MTPLoss, measure: bool = False,
                  max_logits: int = MAX_LOGITS) -> Losses:
    """Both losses of windows (B, T + 1): T inputs, T next-token labels, T - 1 labels for the head.

    c is the head's weight a position over the next-token loss's, from the counts used here: with
    means over T and T - 1 positions, weight x T / (T - 1). `measure` fills in the agreement.
    """
    inputs, labels = windows[:, :-1], windows[:, 1:]  # (B, T)
    states, _ = target(inputs)                        # (B, T, C)
    h = mtp(target, states[:, :-1], inputs[:, 1:])    # (B, T - 1, C)
    head_labels = labels[:, 1:]                       # (B, T - 1)
    s = states
    if loss.mode == "ec":
        s = cancel_error(states, h, c=loss.weight * labels.numel() / head_labels.numel())

    def loss_of(logits: list[Tensor], part: slice) -> tuple[Tensor, Tensor]:
        """Each window's share of the total, and of the measures."""
        next_logits, mtp_logits = (soft_capped(z, loss.softcap) for z in logits)
        next_loss = cross_entropy(next_logits, labels[part], loss) / labels.numel()
        if loss.mode == "kl":
            mtp_loss = kl_divergence(next_logits[:, 1:].detach(), mtp_logits).sum()
        else:
            mtp_loss = cross_entropy(mtp_logits, head_labels[part], loss)
        mtp_loss = mtp_loss / head_labels.numel()
        total = next_loss + loss.weight * mtp_loss
        if loss.z_loss:
            square = next_logits.logsumexp(dim=-1).square().sum()
            total = total + loss.z_loss * square / labels.numel()
        agreement = torch.zeros_like(next_loss)
        if measure:
            same = next_logits[:, 1:].argmax(dim=-1) == mtp_logits.argmax(dim=-1)
            agreement = same.sum() / head_labels.numel()
        return total, torch.stack((next_loss, mtp_loss, agreement)).detach()

    total, measures = through_head(target.lm_head, [s, h], loss_of, max_logits)
    return Losses(total, *measures.unbind(), states=s, mtp_states=h)


def soft_capped(logits: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def cross_entropy(logits: Tensor, labels: Tensor, loss: MTPLoss) -> Tensor:
    """Nats, summed over all rows of logits (b, rows, V)."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum",
                           label_smoothing=loss.label_smoothing)


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats at every position: (.., V) twice -> (..)."""
    log_p, log_q = p_logits.log_softmax(dim=-1), q_logits.log_softmax(dim=-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


# ----------------------------------------------------------------------------------------------
# how good a draft is


def draft_quality(p_logits: Tensor, q_logits: Tensor) -> dict[str, Tensor]:
    """How well draft q agrees with verifier p, (.., V) each for the same tokens; means, in fp32.

    tv                   total variation, half the L1 distance
    accept_sampled       1 - tv: acceptance under speculative sampling with rejection
    accept_greedy        the two argmaxes are equal: acceptance at temperature 0
    accept_argmax_draft  p[argmax q]: the draft is q's best token, the verifier samples
    kl                   KL(p || q), nats
    These are different numbers, not rescalings of one.
    """
    p, q = p_logits.float().softmax(dim=-1), q_logits.float().softmax(dim=-1)
    tv = 0.5 * (p - q).abs().sum(dim=-1)
    best = q.argmax(dim=-1, keepdim=True)
    return {
        "tv": tv.mean(),
        "accept_sampled": 1 - tv.mean(),
        "accept_greedy": (p.argmax(dim=-1, keepdim=True) == best).float().mean(),
        "accept_argmax_draft": p.gather(-1, best).mean(),
        "kl": kl_divergence(p_logits.float(), q_logits.float()).mean(),
    }
