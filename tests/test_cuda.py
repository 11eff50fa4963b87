"""
Proves on a GPU, where there is one, what the other files prove on the CPU: a training step gives
the CPU's loss and gradients, waits for nothing, and the speculative text is plain decoding's.
"""

import pytest
import torch
from kit import random_tokens, small_config, small_drafter, small_models
from test_train import RECIPE

from dmtp import ARMS
from mtp import MTPLoss
from speculate import Machine, Sampling, decode
from train import Recipe, Stage, get_lr, make_optimizers, optimizer_step, step_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
RECIPE = Recipe(**{**vars(RECIPE), "labels": "soft"})


def make_stage(name: str | None, device: str, dtype: torch.dtype) -> Stage:
    target, mtp = (m.to(device, dtype) for m in small_models())
    drafter = small_drafter(target.cfg, name).to(device, dtype) if name else None
    return Stage(target, mtp, MTPLoss("ec"), drafter)


@pytest.mark.parametrize("name", [None, *ARMS])
def test_a_step_has_the_loss_and_gradients_of_the_cpu(name):
    windows, results = random_tokens(4, 49), []
    for device in ("cpu", "cuda"):
        stage = make_stage(name, device, torch.float64)
        loss, measures = step_gradients(stage, RECIPE, windows, 0, micro_batch=2, measure=True)
        gradients = [p.grad for m in stage.trained for p in m.parameters()]
        results.append([x.cpu() for x in (loss, *measures.values(), *gradients)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [None, *ARMS])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_never_waits_for_the_gpu(name, optimizer):
    stage = make_stage(name, "cuda", torch.float32)
    recipe = Recipe(**{**vars(RECIPE), "optimizer": optimizer})
    optimizers = make_optimizers(stage.trained, recipe)
    parameters = [p for m in stage.trained for p in m.parameters()]
    for step in range(3):  # the first one may allocate
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            step_gradients(stage, recipe, random_tokens(4, 49), step, micro_batch=4, measure=False)
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
            optimizer_step(optimizers, get_lr(step, recipe), on_cpu=False)
            if step:  # what the mode would have refused
                with pytest.raises(RuntimeError):
                    parameters[0].sum().item()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["mtp", *ARMS])
def test_speculative_text_equals_plain_text(name, temperature):
    target, mtp = (m.cuda() for m in small_models(cfg=small_config(context=150)))
    drafter = None if name == "mtp" else small_drafter(target.cfg, name).cuda()
    prompts = [random_tokens(n, seed=n).tolist() for n in (3, 9, 20)]
    sampling = Sampling(greedy=temperature == 0)
    plain = Machine(target, None, None, 1, sampling)
    m = Machine(target, mtp, drafter, 5 if name == "mtp" else 8, sampling)
    texts = [decode(machine, prompts, 100, 7, temperature).texts for machine in (m, plain)]
    assert texts[0] == texts[1] and min(map(len, texts[0])) > 0
