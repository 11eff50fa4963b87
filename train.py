"""Two stages in one flat loop: the target with its MTP head, then a block drafter on both, frozen.

    python train.py --ec-mtp                          target with an error-cancelled head, then DMTP
    python train.py --stage drafter --drafter dflash  the baseline drafter, for the same target
    python train.py --compare standard ec kl          ways to train the head, over paired seeds

Every batch follows from (seed, step) and nothing else. So arms see the same text in the same order,
and a run that is stopped and resumed gives the losses of one that was not.
"""

import argparse
import ctypes
import io
import json
import math
import shlex
import signal
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from data import prepare
from dflash import draft_preset, sample_anchors
from dmtp import (ARMS, LABELS, Drafter, block_loss, check_compiler, describe_device, differing,
                  drafter_checkpoint, interval, load_checkpoint, load_target, no_memory,
                  pick_device, save_checkpoint, save_json, save_whole, start_from, t_quantile,
                  target_checkpoint, to_device, verdict)
from model import MAX_LOGITS, SIZES, Block, Config, Llama, preset
from mtp import LOSSES, MTP, MTPLoss, check_cancels, draft_quality, target_losses

EVAL_WINDOWS = 64


@dataclass(frozen=True)
class Recipe:
    """How one stage is trained. All of it is kept in the checkpoint, and must match to resume."""

    steps: int
    batch: int               # windows a step
    optimizer: str           # muon | adamw
    lr: float                # of the hidden matrices, at its peak
    lr_rest: float           # of embeddings, lm_head, norms; with adamw the same as lr
    weight_decay: float      # of the hidden matrices
    warmup: int              # steps
    seed: int
    dtype: str               # float32 | tf32 | bfloat16 (autocast; weights stay float32)
    labels: str = "hard"     # of a drafter: the text's token, or the target's distribution (soft)
    momentum: float = 0.95   # of Muon
    beta1: float = 0.9       # of AdamW, its momentum
    clip: float = 1.0        # largest gradient norm


# ----------------------------------------------------------------------------------------------
# data, learning rate, optimizers


def get_batch(tokens: np.ndarray, T: int, batch: int, seed: int, step: int) -> Tensor:
    """Windows (batch, T + 1) at random places, int64. Windows cross the ends of documents."""
    starts = np.random.default_rng((seed, step)).integers(0, len(tokens) - T, batch)
    return torch.from_numpy(np.stack([tokens[s:s + T + 1] for s in starts]).astype(np.int64))


def eval_batch(tokens: np.ndarray, T: int) -> Tensor:
    """Windows (EVAL_WINDOWS, T + 1) at fixed, evenly spaced places: the same text for every run."""
    starts = np.linspace(0, len(tokens) - T - 1, EVAL_WINDOWS).astype(int)
    return torch.from_numpy(np.stack([tokens[s:s + T + 1] for s in starts]).astype(np.int64))


def get_lr(step: int, recipe: Recipe) -> float:
    """The share of the peak learning rate at a step: linearly up, then linearly down to zero."""
    up = (step + 1) / max(1, recipe.warmup)
    down = (recipe.steps - step) / max(1, recipe.steps - recipe.warmup)
    return min(1.0, up, down)


def process() -> tuple[int, int]:
    """This process's rank, and how many there are (torchrun's)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def wait_for_all() -> None:
    """Until every process is here: what the first one writes is then on the disk."""
    if dist.is_initialized():
        dist.barrier()


def average_over_processes(tensors: list[Tensor]) -> None:
    """Put the mean over all processes into every tensor, in one message."""
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for x, mean in zip(tensors, flat.split([x.numel() for x in tensors])):
        x.copy_(mean.view_as(x))


class KeepFloat32(TorchFunctionMode):
    """torch.optim.Muon orthogonalises in bfloat16, which a CPU without bf16 instructions emulates.

    Inside this mode Tensor.bfloat16() is a copy in the tensor's own dtype. On such a CPU (AVX2) a
    step of Muon on the tiny size takes 0.14 s so, and 2.8 s otherwise.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.bfloat16:
            return args[0].clone()
        return function(*args, **(kwargs or {}))


