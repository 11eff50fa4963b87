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
(`anchors`), and how h enters (`injection`); with DFlash2 as a third that goes with all of them.
Source: DMTP, sections 3 to 5 and its two updates (two anchors, zero-initialised residual).

Below the ruler: devices, checkpoints and paired differences, for train.py and speculate.py.
"""

import hashlib
import io
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from dflash import (DFlash, DraftConfig, adaptive_mean, context_seen, decayed_mean,
                    selector_losses, slot_chances, slot_losses, slot_positions)
from model import MAX_LOGITS, Config, Linear, Llama, RMSNorm, at_least_float32, through_head
from mtp import MTP


@dataclass(frozen=True)
class Arm:
    anchors: tuple[str, ...]  # the known tokens at the front of the block, before the masks
    injection: str            # how the MTP state h enters: one of INJECTIONS
    about: str
    dflash2: bool = False     # mixing, selector and adaptive weights

    @property
    def uses_mtp(self) -> bool:
        return "T1" in self.anchors

    @property
    def offset(self) -> int:
        """The block's position of the first input slot: 1 where A is left out."""
        return 0 if "A" in self.anchors else 1

    @property
    def first(self) -> int:
        """The block's first slot whose token DFlash predicts."""
        return 2 if self.uses_mtp else 1

    @property
    def context_has_mtp(self) -> bool:
        return self.injection in ("context", "mtp-context")


INJECTIONS = {
    "none": "h is not used",
    "residual": "T1's slot is E(T1) + W [E(T1); h], W = 0 at the start",
    "replace": "T1's slot is W [E(T1); h], which starts as E(T1)",
    "low-rank": "T1's slot is E(T1) + U V h, of rank C/4, U = 0 at the start",
    "masks": "every mask is the mask vector + W h, W = 0 at the start",
    "context": "the head's states join the taps as context",
    "mtp-context": "the head's states replace the taps as context",
}

ONE, TWO = ("T1",), ("A", "T1")
ARMS = {
    "dflash": Arm(("A",), "none", "the baseline: [A, mask x 7], seven proposals in parallel"),
    "dmtp": Arm(TWO, "residual", "[A, T1 + W [T1; h], mask x 6]: MTP gives T1, then six"),
    "conditioned": Arm(ONE, "none", "[T1, mask x 6]: MTP's token without its state"),
    "conditioned-2": Arm(TWO, "none", "[A, T1, mask x 6]: the same with two anchors"),
    "low-rank": Arm(ONE, "low-rank", "[T1 + U V h, mask x 6]"),
    "replace": Arm(ONE, "replace", "[W [T1; h], mask x 6]: the source's main method at first"),
    "replace-2": Arm(TWO, "replace", "[A, W [T1; h], mask x 6]: the same with two anchors"),
    "masks": Arm(ONE, "masks", "[T1, (mask + W h) x 6]"),
    "context": Arm(ONE, "context", "[T1, mask x 6], the head's states beside the taps"),
    "mtp-context": Arm(ONE, "mtp-context", "[T1, mask x 6], the head's states, no taps"),
    "dflash2": Arm(("A",), "none", "dflash with mixing, path selector, adaptive weights", True),
    "dmtp-d2": Arm(TWO, "residual", "dmtp with the same three", True),
}


