"""Hand the MTP head's first token, and the state that predicted it, to the block drafter (DMTP).

DFlash's weakest proposal is its first, and a rejected first proposal ends the block. The MTP head,
trained with the target, is best at just that token. So MTP proposes T1, and the drafter continues:

    slot          0      1              2     ..    7
    input         E(A)   E(T1) + D      mask  ..    mask
    predicts      -      -              T2    ..    T7

    D = W [RMS(E(T1)); RMS(h)],  W = 0 at the start,  h = the MTP state that predicted T1

W starts at zero, so training starts from a drafter that simply knows T1, and an existing DFlash can
be continued; then W learns what h knows beyond its best guess. No other slot is touched; the later
ones see h through attention to slot 1. Target and head are frozen. Training takes T1 from the text,
decoding takes it from the head; h comes from the head in both.

An arm is two settings, never a copy of code: which known tokens stand at the front of the block
(`anchors`), and how h enters (`injection`).
Source: DMTP, sections 3 to 5 and its two updates (two anchors, zero-initialised residual).
"""

import hashlib
import io
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from dflash import (DFlash, DraftConfig, context_seen, decayed_cross_entropy,
                    slot_positions)
from model import MAX_LOGITS, Config, Llama, through_head
from mtp import MTP


@dataclass(frozen=True)
class Arm:
    anchors: tuple[str, ...]  # the known tokens at the front of the block, before the masks
    injection: str            # none | residual: how the MTP state joins T1's embedding
    about: str

    @property
    def uses_mtp(self) -> bool:
        return "T1" in self.anchors


ARMS = {
    "dflash": Arm(("A",), "none", "the baseline: [A, mask x 7], seven proposals in parallel"),
    "dmtp": Arm(("A", "T1"), "residual", "[A, T1 + W [T1; h], mask x 6]: MTP gives T1, then six"),
}


class Fusion(nn.Module):
    """T1's embedding plus a residual made of itself and the MTP state that predicted it."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.embed_norm = nn.RMSNorm(cfg.width, cfg.norm_eps)
        self.state_norm = nn.RMSNorm(cfg.width, cfg.norm_eps)
        self.proj = nn.Linear(2 * cfg.width, cfg.width, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, t1_emb: Tensor, h: Tensor) -> Tensor:
        """(.., C) and (.., C) -> (.., C)."""
        pair = torch.cat((self.embed_norm(t1_emb), self.state_norm(h.detach())), dim=-1)
        return t1_emb + self.proj(pair)


class Drafter(nn.Module):
    """A DFlash with its arm: what stands in the block, and what the first predicted slot is."""

    def __init__(self, cfg: Config, draft: DraftConfig, arm: Arm):
        super().__init__()
        self.arm = arm
        self.first = len(arm.anchors)  # the first slot whose token DFlash predicts
        self.dflash = DFlash(cfg, draft)
        self.fusion = Fusion(cfg) if arm.injection == "residual" else None

    def fuse(self, t1_emb: Tensor, h: Tensor) -> Tensor:
        """T1's slot (.., C), made of T1's embedding and the state that predicted it."""
        return t1_emb if self.fusion is None else self.fusion(t1_emb, h)

    def block_inputs(self, a_emb: Tensor, t1_emb: Tensor | None) -> Tensor:
        """The block (.., S, C): A's embedding (.., C), T1's slot where the arm has it, masks."""
        known = [a_emb, t1_emb][:self.first]
        masks = [self.dflash.mask_emb.expand_as(a_emb)] * (self.dflash.draft.n_slots - self.first)
        return torch.stack(known + masks, dim=-2)


class BlockLoss(NamedTuple):
    loss: Tensor       # (), nats, position-decayed
    agreement: Tensor  # (n,) a predicted slot: share of proposals equal to the target's own token


LABELS = ("hard", "soft")


def block_loss(target: Llama, mtp: MTP, drafter: Drafter, tokens: Tensor, anchors: Tensor,
               labels: str = "hard", measure: bool = False,
               max_logits: int = MAX_LOGITS) -> BlockLoss:
    """The drafter's loss on windows tokens (B, T) at anchors (B, N), all blocks in one forward.

    labels: hard is the text's token, as in the sources; soft is the target's whole distribution
    for that token, from the same forward pass: what a proposal is verified against is the target.
    `measure` adds the agreement with the target's argmax, given the text before (zeros otherwise).
    The target and the head only give features and are meant to be frozen. anchors lie on the CPU.
    """
    assert labels in LABELS, labels
    draft, first = drafter.dflash.draft, drafter.first
    B, N = anchors.shape
    rows = torch.arange(B, device=tokens.device)[:, None]                       # (B, 1)
    a = to_device(anchors, tokens.device)                                       # (B, N)
    at = slot_positions(a, draft.n_slots)                                       # (B, N, S)
    block = tokens[rows[:, :, None], at]                                        # (B, N, S)
    h = None
    with torch.no_grad():
        states, taps = target(tokens, tap_layers=draft.tap_layers)
        a_emb, t1_emb = target.embed_tokens(block[:, :, :2]).unbind(dim=2)      # (B, N, C) each
        if drafter.arm.injection != "none":
            # row a - 1 of the head reads state a - 1 and E(A), and predicts T1
            h = mtp(target, states[:, :-1], tokens[:, 1:])[rows, a - 1]         # (B, N, C)
        # the target predicts the token of a slot one row before it
        verifier = states[rows[:, :, None], at[:, :, first:] - 1].flatten(1, 2)  # (B, N n, C)
    x = drafter.block_inputs(a_emb, drafter.fuse(t1_emb, h))                    # (B, N, S, C)
    seen = context_seen(anchors, tokens.size(1))
    out = drafter.dflash.forward_blocks(target, taps, x, a, seen)[:, :, first:]

    def loss_of(logits: list[Tensor], part: slice) -> tuple[Tensor, Tensor]:
        """Each window's share of the loss, and of the agreement."""
        proposed = logits[0].unflatten(1, (N, -1))                              # (b, N, n, V)
        wanted, agreement = block[part, :, first:], torch.zeros(out.size(2), device=out.device)
        if measure or labels == "soft":
            with torch.no_grad():
                own = target.lm_head(verifier[part]).unflatten(1, (N, -1))      # (b, N, n, V)
        if labels == "soft":
            wanted = own.softmax(dim=-1)
        if measure:
            same = proposed.argmax(dim=-1) == own.argmax(dim=-1)
            agreement = same.sum(dim=(0, 1)) / (B * N)
        share = proposed.size(0) / B
        return decayed_cross_entropy(proposed, wanted, draft.gamma) * share, agreement

    return BlockLoss(*through_head(target.lm_head, [out.flatten(1, 2)], loss_of, max_logits))


