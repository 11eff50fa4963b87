"""On a machine with a GPU: train, measure and test there all that is claimed of GPUs.

    python data/prepare.py TEXTS --name texts --vocab 8192
    python -m tests.on_gpu --data texts                      some minutes; prints everything

In turn: speed and peak memory of a training step for standard, error-cancelled and KL losses; a
target and a DMTP drafter of some hundred steps; the bench with graphs off, of steps, of rounds; the
tests marked for CUDA. Every command is printed before it runs.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from data import prepare
from model import Llama, preset
from mtp import MTP

ROOT = Path(__file__).parents[1]


def run(*words: str) -> int:
    """The exit status of a command, which prints what it has to say."""
    print("\n$ python", " ".join(words), flush=True)
    start = time.perf_counter()
    status = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    print(f"({time.perf_counter() - start:.0f} s, exit status {status})", flush=True)
    return status


def matrix_speed(device: str, n: int) -> float:
    """FLOP/s of a product of two n x n float32 matrices, the best of ten."""
    a, b = torch.randn(2, n, n, device=device).unbind()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best


def flops_a_token(size: str, vocab_size: int) -> float:
    """Of training, forward and backward: 6 for each weight of a product (lm_head stands behind both
    losses), and attention over half a window on average."""
    cfg = preset(size, vocab_size)
    with torch.device("meta"):
        weights = sum(p.numel() for m in (Llama(cfg), MTP(cfg)) for p in m.parameters())
    attention = 6 * (cfg.n_layer + 1) * cfg.n_head * cfg.head_dim * cfg.context
    return 6 * weights + attention  # one embedding too many, one lm_head too few: equally large


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="a folder of data/")
    add("--size", default="10m")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--steps", type=int, default=300, help="of the target and of the drafter")
    add("--batch", type=int, default=64)
    add("--out", default="out-gpu")
    add("--rows", nargs="+", default=["1", "8", "32"], help="of the bench")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device is here: run this on a machine with one, or --device cpu")
    several = ["--size", args.size, "--data", args.data, "--device", args.device, "--batch",
               str(args.batch)]
    out = ["--out", args.out]
    if run("train.py", "--compare", "standard", "ec", "kl", "kl-chunked", "--seeds", "1", "--steps",
           str(max(2, args.steps // 20)), "--out", f"{args.out}-compare", *several):
        sys.exit("error: the comparison above failed, and its figures are missing")
    cost = json.loads((ROOT / f"{args.out}-compare" / "compare.json").read_text())["cost"]
    peak = matrix_speed(args.device, 8192 if args.device == "cuda" else 1024)
    flops = flops_a_token(args.size, prepare.load(args.data).tokenizer["vocab_size"])
    print(f"\na float32 matrix product here: {peak / 1e12:.2f} TFLOP/s; a token of {args.size} "
          f"trained: {flops / 1e6:.0f} MFLOP")
    for arm, of_arm in cost.items():
        print(f"  {arm:12} {of_arm['tokens_per_s']:10.0f} tokens/s, "
              f"{of_arm['tokens_per_s'] * flops / peak:.2f} of that speed (MFU against it)")
    for dtype in ["float32", *["tf32", "bfloat16"] * (args.device == "cuda")]:
        run("train.py", "--stage", "target", "--steps", str(args.steps), "--dtype", dtype, "--out",
            args.out if dtype == "float32" else f"{args.out}-{dtype}", *several)
    run("train.py", "--stage", "drafter", "--drafter-steps", str(args.steps), *out, *several)
    for graph in ("off", "step", "round") if args.device == "cuda" else ("off",):
        run("speculate.py", "--bench", "--repeats", "1", "--n-prompts", "32", "--batch",
            *args.rows, "--graph", graph, "--device", args.device, *out)
    run("-m", "pytest", "-q", "-rs", "tests/test_cuda.py")


if __name__ == "__main__":
    main()