def make_optimizers(trained: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW alone (decay on the hidden matrices only), or Muon on those and AdamW on the rest."""
    tables = {id(m.weight) for name, m in trained.named_modules()
              if isinstance(m, nn.Embedding) or name.endswith("lm_head")}
    parameters = list(trained.parameters())
    hidden = [p for p in parameters if p.dim() == 2 and id(p) not in tables]
    rest = [p for p in parameters if all(p is not q for q in hidden)]
    if recipe.optimizer == "adamw":
        groups = [{"params": hidden, "weight_decay": recipe.weight_decay, "peak_lr": recipe.lr},
                  {"params": rest, "weight_decay": 0.0, "peak_lr": recipe.lr}]
        return [torch.optim.AdamW(groups, betas=(recipe.beta1, 0.95), fused=True)]
    # match_rms_adamw: an update has the size that AdamW's would have
    muon = torch.optim.Muon([{"params": hidden, "peak_lr": recipe.lr}], momentum=recipe.momentum,
                            weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([{"params": rest, "peak_lr": recipe.lr_rest}],
                              betas=(recipe.beta1, 0.95), weight_decay=0.0, fused=True)
    return [muon, adamw]


def optimizer_step(optimizers: list[torch.optim.Optimizer], share: float, on_cpu: bool) -> None:
    """One step at a share of each group's peak learning rate; gradients are dropped afterwards."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = share * group["peak_lr"]
        with KeepFloat32() if on_cpu else nullcontext():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ----------------------------------------------------------------------------------------------
# the two stages: what is trained, on which loss, and how it is judged


@dataclass
class Stage:
    """The models of a stage. Without a drafter it trains target and mtp; with one, it alone."""

    target: Llama
    mtp: MTP
    mtp_loss: MTPLoss | None  # of the target's training
    drafter: Drafter | None
    max_logits: int = MAX_LOGITS  # of the target's losses, at a time

    def __post_init__(self):
        if self.mtp_loss is not None and self.mtp_loss.mode == "ec":
            check_cancels(self.target, self.mtp)

    @property
    def trained(self) -> nn.ModuleList:
        return nn.ModuleList([self.target, self.mtp] if self.drafter is None else [self.drafter])


def stage_loss(stage: Stage, windows: Tensor, anchors: Tensor | None, labels: str,
               measure: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of windows (B, T + 1) and, with `measure`, what bar and log show (nats, shares).

    A drafter also takes anchors (B, N), on the CPU.
    """
    if stage.drafter is None:
        losses = target_losses(stage.target, stage.mtp, windows, stage.mtp_loss, measure,
                               stage.max_logits)
        shown = {"next_loss": losses.next_loss, "mtp_loss": losses.mtp_loss,
                 "agreement": losses.agreement}
        return losses.total, shown if measure else {}
    result = block_loss(stage.target, stage.mtp, stage.drafter, windows[:, :-1], anchors, labels,
                        measure)
    shown = {"loss": result.loss.detach(), "agreement": result.agreement.mean()}
    return result.loss, shown if measure else {}


def autocast(recipe: Recipe, device: torch.device):
    """The context of a forward pass in the recipe's dtype."""
    bfloat16 = recipe.dtype == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16) if bfloat16 else nullcontext()


def step_gradients(stage: Stage, recipe: Recipe, windows: Tensor, step: int, micro_batch: int,
                   measure: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Leave a step's gradients in the parameters; gives its loss and measures.

    Of the windows (batch, T + 1), on the CPU, this process takes its share, and micro_batch at a
    time: the gradients are sums over the parts, each weighed by its number of windows. All
    windows are equally long, so a part's two means have the counts' ratio of the whole step, and
    so the coefficient of error cancelling.
    """
    device = next(stage.target.parameters()).device
    anchors = None
    if stage.drafter is not None:
        S = stage.drafter.dflash.draft.n_slots
        anchors = sample_anchors(len(windows), windows.size(1) - 1, S, recipe.seed, step)
    rank, n_processes = process()
    n = len(windows) // n_processes
    losses, measures = [], {}
    for first in range(0, n, micro_batch):
        part = slice(rank * n + first, rank * n + min(first + micro_batch, n))
        share = (part.stop - part.start) / n
        with autocast(recipe, device):
            loss, shown = stage_loss(stage, to_device(windows[part], device),
                                     None if anchors is None else anchors[part], recipe.labels,
                                     measure)
        (share * loss).backward()
        losses.append(share * loss.detach())
        for name, value in shown.items():
            measures[name] = measures.get(name, 0) + share * value
    total = torch.stack(losses).sum()
    if n_processes > 1:
        average_over_processes([p.grad for p in stage.trained.parameters()])
        average_over_processes([total, *measures.values()])
    return total, measures


def train_step(stage: Stage, recipe: Recipe, optimizers: list[torch.optim.Optimizer],
               tokens: np.ndarray, step: int, micro_batch: int | None,
               measure: bool) -> tuple[Tensor, dict[str, float], Tensor]:
    """Change the weights by one step; gives its loss (), measures, and gradient norm ()."""
    T, device = stage.target.cfg.context, next(stage.target.parameters()).device
    windows = get_batch(tokens, T, recipe.batch, recipe.seed, step)
    loss, shown = step_gradients(stage, recipe, windows, step, micro_batch or recipe.batch, measure)
    norm = torch.nn.utils.clip_grad_norm_(stage.trained.parameters(), recipe.clip)
    optimizer_step(optimizers, get_lr(step, recipe), on_cpu=device.type == "cpu")
    return loss, {name: value.item() for name, value in shown.items()}, norm


@torch.no_grad()
def evaluate(stage: Stage, windows: Tensor, recipe: Recipe) -> dict[str, float]:
    """The stage's measures on held-out windows, averaged over the windows; always in float32."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    total: dict[str, float] = {}
    head = stage.target.lm_head
    at_once = max(1, min(16, MAX_LOGITS // (2 * windows.size(1) * head.weight.size(0))))
    for i, part in enumerate(windows.split(at_once)):
        if stage.drafter is None:
            losses = target_losses(stage.target, stage.mtp, part, MTPLoss("standard"))
            measures = {"next_loss": losses.next_loss, "mtp_loss": losses.mtp_loss,
                        **draft_quality(head(losses.states[:, 1:]), head(losses.mtp_states))}
        else:
            S = stage.drafter.dflash.draft.n_slots
            anchors = sample_anchors(len(part), part.size(1) - 1, S, 0, i)
            result = block_loss(stage.target, stage.mtp, stage.drafter, part[:, :-1], anchors,
                                recipe.labels, measure=True)
            first = stage.drafter.first
            measures = {"loss": result.loss, "agreement": result.agreement.mean(),
                        **{f"agreement_T{first + k}": a for k, a in enumerate(result.agreement)}}
        for name, value in measures.items():
            total[name] = total.get(name, 0.0) + value.item() * len(part) / len(windows)
    torch.set_float32_matmul_precision(precision)
    return total


# ----------------------------------------------------------------------------------------------
# the loop


class CtrlC:
    """Ctrl-C asks the loop to stop after the step it is in; a second one stops at once.

    Of several processes each gets it, once from the terminal and once more from torchrun: they
    stop after the same step, and never at once.
    """

    def __init__(self):
        self.asked = False

    def ask(self, signum, frame):
        self.asked = True
        if process()[1] == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def anywhere(self) -> bool:
        """Whether any process was asked; the same answer in all of them."""
        if process()[1] == 1:
            return self.asked
        asked = torch.tensor([float(self.asked)])
        average_over_processes([asked])
        # subtle: a Ctrl-C that came meanwhile is not in it, and stands in self.asked till next time
        return bool(asked > 0)

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self.ask)
        return self

    def __exit__(self, *exception):
        signal.signal(signal.SIGINT, self.before)


def train(stage: Stage, recipe: Recipe, data: prepare.Dataset, path: Path, state: dict,
          micro_batch: int | None = None) -> dict[str, float]:
    """Train to the end of the recipe from state["step"], saving to path; gives the final measures.

    `state` is the checkpoint to write; the weights in it, if any, are replaced by the models'. Its
    "training" holds step and optimizers of a resumed run. KeyboardInterrupt after saving, if asked.
    """
    device = next(stage.target.parameters()).device
    T = stage.target.cfg.context
    name = path.stem
    refuse_short({"train": data.train, "val": data.val}, T)
    held_out = eval_batch(data.val, T).to(device)
    optimizers = make_optimizers(stage.trained, recipe)
    first_step = 0
    if state.get("training"):
        first_step = state["training"]["step"]
        for optimizer, saved in zip(optimizers, state["training"]["optimizers"]):
            optimizer.load_state_dict(saved)
    is_first = process()[0] == 0  # which alone writes
    start_log(path.parent, name, first_step)
    log_every, eval_every = max(1, recipe.steps // 60), min(max(1, recipe.steps // 4), 1000)
    measures: dict[str, float] = {}
    seconds, since = 0.0, first_step
    bar = tqdm(total=recipe.steps, initial=first_step, desc=name, unit="step",
               disable=None if is_first else True, dynamic_ncols=True)
    with bar, CtrlC() as ctrl_c:
        for step in range(first_step, recipe.steps):
            done = step + 1  # as the screen, the log and the checkpoint count
            last = done == recipe.steps
            judge = done % eval_every == 0 or last
            measure = step % log_every == 0 or judge
            t0 = time.perf_counter()
            loss, shown, norm = train_step(stage, recipe, optimizers, data.train, step, micro_batch,
                                           measure)
            refuse_non_finite(shown, done, path)
            if measure and device.type == "cuda":
                torch.cuda.synchronize()
            seconds += time.perf_counter() - t0
            bar.update()
            if measure:
                speed = (done - since) * recipe.batch * T / seconds
                seconds, since = 0.0, done
                bar.set_postfix_str(describe_measures(shown, 3) + f" | tokens/s {speed:.0f}")
                log(path.parent, {"stage": name, "step": done, **shown,
                                  "tokens_per_s": round(speed)})
            if judge:
                measures = evaluate(stage, held_out, recipe)
                refuse_non_finite(measures, done, path)
                bar.write(f"step {done:5d} | " + describe_measures(measures, 4))
                log(path.parent, {"stage": name, "step": done, "eval": measures})
            stop = ctrl_c.anywhere()
            if judge or stop:
                refuse_non_finite({"loss": loss.item(), "gradient norm": norm.item()}, done, path)
                training = {"step": done, "optimizers": [o.state_dict() for o in optimizers]}
                if is_first:
                    save_checkpoint(path, state | weights(stage, state) | {
                        "training": {} if last else training, "eval": measures})
                stop = ctrl_c.anywhere()  # or meanwhile
            if stop:
                wait_for_all()
                raise KeyboardInterrupt(f"stopped after step {done} of {recipe.steps}, "
                                        f"saved in {path}")
    wait_for_all()
    return measures


def weights(stage: Stage, state: dict) -> dict:
    """The part of a checkpoint that changes with training."""
    if stage.drafter is None:
        return target_checkpoint(stage.target, stage.mtp, state["tokenizer"])
    return drafter_checkpoint(state["name"], stage.drafter, state["target_fingerprint"])


def refuse_short(texts: dict[str, np.ndarray], T: int) -> None:
    """ValueError for a text that has no window of T tokens and one more."""
    for name, tokens in texts.items():
        if len(tokens) <= T:
            raise ValueError(f"{name} has {len(tokens)} tokens, a window needs {T + 1}: give "
                             "more text, or choose a --size with a shorter window")


def refuse_non_finite(measures: dict[str, float], step: int, path: Path,
                      title: str = "") -> None:
    """ValueError, before anything is saved, if a loss or a measure is infinite or not a number."""
    for name, value in measures.items():
        if not math.isfinite(value):
            raise ValueError(f"{title}{name} is {value} at step {step}: {path} keeps what was "
                             "saved before, if anything; try a lower --lr, or --dtype float32")


def describe_measures(measures: dict[str, float], digits: int) -> str:
    """One line, without the single proposals' agreements."""
    return " | ".join(f"{name} {value:.{digits}f}" for name, value in measures.items()
                      if not name.startswith("agreement_"))


def start_log(out: Path, name: str, step: int) -> None:
    """Drop from out/log.jsonl what a stage wrote after `step`: it will be written again."""
    path = out / "log.jsonl"
    if path.exists() and process()[0] == 0:
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            kept = [line for line in lines if line["stage"] != name or line["step"] <= step]
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path} has a line that is not of this project, or was cut short: "
                             "move the file away") from e
        text = "".join(json.dumps(line) + "\n" for line in kept)
        save_whole(path, lambda temporary: temporary.write_text(text))


def log(out: Path, line: dict) -> None:
    """Add a line to out/log.jsonl, if this is the first process."""
    if process()[0]:
        return
    with open(out / "log.jsonl", "a") as f:
        f.write(json.dumps(line) + "\n")


# ==============================================================================================
# settings, set-up and reporting


@dataclass(frozen=True)
class Defaults:
    steps: int
    batch: int
    lr_muon: float   # of the hidden matrices
    lr_rest: float   # of embeddings, lm_head and norms beside Muon
    lr_adamw: float  # of everything, without Muon
    momentum: float = 0.8   # of Muon
    beta1: float = 0.9      # of AdamW beside Muon


# tiny: the best of what was tried in the same time on two cores (README, "How the defaults were
# found"). The other sizes: the sources' batch, 20 tokens a parameter, and not tuned
TARGET_DEFAULTS = {
    "tiny": Defaults(steps=360, batch=8, lr_muon=0.014, lr_rest=0.06, lr_adamw=0.003,
                     momentum=0.6, beta1=0.8),
    "6m": Defaults(steps=3600, batch=64, lr_muon=0.01, lr_rest=0.03, lr_adamw=0.002),
    "10m": Defaults(steps=6500, batch=64, lr_muon=0.01, lr_rest=0.03, lr_adamw=0.0015),
    "28m": Defaults(steps=17000, batch=64, lr_muon=0.01, lr_rest=0.03, lr_adamw=0.001),
    "59m": Defaults(steps=36000, batch=64, lr_muon=0.01, lr_rest=0.03, lr_adamw=0.0008),
}
DRAFTER_DEFAULTS = {
    "tiny": Defaults(steps=440, batch=8, lr_muon=0.02, lr_rest=0.06, lr_adamw=0.003,
                     momentum=0.6, beta1=0.8),
    "6m": Defaults(steps=3000, batch=64, lr_muon=0.01, lr_rest=0.01, lr_adamw=0.001),
    "10m": Defaults(steps=3000, batch=64, lr_muon=0.01, lr_rest=0.01, lr_adamw=0.001),
    "28m": Defaults(steps=6000, batch=64, lr_muon=0.01, lr_rest=0.01, lr_adamw=0.0006),
    "59m": Defaults(steps=6000, batch=64, lr_muon=0.01, lr_rest=0.01, lr_adamw=0.0006),
}

MEANING = {
    "next_loss": "nats a token, the target's cross entropy",
    "mtp_loss": "nats a token, the MTP head's cross entropy one token further",
    "tv": "total variation between head and verifier, half the L1 distance",
    "accept_sampled": "1 - tv: acceptance of a sampled draft under rejection sampling",
    "accept_greedy": "head and verifier have the same argmax",
    "accept_argmax_draft": "the verifier's probability of the head's argmax",
    "kl": "nats, KL(verifier || head)",
    "loss": "nats, weighted cross entropy of the predicted slots, against the labels",
    "agreement": "share of proposals equal to the target's argmax, given the text before",
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    drafters = "\n".join(f"  {name:14} {arm.about}" for name, arm in ARMS.items())
    parser = argparse.ArgumentParser(
        usage="python train.py [options; --help lists them]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"drafters (h: the MTP state that predicted T1):\n{drafters}")
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ec-mtp", action="store_true",
                      help="train the MTP head error-cancelled (the default): --mtp-loss ec")
    what.add_argument("--mtp-loss", choices=LOSSES, help="how the MTP head is trained (default ec)")
    add("--size", choices=list(SIZES),
        help="default 10m with a GPU and a vocabulary of 8192 or more, else tiny")
    add("--data", metavar="NAME",
        help="a folder of data/ (default fineweb-edu if prepared, else stdlib; for --stage drafter "
             "the target's)")
    add("--out", type=Path, default=Path("out"), metavar="DIR",
        help="where checkpoints go (default out)")
    add("--overwrite", action="store_true", help="train again over checkpoints that are there")
    add("--resume", action="store_true", help="go on with a run that was stopped")
    add("--stage", choices=["all", "target", "drafter"], default="all", help="default all")
    add("--drafter", choices=list(ARMS), default="dmtp", metavar="NAME",
        help="one of the list below (default dmtp)")
    add("--init-from", type=Path, metavar="FILE",
        help="start the drafter from another one's weights, as dmtp from out/dflash.pt")
    add("--steps", type=int, metavar="N", help="optimizer steps of the target stage")
    add("--drafter-steps", type=int, metavar="N", help="optimizer steps of the drafter stage")
    add("--batch", type=int, metavar="N", help="windows a step, in both stages")
    add("--lr", type=float, metavar="F",
        help="peak learning rate of the hidden matrices, in both stages")
    add("--labels", choices=LABELS, default="soft",
        help="of the drafter: the target's distributions (soft, the default) or, as in the "
             "sources, the text's tokens (hard)")
    add("--optimizer", choices=["muon", "adamw"], default="muon", help="default muon")
    add("--seed", type=int, default=1337, metavar="N",
        help="of weights, batches and anchors (default 1337)")
    add("--device", metavar="D", help="cpu or cuda (default cuda where there is one)")
    add("--dtype", choices=["float32", "tf32", "bfloat16"], default="float32",
        help="of the matrix products in training (default float32: error cancelling subtracts "
             "nearly equal vectors; tf32 is for GPUs)")
    add("--micro-batch", type=int, metavar="N",
        help="windows in memory at a time, in each process (default all of a step)")
    add("--compile", action="store_true",
        help="run the layers of target and head through torch.compile")
    add("--compare", nargs="+", choices=list(COMPARED), metavar="ARM",
        help="train targets only, once an arm and seed, and compare them: "
             + "; ".join(f"{name} ({x.about})" for name, x in COMPARED.items())
             + ". A repeated command goes on, and more arms or seeds are added")
    add("--seeds", type=int, metavar="N",
        help="seeds of --compare, from --seed on (default 5)")
    add("--eval", nargs="+", metavar="FILE",
        help="further texts that --compare judges on: .txt and .jsonl, also .gz")
    args = parser.parse_args(argv)
    check_flags(parser, args)
    args.mtp_loss = args.mtp_loss or "ec"
    for name in ("steps", "drafter_steps", "batch", "lr", "micro_batch", "seeds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {value}: it must be positive and finite")
    last_seed = args.seed + (args.seeds or 5) - 1 if args.compare else args.seed
    if not 0 <= args.seed <= last_seed < 2 ** 63:
        parser.error(f"--seed is {args.seed}, allowed: 0 to 2^63 - {1 + last_seed - args.seed}")
    return args


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message where a flag would do nothing, in a stage or beside --compare."""
    def given(*names: str) -> str:
        return ", ".join(f"--{name.replace('_', '-')}" for name in names
                         if getattr(args, name) != parser.get_default(name))

    if not args.compare:
        if alone := given("seeds", "eval"):
            parser.error(f"{alone}: only with --compare")
        unused = {"all": (), "drafter": ("steps", "ec_mtp", "mtp_loss"),
                  "target": ("drafter", "init_from", "drafter_steps", "labels")}[args.stage]
        if idle := given(*unused):
            parser.error(f"{idle}: not used in --stage {args.stage}, leave it out"
                         + "; the drafter's is --drafter-steps" * ("--steps" in idle))
        return
    if twice := [arm for i, arm in enumerate(args.compare) if arm in args.compare[:i]]:
        parser.error(f"--compare has {twice[0]} twice: name each arm once")
    if senseless := given("ec_mtp", "mtp_loss", "stage", "drafter", "init_from", "drafter_steps",
                          "labels", "resume", "compile"):
        parser.error(f"--compare trains targets only, each arm with its own loss, and goes on by "
                     f"itself: leave out {senseless}")


def ready_data(name: str | None) -> str:
    """The data's name: as asked, or FineWeb-Edu if it is prepared, or the standard library, which
    is prepared where it is not."""
    root = Path(prepare.__file__).parent
    if name is None and (root / "fineweb-edu" / "meta.json").exists():
        name = "fineweb-edu"
    if name in (None, "stdlib"):
        name = "stdlib"
        if not (root / name / "meta.json").exists():
            prepare.prepare_stdlib(root / name)
    return name


def make_recipe(args: argparse.Namespace, defaults: Defaults, steps: int | None,
                labels: str = "hard") -> Recipe:
    steps, batch = steps or defaults.steps, args.batch or defaults.batch
    if batch % process()[1]:
        raise ValueError(f"--batch is {batch}, shared by {process()[1]} processes: it must be a "
                         "multiple of that")
    muon = args.optimizer == "muon"
    lr = args.lr or (defaults.lr_muon if muon else defaults.lr_adamw)
    return Recipe(steps=steps, batch=batch, optimizer=args.optimizer, lr=lr,
                  lr_rest=defaults.lr_rest if muon else lr, weight_decay=0.0 if muon else 0.1,
                  warmup=max(1, steps // 20), seed=args.seed, dtype=args.dtype, labels=labels,
                  momentum=defaults.momentum, beta1=defaults.beta1 if muon else 0.9)


def earlier_run(path: Path, kind: str, settings: dict,
                args: argparse.Namespace) -> dict | None:
    """The checkpoint to go on from; {} to start, None if done. ValueError if one is in the way."""
    if not path.exists() or (args.overwrite and not args.resume):
        return {}
    checkpoint = load_checkpoint(path, kind, "python train.py --overwrite --out "
                                 + shlex.quote(str(path.parent)))
    differ = differing(checkpoint.get("settings", {}), settings)
    if "training" not in checkpoint:
        differ = "it was made by other code"
    if differ and args.overwrite:
        return {}
    if differ:
        raise ValueError(f"{path} holds another {kind}: {differ}. "
                         "Choose another --out, the same settings, or --overwrite")
    if checkpoint["training"] and not args.resume:
        raise ValueError(f"{path} stopped at step {checkpoint['training']['step']}: "
                         "go on with --resume, or start again with --overwrite")
    if not checkpoint["training"]:
        print(f"{kind:10}{path} is there, trained with these settings: used as it is")
        return None
    return checkpoint


def report(title: str, measures: dict[str, float], seconds: float) -> None:
    print(f"\n{title}, {seconds:.0f} s, on {EVAL_WINDOWS} held-out windows")
    for name, value in measures.items():
        meaning = MEANING.get(name, f"of the proposals {name.removeprefix('agreement_')}")
        print(f"  {name:20} {value:8.4f}   {meaning}")
    if torch.cuda.is_initialized():
        peak = torch.cuda.max_memory_allocated() / 2 ** 30
        print(f"  peak memory {peak:17.2f}   GiB that the GPU's allocator gave out at most, so far")


def pick_size(args: argparse.Namespace, data: prepare.Dataset, device: torch.device) -> str:
    large = device.type == "cuda" and data.tokenizer["vocab_size"] >= 8192
    return args.size or ("10m" if large else "tiny")


def keep_freed_memory() -> None:
    """Let the C library (glibc; elsewhere nothing happens) keep what a step frees for the next one:
    pages that go back to the system are cleared before it lends them again."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never give the heap's end back
        libc.mallopt(-4, 0)   # M_MMAP_MAX: how many blocks may lie outside the heap


def describe(recipe: Recipe, T: int) -> str:
    n = recipe.steps * recipe.batch * T
    return (f"{recipe.optimizer}, {recipe.steps} steps of {recipe.batch} windows of {T} tokens "
            f"({n / 1e6:.2f}M), peak lr {recipe.lr:g}, {recipe.dtype}, seed {recipe.seed}")


def run_target(args: argparse.Namespace, data: prepare.Dataset, device: torch.device) -> None:
    """The first stage: out/target.pt, trained here unless it is there."""
    size = pick_size(args, data, device)
    cfg, mtp_loss = preset(size, data.tokenizer["vocab_size"]), MTPLoss(args.mtp_loss)
    recipe = make_recipe(args, TARGET_DEFAULTS[size], args.steps)
    settings = {"size": size, "data": data.meta["digests"]["train.bin"]}
    settings |= asdict(mtp_loss) | asdict(recipe)
    path = args.out / "target.pt"
    state = earlier_run(path, "target", settings, args)
    if state is None:
        return
    torch.manual_seed(args.seed)
    target, mtp = Llama(cfg), MTP(cfg)
    if state:
        target.load_state_dict(state["target"])
        mtp.load_state_dict(state["mtp"])
    n_target, n_mtp = (sum(p.numel() for p in m.parameters()) for m in (target, mtp))
    why = "" if args.size else " (the default: 10m with a GPU and 8192 tokens, else tiny)"
    print(f"target    {size}{why}, {n_target / 1e6:.2f}M parameters, and {n_mtp / 1e6:.2f}M of the "
          f"MTP head, trained with loss {args.mtp_loss}")
    stage = Stage(target.to(device), mtp.to(device), mtp_loss, drafter=None)
    state = state or {"settings": settings, "size": size, "data": args.data,
                      "tokenizer": data.tokenizer}
    run_stage(args, stage, recipe, data, path, state, f"target with MTP head ({args.mtp_loss})")


def run_drafter(args: argparse.Namespace, data: prepare.Dataset, device: torch.device) -> None:
    """The second stage: out/NAME.pt for the target of out/target.pt."""
    target, mtp, checkpoint = load_target(args.out)
    if checkpoint["training"]:
        raise ValueError(f"{args.out / 'target.pt'} is not fully trained: go on with it first, by "
                         "--stage target --resume")
    if checkpoint["tokenizer"] != data.tokenizer:
        raise ValueError(f"{args.out / 'target.pt'} has another tokenizer than {args.data}: "
                         "name the data that it was trained on with --data")
    size = checkpoint["size"]
    if args.size not in (None, size):
        raise ValueError(f"{args.out / 'target.pt'} is of size {size}, --size is {args.size}: "
                         "leave it out, or name another --out")
    recipe = make_recipe(args, DRAFTER_DEFAULTS[size], args.drafter_steps, args.labels)
    arm, draft = ARMS[args.drafter], draft_preset(target.cfg, size)
    torch.manual_seed(args.seed)
    embed_rms = target.embed_tokens.weight.square().mean().sqrt().item()
    drafter = Drafter(target.cfg, draft, arm, embed_rms)
    settings = {"target": checkpoint["fingerprint"], "data": data.meta["digests"]["train.bin"]}
    path = args.out / f"{args.drafter}.pt"
    if args.init_from:
        settings["init_from"] = start_from(args.init_from, drafter, checkpoint["fingerprint"])
    settings |= asdict(recipe)
    state = earlier_run(path, "drafter", settings, args)
    if state is None:
        return
    if state:
        drafter.load_state_dict(state["drafter"])
    n = sum(p.numel() for p in drafter.parameters())
    print(f"drafter   {args.drafter}, {n / 1e6:.2f}M parameters, {args.labels} labels: {arm.about}")
    stage = Stage(target.to(device), mtp.to(device), None, drafter.to(device))
    state = state or {"settings": settings, "name": args.drafter,
                      "target_fingerprint": checkpoint["fingerprint"]}
    run_stage(args, stage, recipe, data, path, state, f"drafter {args.drafter}")


def run_stage(args: argparse.Namespace, stage: Stage, recipe: Recipe, data: prepare.Dataset,
              path: Path, state: dict, title: str) -> None:
    """Train a stage to its end, and print its measures. ValueError where --compile cannot."""
    print(f"recipe    {describe(recipe, stage.target.cfg.context)}")
    if args.compile:
        # all layers of target and head at once, as they are one piece of code; what is around
        # them gains little, and the drafter's groups of blocks have too many shapes
        check_compiler(next(stage.target.parameters()).device)
        for module in [*stage.target.modules(), *stage.mtp.modules()]:
            if isinstance(module, Block):
                module.compile()
    start = time.perf_counter()
    measures = train(stage, recipe, data, path, state, args.micro_batch)
    report(title, measures, time.perf_counter() - start)


# ----------------------------------------------------------------------------------------------
# --compare: arms over paired seeds
#
# One seed fixes the initial weights and the batches of all arms; so between two runs of a seed
# only the arm differs, and most of what a seed does cancels in their difference.
# compare.json, from which all tables are made, holds
#
#     settings   what all runs have in common; another run may only be added if it has it too
#     runs       [{arm, seed, file, next_loss, tv, ..}], one for each run and each held-out text
#     baseline   the arm that the others are compared with: standard, or the first one
#     paired     {file: {arm: {measure: {mean, half_width, n}}}}, differences to the baseline
#     cost       {arm: {tokens_per_s, ratio, peak_bytes, saved_bytes}}, and cost_on, the processor

MEASURES = ("next_loss", "tv", "accept_sampled", "accept_greedy", "accept_argmax_draft")
COST_TURNS, COST_STEPS = 7, 2  # turns of each arm, in alternation; steps a turn
CHART_WIDTH = 41               # columns of a chart; its middle is 0


class Setting(NamedTuple):
    """An arm of the comparison: how the head is trained, and how its loss is computed."""

    loss: MTPLoss
    max_logits: int  # through_head's; the losses and gradients are the same, to rounding
    about: str


WHOLE, ONE_WINDOW = 1 << 62, 1
COMPARED = {
    "standard": Setting(MTPLoss("standard"), WHOLE, "the head learns the text's token"),
    "ec": Setting(MTPLoss("ec"), WHOLE, "the same, error-cancelled"),
    "kl": Setting(MTPLoss("kl"), WHOLE, "the head learns the verifier's distribution"),
    "kl-chunked": Setting(MTPLoss("kl"), ONE_WINDOW, "kl, logits of one window at a time"),
    "none": Setting(MTPLoss("standard", weight=0.0), WHOLE,
                    "the head stays untrained: next_loss without it, and nothing else"),
}


def baseline_of(arms: list[str]) -> str:
    return "standard" if "standard" in arms else arms[0]


def trains_head(arm: str) -> bool:
    """What a step of one that does not costs is no cost of doing without a head."""
    return COMPARED[arm].loss.weight > 0


def paired(runs: list[dict], arms: list[str], seeds: range) -> dict:
    """{file: {arm: {measure: interval}}} of each arm's differences to the baseline, by seed."""
    rows = {(run["file"], run["arm"], run["seed"]): run for run in runs}
    base = baseline_of(arms)
    return {file: {arm: {m: interval([rows[file, arm, seed][m] - rows[file, base, seed][m]
                                      for seed in seeds]) for m in MEASURES}
                   for arm in arms if arm != base}
            for file in dict.fromkeys(run["file"] for run in runs)}


def read_eval(names: list[str]) -> dict[str, Path]:
    """{file name: path} of the texts that names are or hold; ValueError if two have one name."""
    for name in names:
        if not Path(name).exists():
            raise ValueError(f"--eval: there is no {name}")
    found: dict[str, Path] = {}
    for path in prepare.list_files(names):
        if path.name in found:
            raise ValueError(f"--eval: {found[path.name]} and {path} have one name, and could not "
                             "be told apart in the tables: rename one, or leave it out")
        found[path.name] = path
    return found


def encode_file(path: Path, tokenizer: dict) -> np.ndarray:
    """The ids (n_tokens,) of a text, uint16, each document with end-of-text, as prepared data."""
    enc, ids = prepare.encoding(tokenizer), []
    for part in prepare.read_files([path]):
        if part.text:
            ids += enc.encode_ordinary(part.text) + [enc.eot_token] * part.ends
    return np.array(ids, dtype=np.uint16)


def saved_bytes(make_total: Callable[[], Tensor]) -> int:
    """Bytes that autograd holds for the backward of make_total(), each storage once; weights that
    it needs are among them."""
    alive = weakref.WeakValueDictionary()  # what is still held when the graph is whole

    def pack(x: Tensor) -> Tensor:
        held = x.detach()  # subtle: an output that its own node saves would be a cycle
        alive[id(held)] = held
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        total = make_total()
    assert total.requires_grad
    storages = [x.untyped_storage() for x in alive.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def load_result(path: Path) -> dict:
    """What compare.json holds, or {} where there is none; ValueError if it is something else."""
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_text())
        for run in result["runs"]:
            run["arm"], run["seed"], run["file"]
        dict(result["settings"])
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path} is not of this project, or was cut short: start again with "
                         "--overwrite, or choose another --out") from e
    return result


# ----------------------------------------------------------------------------------------------
# tables


def says(arm: str, measure: str) -> bool:
    """Whether a measure of an arm says anything: of an untrained head only next_loss does."""
    return measure == "next_loss" or trains_head(arm)


def mean_table(runs: list[dict], file: str, arms: list[str], seeds: range) -> str:
    """A line an arm: its measures on a text, averaged over the seeds."""
    lines = [f"{'arm':12}" + "".join(f"  {m:>9}" for m in MEASURES)]
    for arm in arms:
        mine = [r for r in runs if (r["file"], r["arm"]) == (file, arm) and r["seed"] in seeds]
        means = {m: f"{statistics.fmean(run[m] for run in mine):.4f}" for m in MEASURES}
        lines.append(f"{arm:12}" + "".join(f"  {x if says(arm, m) else '-':>{max(9, len(m))}}"
                                           for m, x in means.items()))
    return "\n".join(lines)


def chart(found: dict, extent: float) -> str:
    """Columns from -extent to extent: an interval as -, its mean as |, zero as a colon."""
    def column(x: float) -> int:
        return round((CHART_WIDTH - 1) / 2 * (1 + x / extent))

    cells, mean, half_width = [" "] * CHART_WIDTH, found["mean"], found["half_width"] or 0.0
    first, last = column(mean - half_width), column(mean + half_width)
    cells[first:last + 1] = "-" * (last + 1 - first)
    cells[column(0)] = ":"
    cells[column(mean)] = "|"
    return "".join(cells)


def difference_table(differences: dict, base: str) -> str:
    """A line for each measure and arm of {arm: {measure: interval}}; each measure has its scale."""
    lines = []
    for m in MEASURES:
        found = {arm: of_arm[m] for arm, of_arm in differences.items()
                 if says(arm, m) and says(base, m)}
        if not found:
            continue
        extent = max(abs(x["mean"]) + (x["half_width"] or 0.0) for x in found.values()) or 1.0
        lines.append(f"{m:46} {-extent:<+{CHART_WIDTH // 2}.4f}0{extent:>+{CHART_WIDTH // 2}.4f}")
        for arm, x in found.items():
            width = "" if x["half_width"] is None else f"+- {x['half_width']:.4f}"
            lines.append(f"  {arm:11}{x['mean']:+9.4f} {width:10} {verdict(x):12} "
                         f"{chart(x, extent)}".rstrip())
    return "\n".join(lines)


def cost_table(cost: dict, base: str) -> str:
    """A line an arm: speed and memory, and both against the baseline."""
    lines = [f"{'arm':10}{'tokens/s':>10}   {'to ' + base:30}{'peak MiB':>10}{'saved MiB':>11}"
             f"   to {base}"]
    for arm, of_arm in cost.items():
        speed = memory = ""
        if arm != base:
            ratio = of_arm["ratio"]
            change = ratio | {"mean": ratio["mean"] - 1}
            speed = f"{change['mean']:+7.1%} +- {ratio['half_width']:5.1%}  {verdict(change)}"
            memory = f"{of_arm['saved_bytes'] / cost[base]['saved_bytes'] - 1:+.1%}"
        peak = "-" if of_arm["peak_bytes"] is None else f"{of_arm['peak_bytes'] / 2 ** 20:.1f}"
        saved = of_arm["saved_bytes"] / 2 ** 20
        lines.append(f"{arm:10}{of_arm['tokens_per_s']:10.0f}   {speed:30}{peak:>10}{saved:11.1f}"
                     f"   {memory}".rstrip())
    return "\n".join(lines)


def report_comparison(result: dict, arms: list[str], seeds: range) -> None:
    """Print all tables of compare.json, each with what its numbers mean."""
    settings, base, n = result["settings"], result["baseline"], len(seeds)
    T, batch = settings["context"], settings["batch"]
    print("\nmeasures, and arms")
    for m in MEASURES:
        print(f"  {m:20} {MEANING[m]}")
    for arm in arms:
        print(f"  {arm:20} {COMPARED[arm].about}")
    for file, differences in result["paired"].items():
        print(f"\n{file}: {settings['eval_windows']} windows of {T} tokens, means over "
              f"n = {n} seeds, from {seeds[0]} on\n{mean_table(result['runs'], file, arms, seeds)}")
        if not differences:
            continue
        print(f"\n{file}: differences to {base} of the same seed, mean over n = {n}"
              + (f" +- {t_quantile(n - 1):.3f} sd / sqrt({n}),\nthe 95% interval (Student's t); "
                 "not resolved: it holds 0. Chart: | mean, - interval, : zero" if n > 1 else
                 "\n(one seed has no interval). Chart: | difference, : zero"))
        print(difference_table(differences, base))
    if not result["cost"]:
        return
    n_windows = min(batch, settings["micro_batch"] or batch)
    print(f"\ncost of training: {batch} windows of {T} tokens a step, {settings['dtype']}, "
          f"{result['cost_on']}\n"
          f"tokens/s: median of {COST_TURNS} turns of {COST_STEPS} steps, the arms in turn; then "
          "the mean change of a turn's speed\nand its 95% interval | peak: what a GPU's allocator "
          "gave out at most in a step | saved: what\nautograd holds for the backward pass of "
          f"{n_windows} windows, weights included, each storage once")
    print(cost_table(result["cost"], baseline_of(list(result["cost"]))))


def run_compare(args: argparse.Namespace, data: prepare.Dataset, device: torch.device) -> None:
    """out/compare.json and its tables: every arm with every seed, as far as not done before."""
    if process()[1] > 1:
        raise ValueError("--compare runs in one process: start it without torchrun")
    size, path = pick_size(args, data, device), args.out / "compare.json"
    cfg = preset(size, data.tokenizer["vocab_size"])
    recipe = make_recipe(args, TARGET_DEFAULTS[size], args.steps)
    eval_paths = read_eval(args.eval or [])
    settings = {"size": size, "device": device.type, "data": data.meta["digests"]["train.bin"],
                "eval val": data.meta["digests"]["val.bin"],
                **{f"eval {name}": prepare.file_digest(p) for name, p in eval_paths.items()},
                "eval_windows": EVAL_WINDOWS, "context": cfg.context,
                "micro_batch": args.micro_batch, **asdict(recipe)}
    del settings["seed"]  # each run has its own
    result = {} if args.overwrite else load_result(path)
    if result and (differ := differing(result["settings"], settings)):
        raise ValueError(f"{path} holds another comparison: {differ}. "
                         "Choose another --out, the same settings, or --overwrite")
    texts = {"val": data.val}
    texts |= {name: encode_file(p, data.tokenizer) for name, p in eval_paths.items()}
    refuse_short({"train": data.train, **texts}, cfg.context)
    held_out = {name: eval_batch(tokens, cfg.context).to(device) for name, tokens in texts.items()}
    seeds = range(args.seed, args.seed + (args.seeds or 5))
    print(f"compare   {size}, n = {len(seeds)} seeds of each: {', '.join(args.compare)}")
    print(f"recipe    {describe(recipe, cfg.context)} and on")
    result = result or {"settings": settings, "runs": []}
    if not path.exists():
        save_json(path, result)  # that nothing can be written here shows now
    with CtrlC() as ctrl_c:
        run_arms(args, seeds, cfg, recipe, data.train, held_out, path, result, ctrl_c)
        result["baseline"] = baseline_of(args.compare)
        result["paired"] = paired(result["runs"], args.compare, seeds)
        arms = [arm for arm in args.compare if trains_head(arm)]
        if "cost" not in result or list(result["cost"]) != arms:
            result["cost"] = measure_costs(args, arms, cfg, recipe, data.train, device, ctrl_c)
            result["cost_on"] = describe_device(device)
    save_json(path, result)
    report_comparison(result, args.compare, seeds)


def run_arms(args: argparse.Namespace, seeds: range, cfg: Config, recipe: Recipe,
             tokens: np.ndarray, held_out: dict[str, Tensor], path: Path, result: dict,
             ctrl_c: CtrlC) -> None:
    """Train and judge the arms in turn, seed by seed, and write result to path after each run.

    Runs that result has are left out. KeyboardInterrupt if asked.
    """
    runs = [(seed, arm) for seed in seeds for arm in args.compare]
    finished = {(run["seed"], run["arm"]) for run in result["runs"]}
    left = [run for run in runs if run not in finished]
    n_done, log_every = len(runs) - len(left), max(1, recipe.steps // 60)
    with tqdm(total=len(runs) * recipe.steps, initial=n_done * recipe.steps, unit="step",
              disable=None, dynamic_ncols=True) as bar:
        for seed, arm in left:
            title, own = f"{arm}, seed {seed}", replace(recipe, seed=seed)
            stage = start_arms([arm], cfg, seed, held_out["val"].device)[0]
            optimizers = make_optimizers(stage.trained, own)
            for step in range(own.steps):
                measure = step % log_every == 0 or step + 1 == own.steps
                loss, shown, norm = train_step(stage, own, optimizers, tokens, step,
                                               args.micro_batch, measure)
                bar.update()
                if measure:
                    checked = shown | {"loss": loss.item(), "gradient norm": norm.item()}
                    refuse_non_finite(checked, step + 1, path, f"{title}: ")
                    bar.set_postfix_str(f"{title} | next_loss {shown['next_loss']:.3f}")
                # a finished run is judged and kept first
                if ctrl_c.anywhere() and step + 1 < own.steps:
                    raise KeyboardInterrupt(f"stopped in the run of {title}; {path} has those "
                                            "before")
            for name, windows in held_out.items():
                measures = evaluate(stage, windows, own)
                refuse_non_finite(measures, own.steps, path, f"{title}, {name}: ")
                result["runs"].append({"arm": arm, "seed": seed, "file": name, **measures})
                if name == "val":
                    bar.write(f"{arm:10} seed {seed} | " + describe_measures(
                        {m: measures[m] for m in MEASURES[:4]}, 4))
            save_json(path, result)


def start_arms(arms: list[str], cfg: Config, seed: int, device: torch.device) -> list[Stage]:
    """A stage for each of the arms, on the same models: those of a seed, untrained."""
    torch.manual_seed(seed)
    target, mtp = Llama(cfg).to(device), MTP(cfg).to(device)
    settings = [COMPARED[arm] for arm in arms]
    return [Stage(target, mtp, x.loss, drafter=None, max_logits=x.max_logits) for x in settings]


def measure_costs(args: argparse.Namespace, arms: list[str], cfg: Config, recipe: Recipe,
                  tokens: np.ndarray, device: torch.device, ctrl_c: CtrlC) -> dict[str, dict]:
    """{arm: tokens/s, its ratio to the baseline, bytes}: steps of all arms in turn, as one process.

    All arms train the same models, for no value of a weight changes what a step costs. Turns go
    forwards and backwards through the arms, the first one is a warm-up. peak_bytes is the most
    that a GPU's allocator gave out in a step, None on a CPU.
    """
    if not arms:
        return {}
    on_gpu = device.type == "cuda"
    stages = dict(zip(arms, start_arms(arms, cfg, recipe.seed, device)))
    optimizers = make_optimizers(stages[arms[0]].trained, recipe)
    speeds, cost = {arm: [] for arm in arms}, {arm: {"peak_bytes": None} for arm in arms}
    for turn in tqdm(range(1 + COST_TURNS), desc="cost", unit="turn", disable=None):
        for arm in reversed(arms) if turn % 2 else arms:
            if on_gpu:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            for _ in range(COST_STEPS):
                train_step(stages[arm], recipe, optimizers, tokens, 0, args.micro_batch, False)
            if on_gpu:
                torch.cuda.synchronize(device)
                cost[arm]["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            seconds = time.perf_counter() - start
            if turn:
                speeds[arm].append(COST_STEPS * recipe.batch * cfg.context / seconds)
            if ctrl_c.anywhere():
                raise KeyboardInterrupt("stopped while measuring the cost; all runs are finished")
    n = min(args.micro_batch or recipe.batch, recipe.batch)
    windows = to_device(get_batch(tokens, cfg.context, n, recipe.seed, 0), device)
    base = speeds[baseline_of(arms)]
    for arm in arms:
        with autocast(recipe, device):
            cost[arm]["saved_bytes"] = saved_bytes(
                lambda: stage_loss(stages[arm], windows, None, recipe.labels, False)[0])
        cost[arm]["tokens_per_s"] = statistics.median(speeds[arm])
        cost[arm]["ratio"] = interval([a / b for a, b in zip(speeds[arm], base)])
    return cost


def check_init_from(args: argparse.Namespace) -> None:
    """ValueError, before hours of training, for a file that no drafter could start from then."""
    load_checkpoint(args.init_from, "drafter", "python train.py --stage drafter")
    if not (args.out / "target.pt").exists():
        raise ValueError(f"--init-from {args.init_from} has its own target, and {args.out} has "
                         "none yet: name that target's folder with --out")
    if args.stage == "all" and args.overwrite:
        raise ValueError(f"--init-from {args.init_from} is of the target that --overwrite would "
                         "train anew: add --stage drafter")
    if args.init_from.resolve() == (args.out / f"{args.drafter}.pt").resolve():
        raise ValueError(f"--init-from {args.init_from} is the file that is to be written, and "
                         "would be lost: copy it, and name the copy")


def open_device(args: argparse.Namespace) -> torch.device:
    """This process's device, made ready for training in the dtype asked for."""
    device = pick_device(args.device)
    rank, n_processes = process()
    if n_processes > 1 and device.type == "cuda":
        if ":" in (args.device or "") or n_processes > torch.cuda.device_count():
            raise ValueError(f"{n_processes} processes share {torch.cuda.device_count()} GPUs and "
                             f"--device {device}: start one a GPU, and give --device cuda, or none")
        device = torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # peak memory and clocks are the current device's
    else:
        keep_freed_memory()
    if args.dtype == "tf32" and device.type != "cuda":
        raise ValueError(f"--dtype tf32 is for GPUs of NVIDIA, the device is {device}: use float32")
    torch.set_float32_matmul_precision("high" if args.dtype == "tf32" else "highest")
    why = "" if args.device else f" (torch sees {'a' if device.type == 'cuda' else 'no'} GPU)"
    print(f"device    {device}{why}, {describe_device(device)}, torch {torch.__version__}"
          + f", {n_processes} processes" * (n_processes > 1))
    return device


def open_data(args: argparse.Namespace) -> prepare.Dataset:
    """The data; args.data becomes its name. The first process prepares what is missing."""
    why = "" if args.data else " (the default: fineweb-edu if it is prepared)"
    if args.data is None and args.stage == "drafter":
        args.data, why = load_target(args.out)[2]["data"], " (the target's)"
    if process()[0] == 0:
        args.data = ready_data(args.data)
    wait_for_all()
    args.data = ready_data(args.data)
    data = prepare.load(args.data)
    print(f"data      {args.data}{why}: {len(data.train) / 1e6:.2f}M tokens to train on, "
          f"{len(data.val) / 1e6:.2f}M held out, vocabulary {data.tokenizer['vocab_size']}")
    return data


def run(args: argparse.Namespace) -> None:
    device, data = open_device(args), open_data(args)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.init_from:
        check_init_from(args)
    if args.compare:
        run_compare(args, data, device)
        return
    if args.stage != "drafter":
        run_target(args, data, device)
    if args.stage != "target":
        run_drafter(args, data, device)
    out = "" if args.out == Path("out") else f" --out {shlex.quote(str(args.out))}"
    drafter = "mtp" if args.stage == "target" else args.drafter
    print(f"\ntry it:   python speculate.py --drafter {drafter}{out} --prompt \"def main(\"")


def command_to_go_on(args: argparse.Namespace, words: list[str], began: float) -> str:
    """The command that goes on where one of these words, which began then, was stopped."""
    start = ["python"]
    if process()[1] > 1:
        start = ["torchrun", "--nproc-per-node", str(process()[1])]
    files = [args.out / x for x in ("target.pt", f"{args.drafter}.pt", "compare.json")]
    saved = any(x.exists() and x.stat().st_mtime >= began for x in files)
    # until then --overwrite has yet to be done; --compare goes on by itself
    if args.compare and saved:
        words = [word for word in words if not word.startswith("--ov")]
    elif not args.compare and not args.resume and (saved or not args.overwrite):
        words = [*words, "--resume"]
    return shlex.join([*start, "train.py", *words])


def main(argv: list[str] | None = None) -> int:
    prepare.never_fail_to_print()
    args = parse_args(argv)
    if dist.is_torchelastic_launched():  # torchrun started this process
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    speaker, began = None if process()[0] == 0 else io.StringIO(), time.time()
    try:
        with redirect_stdout(speaker or sys.stdout):
            run(args)
    except (ValueError, OSError) as e:
        print(f"error: {e}" if speaker is None else f"process {process()[0]}: {e}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as e:
        print(f"error: {no_memory(e)}: give a smaller --micro-batch, or a smaller --batch",
              file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        if speaker is None:
            again = command_to_go_on(args, sys.argv[1:] if argv is None else argv, began)
            print(f"\n{str(e) or 'stopped'}. Go on with: {again}", file=sys.stderr)
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