# ----------------------------------------------------------------------------------------------
# devices; checkpoints: plain types and tensors only, so that they load with weights_only


def pick_device(wanted: str | None) -> torch.device:
    """The device to use, by default a GPU where there is one; ValueError if it is not here."""
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {wanted!r}, allowed: cpu, cuda, cuda:N")
    n = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= n:
        raise ValueError(f"--device is {wanted!r}, but torch sees {n} CUDA devices: "
                         "use --device cpu")
    return device


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x there; a GPU fetches it from pinned memory while this process goes on."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def save_checkpoint(path: Path, checkpoint: dict) -> None:
    """Write to a temporary name and rename: a failed or interrupted save keeps the older file.

    OSError when it cannot be written (torch reports a full disk as a RuntimeError).
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        torch.save(checkpoint, temporary)
        os.replace(temporary, path)
    except RuntimeError as e:
        reason = str(e).splitlines()[0]
        raise OSError(f"{path} could not be written ({reason}): is there a folder, and space "
                      "on the disk?") from e
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path, kind: str, hint: str) -> dict:
    """The checkpoint at path; ValueError if it is missing, damaged or of another kind."""
    if not path.exists():
        raise ValueError(f"there is no {path}: run {hint}")
    content = io.BytesIO(path.read_bytes())
    try:
        checkpoint = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as e:  # what unpickling foreign bytes raises can be anything
        raise ValueError(f"{path} is not a checkpoint of this project, or was cut short "
                         f"({path.stat().st_size} bytes): make it again with {hint}") from e
    if not isinstance(checkpoint, dict) or checkpoint.get("kind") != kind:
        raise ValueError(f"{path} is not a {kind} checkpoint of this project: make one with {hint}")
    return checkpoint


def fingerprint(target: Llama, mtp: MTP) -> str:
    """16 hex digits that change with any weight: a drafter belongs to one target and its head."""
    digest = hashlib.sha256()
    for module in (target, mtp):
        for name, p in module.state_dict().items():
            digest.update(name.encode() + p.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def load_target(out: Path) -> tuple[Llama, MTP, dict]:
    """Target, head and the rest of out/target.pt, on the CPU in float32."""
    hint = f"python train.py --ec-mtp --out {out}"
    checkpoint = load_checkpoint(out / "target.pt", "target", hint)
    try:
        cfg = Config(**checkpoint["config"])
        target, mtp = Llama(cfg), MTP(cfg)
        target.load_state_dict(checkpoint["target"])
        mtp.load_state_dict(checkpoint["mtp"])
    except (KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{out / 'target.pt'} was made by other code ({type(e).__name__}): make "
                         f"it again with {hint} --overwrite") from e
    return target.requires_grad_(False), mtp.requires_grad_(False), checkpoint


def load_drafter(out: Path, name: str, cfg: Config,
                 target_fingerprint: str) -> tuple[Drafter, dict]:
    """The drafter out/NAME.pt; ValueError if it belongs to another target."""
    hint = f"python train.py --stage drafter --drafter {name} --out {out}"
    path = out / f"{name}.pt"
    checkpoint = load_checkpoint(path, "drafter", hint)
    wanted = checkpoint.get("target_fingerprint")
    if wanted != target_fingerprint:
        raise ValueError(f"{path} was trained for target {wanted}, but "
                         f"{out / 'target.pt'} is {target_fingerprint}: train it again with "
                         f"{hint} --overwrite")
    try:
        arm = Arm(tuple(checkpoint["anchors"]), checkpoint["injection"], name)
        drafter = Drafter(cfg, DraftConfig(**checkpoint["draft_config"]), arm)
        drafter.load_state_dict(checkpoint["drafter"])
    except (KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{path} was made by other code ({type(e).__name__}): make it again with "
                         f"{hint} --overwrite") from e
    return drafter.requires_grad_(False), checkpoint


def drafter_checkpoint(name: str, drafter: Drafter, target_fingerprint: str) -> dict:
    """What a drafter's file holds, without the training state."""
    return {"kind": "drafter", "name": name, "anchors": list(drafter.arm.anchors),
            "injection": drafter.arm.injection, "draft_config": asdict(drafter.dflash.draft),
            "drafter": drafter.state_dict(), "target_fingerprint": target_fingerprint}


def target_checkpoint(target: Llama, mtp: MTP, tokenizer: dict) -> dict:
    """What the target's file holds, without the training state; with its tokenizer."""
    return {"kind": "target", "config": asdict(target.cfg), "tokenizer": tokenizer,
            "target": target.state_dict(), "mtp": mtp.state_dict(),
            "fingerprint": fingerprint(target, mtp)}
