"""Arms against each other over paired seeds: what an arm is, differences with intervals, tables.

    python train.py --compare standard ec kl --seeds 5 --eval more-text.jsonl

One seed fixes the initial weights, the batches and the held-out windows of all arms; so between two
runs of a seed only the arm differs, and most of what a seed does cancels in their difference.
train.py trains and measures. Its compare.json, from which all tables are made, holds

    settings   what all runs have in common; another run may only be added if it has it too
    runs       [{arm, seed, file, next_loss, tv, ..}], one for each run and each held-out text
    baseline   the arm that the others are compared with: standard, or the first one
    paired     {file: {arm: {measure: {mean, half_width, n}}}}, differences to the baseline
    cost       {arm: {tokens_per_s, ratio, peak_bytes, saved_bytes}}, and cost_on, the processor

The interval by hand, for the differences 1, 2 and 3 of three seeds: their mean is 2, their standard
deviation 1, and t(0.975, 2) = 4.303; so it is 2 +- 4.303 x 1 / sqrt(3) = 2 +- 2.484. That holds 0:
not resolved, by three seeds. The same differences from six seeds, 1, 1, 2, 2, 3 and 3, would be.
"""

import json
import math
import os
import statistics
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data import prepare
from mtp import MTPLoss

MEASURES = ("next_loss", "tv", "accept_sampled", "accept_greedy", "accept_argmax_draft")
COST_TURNS, COST_STEPS = 7, 2  # turns of each arm, in alternation; steps a turn
WIDTH = 41                     # columns of a chart; its middle is 0


class Setting(NamedTuple):
    """An arm of the comparison: how the head is trained, and how its loss is computed."""

    loss: MTPLoss
    max_logits: int  # through_head's; the losses and gradients are the same, to rounding
    about: str


PLAIN, ONE_WINDOW = 1 << 62, 1
SETTINGS = {
    "standard": Setting(MTPLoss("standard"), PLAIN, "the head learns the text's token"),
    "ec": Setting(MTPLoss("ec"), PLAIN, "the same, error-cancelled"),
    "kl": Setting(MTPLoss("kl"), PLAIN, "the head learns the verifier's distribution"),
    "kl-chunked": Setting(MTPLoss("kl"), ONE_WINDOW, "kl, logits of one window at a time"),
    "none": Setting(MTPLoss("standard", weight=0.0), PLAIN,
                    "the head stays untrained: next_loss without it, and nothing else"),
}


# ----------------------------------------------------------------------------------------------
# paired differences


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


def baseline_of(arms: list[str]) -> str:
    return "standard" if "standard" in arms else arms[0]


def paired(runs: list[dict], arms: list[str], seeds: range) -> dict:
    """{file: {arm: {measure: interval}}} of each arm's differences to the baseline, by seed."""
    rows = {(run["file"], run["arm"], run["seed"]): run for run in runs}
    base = baseline_of(arms)
    return {file: {arm: {m: interval([rows[file, arm, seed][m] - rows[file, base, seed][m]
                                      for seed in seeds]) for m in MEASURES}
                   for arm in arms if arm != base}
            for file in dict.fromkeys(run["file"] for run in runs)}


# ----------------------------------------------------------------------------------------------
# texts to judge on, the memory of a loss, compare.json


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


class Held:
    """One tensor as the graph keeps it: gone when that part of the graph is."""

    def __init__(self, x: Tensor):
        self.x = x


def saved_bytes(make_total: Callable[[], Tensor]) -> int:
    """Bytes that autograd holds for the backward of make_total(), each storage once; weights that
    it needs are among them."""
    alive = weakref.WeakSet()

    def pack(x: Tensor) -> Held:
        held = Held(x.detach())  # subtle: an output that its own node saves would be a cycle
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.x):
        total = make_total()
    assert total.requires_grad
    storages = {held.x.untyped_storage().data_ptr(): held.x.untyped_storage() for held in alive}
    return sum(storage.nbytes() for storage in storages.values())


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


def save_result(path: Path, result: dict) -> None:
    """Write to a temporary name and rename: a failed or interrupted save keeps the older file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------
# tables


def says(arm: str, measure: str) -> bool:
    """Whether a measure of an arm says anything: of an untrained head only next_loss does."""
    return measure == "next_loss" or SETTINGS[arm].loss.weight > 0


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
    """WIDTH columns from -extent to extent: an interval as -, its mean as |, zero as a colon."""
    def column(x: float) -> int:
        return round((WIDTH - 1) / 2 * (1 + x / extent))

    cells, mean, half_width = [" "] * WIDTH, found["mean"], found["half_width"] or 0.0
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
        lines.append(f"{m:46} {-extent:<+{WIDTH // 2}.4f}0{extent:>+{WIDTH // 2}.4f}")
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


def report(result: dict, arms: list[str], seeds: range, meaning: dict[str, str]) -> None:
    """Print all tables of compare.json, each with what its numbers mean."""
    settings, base, n = result["settings"], result["baseline"], len(seeds)
    T, batch = settings["context"], settings["batch"]
    print("\nmeasures, and arms")
    for m in MEASURES:
        print(f"  {m:20} {meaning[m]}")
    for arm in arms:
        print(f"  {arm:20} {SETTINGS[arm].about}")
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
    n_windows = min(batch, settings["micro_batch"] or batch)
    print(f"\ncost of training: {batch} windows of {T} tokens a step, {settings['dtype']}, "
          f"{result['cost_on']}\n"
          f"tokens/s: median of {COST_TURNS} turns of {COST_STEPS} steps, the arms in turn; then "
          "the mean change of a turn's speed\nand its 95% interval | peak: what a GPU's allocator "
          "gave out at most in a step | saved: what\nautograd holds for the backward pass of "
          f"{n_windows} windows, weights included, each storage once")
    print(cost_table(result["cost"], base))