class Fusion(nn.Module):
    """What the state that predicted T1, alone or beside T1's embedding, adds to a slot's input."""

    def __init__(self, cfg: Config, injection: str, embed_rms: float):
        super().__init__()
        C = cfg.width
        self.embed_norm = None
        self.state_norm = RMSNorm(C, cfg.norm_eps)
        if injection == "low-rank":
            self.proj = nn.Sequential(Linear(C, C // 4), Linear(C // 4, C))
            nn.init.normal_(self.proj[0].weight, std=0.02)
            nn.init.zeros_(self.proj[1].weight)
            return
        if injection != "masks":
            self.embed_norm = RMSNorm(C, cfg.norm_eps)
        self.proj = Linear(C if injection == "masks" else 2 * C, C)
        nn.init.zeros_(self.proj.weight)
        if injection == "replace":
            # a zero here would cut T1 off; so it starts as its embedding, at its usual size
            nn.init.eye_(self.proj.weight[:, :C])
            nn.init.constant_(self.embed_norm.weight, embed_rms)

    def forward(self, t1_emb: Tensor, h: Tensor) -> Tensor:
        """(.., C) and (.., C) -> (.., C)."""
        state = self.state_norm(h.detach())
        if self.embed_norm is not None:
            state = torch.cat((self.embed_norm(t1_emb), state), dim=-1)
        return self.proj(state)


class Drafter(nn.Module):
    """A DFlash with its arm: what stands in the block, and what the first predicted slot is.

    embed_rms is the usual size of an element of the target's embedding: where `replace` starts.
    """

    def __init__(self, cfg: Config, draft: DraftConfig, arm: Arm, embed_rms: float = 0.02):
        super().__init__()
        assert arm.injection in INJECTIONS, arm.injection
        self.arm, self.first = arm, arm.first
        n_taps = len(draft.tap_layers)
        n_features = {"context": n_taps + 1, "mtp-context": 1}.get(arm.injection, n_taps)
        self.dflash = DFlash(cfg, draft, draft.n_slots - arm.offset, n_features, arm.dflash2)
        self.fusion = None
        if arm.injection in ("residual", "replace", "low-rank", "masks"):
            self.fusion = Fusion(cfg, arm.injection, embed_rms)

    def fuse(self, t1_emb: Tensor, h: Tensor | None) -> Tensor:
        """T1's slot (.., C), made of T1's embedding and the state that predicted it."""
        if self.arm.injection == "replace":
            return self.fusion(t1_emb, h)
        if self.arm.injection in ("residual", "low-rank"):
            return t1_emb + self.fusion(t1_emb, h)
        return t1_emb

    def block_inputs(self, a_emb: Tensor, t1_slot: Tensor, h: Tensor | None) -> Tensor:
        """The block (.., S - offset, C): A's embedding and T1's slot where the arm has them, and
        masks; all (.., C)."""
        slots = {"A": a_emb, "T1": t1_slot}
        mask = self.dflash.mask_emb.expand_as(a_emb)
        if self.arm.injection == "masks":
            mask = mask + self.fusion(t1_slot, h)
        n_masks = self.dflash.draft.n_slots - self.first
        return torch.stack([slots[name] for name in self.arm.anchors] + [mask] * n_masks, dim=-2)

    def features(self, taps: Tensor, mtp_rows: Tensor | None) -> Tensor:
        """What the context is made of: taps (B, S, n_tap C) and the head's rows (B, S, C), row i
        reading x_{i+1}."""
        if self.arm.injection == "context":
            return torch.cat((taps, mtp_rows), dim=-1)
        return mtp_rows if self.arm.injection == "mtp-context" else taps


class BlockLoss(NamedTuple):
    loss: Tensor       # (), nats: position-decayed; with DFlash2 the weighted sum of its two
    agreement: Tensor  # (n,) a predicted slot: share of proposals equal to the target's own token


LABELS = ("hard", "soft")


def block_loss(target: Llama, mtp: MTP, drafter: Drafter, tokens: Tensor, anchors: Tensor,
               labels: str = "hard", measure: bool = False,
               max_logits: int = MAX_LOGITS) -> BlockLoss:
    """The drafter's loss on windows tokens (B, T) at anchors (B, N), all blocks in one forward.

    labels: hard is the text's token (a one-hot distribution), as in the sources; soft is the
    target's whole distribution for it, from the same forward pass: that is what will verify.
    `measure` adds the agreement with the target's argmax, given the text before (zeros otherwise).
    The target and the head only give features and are meant to be frozen. anchors lie on the CPU.
    """
    assert labels in LABELS, labels
    draft, first, offset = drafter.dflash.draft, drafter.first, drafter.arm.offset
    B, N = anchors.shape
    rows = torch.arange(B, device=tokens.device)[:, None]                       # (B, 1)
    a = to_device(anchors, tokens.device)                                       # (B, N)
    at = slot_positions(a, draft.n_slots)                                       # (B, N, S)
    block = tokens[rows[:, :, None], at]                                        # (B, N, S)
    h = mtp_rows = None
    with torch.no_grad():
        states, taps = target(tokens, tap_layers=draft.tap_layers)
        a_emb, t1_emb = target.embed_tokens(block[:, :, :2]).unbind(dim=2)      # (B, N, C) each
        if drafter.arm.injection != "none":
            mtp_rows = mtp(target, states[:, :-1], tokens[:, 1:])               # (B, T - 1, C)
            # row a - 1 reads state a - 1 and E(A), and predicts T1
            h = mtp_rows[rows, a - 1]                                           # (B, N, C)
            if drafter.arm.context_has_mtp:
                mtp_rows = F.pad(mtp_rows, (0, 0, 0, 1))  # (B, T, C); no block sees row T - 1
        # the target predicts the token of a slot one row before it
        verifier = states[rows[:, :, None], at[:, :, first:] - 1].flatten(1, 2)  # (B, N n, C)
    x = drafter.block_inputs(a_emb, drafter.fuse(t1_emb, h), h)         # (B, N, S - offset, C)
    features, seen = drafter.features(taps, mtp_rows), context_seen(anchors, tokens.size(1))
    out = drafter.dflash.forward_blocks(target, features, x, a, seen, offset)
    out = out[:, :, first - offset:]                                            # (B, N, n, C)
    selector = drafter.dflash.selector

    def loss_of(logits: list[Tensor], part: slice) -> tuple[Tensor, Tensor]:
        """Each window's share of the loss, and of the agreement."""
        proposed = logits[0].unflatten(1, (N, -1))                              # (b, N, n, V)
        agreement = torch.zeros(out.size(2), device=out.device)
        if measure or labels == "soft":
            with torch.no_grad():
                own = at_least_float32(target.lm_head(verifier[part]))
                own = own.unflatten(1, (N, -1))                                 # (b, N, n, V)
        if labels == "soft":
            wanted = own.softmax(dim=-1)
        else:
            wanted = torch.zeros_like(proposed).scatter_(-1, block[part, :, first:, None], 1.0)
        if measure:
            same = proposed.argmax(dim=-1) == own.argmax(dim=-1)
            agreement = same.sum(dim=(0, 1)) / (B * N)
        losses = slot_losses(proposed, wanted)                                  # (b, N, n)
        if selector:
            walk = selector_losses(selector, out[part], proposed, block[part, :, first - 1:-1],
                                   wanted)
            loss = adaptive_mean(losses + walk, slot_chances(proposed, wanted))
        else:
            loss = decayed_mean(losses, draft.gamma)
        return loss * (proposed.size(0) / B), agreement

    if selector:  # its gradient does not pass through lm_head alone: the logits are held whole
        max_logits = B * N * out.size(2) * target.lm_head.weight.size(0)
    return BlockLoss(*through_head(target.lm_head, [out.flatten(1, 2)], loss_of, max_logits))


# ==============================================================================================
# devices; checkpoints: plain types and tensors only, so that they load with weights_only


def pick_device(wanted: str | None) -> torch.device:
    """The device to use, by default a GPU where there is one; ValueError if it is not here."""
    wanted = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9]\d?))?", wanted):
        raise ValueError(f"--device is {wanted!r}, allowed: cpu, cuda, cuda:N")
    device = torch.device(wanted)
    n = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= n:
        raise ValueError(f"--device is {wanted!r}, but torch sees {n} CUDA devices: "
                         "use --device cpu")
    # subtle: with an index, as torch.cuda.set_device refuses a bare "cuda"
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def describe_device(device: torch.device) -> str:
    """What speeds depend on: the name of the GPU, or of the processor and its threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")  # of Linux, where Python knows no more than x86_64
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.+)", cpuinfo.read_text())):
        name = found[1]
    return f"{name}, {torch.get_num_threads()} threads"


def check_compiler(device: torch.device) -> None:
    """ValueError where torch.compile does not work."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2, device=device))
    except Exception as e:  # of compilers, drivers and file systems
        raise ValueError(f"--compile: torch.compile does not work here ({type(e).__name__}): it "
                         "needs a C++ compiler for CPUs, Triton for GPUs; or leave it out") from e


def no_memory(error: RuntimeError | MemoryError) -> str:
    """One line for a full memory, a GPU's or the system's; any other error is raised again.

    subtle: torch has a class of error for one case alone. The system's memory, a GPU that others
    have filled, and NVIDIA's libraries, which ask for memory themselves, are known by the text.
    """
    text = str(error) or "no more for this process"
    known = ("CPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
    if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(
            words in text for words in known):
        raise error
    first_line = text.split("Allocator: ")[-1].split("\n")[0]
    return f"out of memory ({'. '.join(first_line.split('. ')[:2])})"


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x there; a GPU fetches it from pinned memory while this process goes on."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def save_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let write() fill a temporary name, and rename it: a failed or interrupted save keeps the
    older file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_json(path: Path, content: dict | list) -> None:
    """ValueError for a NaN, which JSON does not have."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    save_whole(path, lambda temporary: temporary.write_text(text))


def save_checkpoint(path: Path, checkpoint: dict) -> None:
    """OSError when it cannot be written (torch reports a full disk as a RuntimeError)."""
    try:
        save_whole(path, lambda temporary: torch.save(checkpoint, temporary))
    except RuntimeError as e:
        reason = str(e).splitlines()[0]
        raise OSError(f"{path} could not be written ({reason}): is there a folder, and space "
                      "on the disk?") from e


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
    return digest_of(target.state_dict() | {f"mtp.{k}": v for k, v in mtp.state_dict().items()})


def digest_of(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, p in weights.items():
        digest.update(name.encode() + p.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def load_target(out: Path) -> tuple[Llama, MTP, dict]:
    """Target, head and the rest of out/target.pt, on the CPU in float32."""
    hint = f"python train.py --ec-mtp --out {shlex.quote(str(out))}"
    checkpoint = load_checkpoint(out / "target.pt", "target", hint)
    try:
        for name in ("tokenizer", "size", "data", "fingerprint", "training"):  # read by others
            checkpoint[name]
        cfg = Config(**checkpoint["config"])
        target, mtp = Llama(cfg), MTP(cfg)
        target.load_state_dict(checkpoint["target"])
        mtp.load_state_dict(checkpoint["mtp"])
    except (KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{out / 'target.pt'} was made by other code ({type(e).__name__}): make "
                         f"it again with {hint} --overwrite") from e
    return target.requires_grad_(False), mtp.requires_grad_(False), checkpoint


def load_drafter(out: Path, name: str, cfg: Config, target_fingerprint: str) -> Drafter:
    """The drafter out/NAME.pt; ValueError if it belongs to another target."""
    hint = f"python train.py --stage drafter --drafter {name} --out {shlex.quote(str(out))}"
    path = out / f"{name}.pt"
    checkpoint = load_checkpoint(path, "drafter", hint)
    wanted = checkpoint.get("target_fingerprint")
    if wanted != target_fingerprint:
        raise ValueError(f"{path} was trained for target {wanted}, but "
                         f"{out / 'target.pt'} is {target_fingerprint}: train it again with "
                         f"{hint} --overwrite")
    try:
        arm = Arm(tuple(checkpoint["anchors"]), checkpoint["injection"], name,
                  checkpoint["dflash2"])
        drafter = Drafter(cfg, DraftConfig(**checkpoint["draft_config"]), arm)
        drafter.load_state_dict(checkpoint["drafter"])
    except (KeyError, TypeError, RuntimeError, AssertionError) as e:
        raise ValueError(f"{path} was made by other code ({type(e).__name__}): make it again with "
                         f"{hint} --overwrite") from e
    note_unfinished(path, checkpoint)
    return drafter.requires_grad_(False)


def note_unfinished(path: Path, checkpoint: dict) -> None:
    """Say so if a file is of a training that was stopped, or still goes on."""
    if training := checkpoint.get("training"):
        print(f"note: {path} is not fully trained, it stands at step {training['step']}: "
              "train.py --resume goes on", file=sys.stderr)


def differing(there: dict, asked: dict, word: str = "asked") -> str:
    """The settings that differ, with both values; "" if none does."""
    return ", ".join(f"{k} {there.get(k)} (there) / {asked.get(k)} ({word})"
                     for k in sorted(there.keys() | asked.keys()) if there.get(k) != asked.get(k))


def start_from(path: Path, drafter: Drafter, target_fingerprint: str) -> str:
    """Put the weights of another drafter's file into a new one, and give back their digest.

    What the file does not have (a fusion, DFlash2's parts) keeps its start, which is a no-op in the
    zero-initialised arms. ValueError if target, size or layout do not fit.
    """
    checkpoint = load_checkpoint(path, "drafter", "python train.py --stage drafter")
    if (wanted := checkpoint.get("target_fingerprint")) != target_fingerprint:
        raise ValueError(f"--init-from {path} was trained for target {wanted}, this one is "
                         f"{target_fingerprint}")
    there, here = checkpoint.get("draft_config", {}), asdict(drafter.dflash.draft)
    if differ := differing(there, here, "here"):
        raise ValueError(f"--init-from {path} has another layout: {differ}")
    weights, own = checkpoint["drafter"], drafter.state_dict()
    misfits = [name for name, w in weights.items()
               if name not in own or own[name].shape != w.shape]
    if misfits:
        raise ValueError(f"--init-from {path} is the drafter {checkpoint['name']}: its "
                         f"{', '.join(misfits[:3])} has no place in {drafter.arm.about}")
    note_unfinished(path, checkpoint)
    drafter.load_state_dict(own | weights)
    return digest_of(weights)


def drafter_checkpoint(name: str, drafter: Drafter, target_fingerprint: str) -> dict:
    """What a drafter's file holds, without the training state."""
    arm = drafter.arm
    return {"kind": "drafter", "name": name, "anchors": list(arm.anchors),
            "injection": arm.injection, "dflash2": arm.dflash2,
            "draft_config": asdict(drafter.dflash.draft), "drafter": drafter.state_dict(),
            "target_fingerprint": target_fingerprint}


def target_checkpoint(target: Llama, mtp: MTP, tokenizer: dict) -> dict:
    """What the target's file holds, without the training state; with its tokenizer."""
    return {"kind": "target", "config": asdict(target.cfg), "tokenizer": tokenizer,
            "target": target.state_dict(), "mtp": mtp.state_dict(),
            "fingerprint": fingerprint(target, mtp)}


# ----------------------------------------------------------------------------------------------
# paired differences
#
# The interval by hand, for the differences 1, 2 and 3 of three seeds: their mean is 2, their
# standard deviation 1, and t(0.975, 2) = 4.303; so it is 2 +- 4.303 x 1 / sqrt(3) = 2 +- 2.484.
# That holds 0: not resolved, by three seeds. The same from six, 1, 1, 2, 2, 3 and 3, would be.


def t_quantile(df: int) -> float:
    """t(0.975, df): Student's t with df degrees of freedom stays within +- it 95% of the time.

    By bisection of P(|t| <= x), which for a whole df is a finite sum in the angle a = atan(x /
    sqrt(df)). Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    def inside(a: float) -> float:
        term, total = math.cos(a) if df % 2 else 1.0, 0.0
        for k in range(df % 2, df - 1, 2):
            total += term
            term *= (k + 1) / (k + 2) * math.cos(a) ** 2
        total *= math.sin(a)
        return 2 / math.pi * (a + total) if df % 2 else total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 0.95 else (low, middle)
    return math.sqrt(df) * math.tan(low)


def interval(differences: list[float]) -> dict:
    """{mean, half_width, n} of the 95% interval for their mean; one difference has no width."""
    n, half_width = len(differences), None
    if n > 1:
        half_width = t_quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return {"mean": statistics.fmean(differences), "half_width": half_width, "n": n}


def verdict(found: dict) -> str:
    """What to say of an interval beside its numbers."""
    if found["half_width"] is None:
        return "no interval"
    return "not resolved" if abs(found["mean"]) <= found["half_width"] else ""
