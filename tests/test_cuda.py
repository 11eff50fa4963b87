"""
Proves on a GPU, where there is one, what the other files prove on the CPU: a training step gives
the CPU's loss and gradients, waits for nothing, the speculative text is plain decoding's, and
CUDA Graphs of steps and of whole rounds change nothing.
"""

import itertools

import pytest
import torch
from kit import every_layer, random_tokens, small_config, small_drafter, small_models
from test_train import RECIPE

import speculate
from dmtp import ARMS, LABELS
from mtp import MTPLoss
from speculate import GRAPHS, Machine, Rounds, Sampling, Tally, decode, generate, plain_of
from train import Recipe, Stage, get_lr, make_optimizers, optimizer_step, step_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICE = "cuda"
METHODS = ["none", "mtp", *ARMS]
METHODS_AND_LABELS = [(None, "hard"), *itertools.product(ARMS, LABELS)]


def make_stage(name: str | None, device: str, dtype: torch.dtype) -> Stage:
    target, mtp = (m.to(device, dtype) for m in small_models())
    drafter = small_drafter(target.cfg, name).to(device, dtype) if name else None
    return Stage(target, mtp, MTPLoss("ec"), drafter)


@pytest.mark.parametrize("name, labels", METHODS_AND_LABELS)
def test_a_step_has_the_loss_and_gradients_of_the_cpu(name, labels):
    windows, results = random_tokens(4, 49), []
    recipe = Recipe(**{**vars(RECIPE), "labels": labels})
    for device in ("cpu", "cuda"):
        stage = make_stage(name, device, torch.float64)
        loss, measures = step_gradients(stage, recipe, windows, 0, micro_batch=2, measure=True)
        gradients = [p.grad for m in stage.trained for p in m.parameters()]
        results.append([x.cpu() for x in (loss, *measures.values(), *gradients)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name, labels", METHODS_AND_LABELS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_never_waits_for_the_gpu(name, labels, optimizer):
    stage = make_stage(name, "cuda", torch.float32)
    recipe = Recipe(**{**vars(RECIPE), "optimizer": optimizer, "labels": labels})
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


def make_machine(name: str, greedy: bool = False) -> Machine:
    target, mtp = (m.to(DEVICE) for m in small_models(cfg=small_config(context=150)))
    drafter = small_drafter(target.cfg, name).to(DEVICE) if name in ARMS else None
    n_slots = {"none": 1, "mtp": 5}.get(name, 8)
    head = mtp if name == "mtp" or (drafter and drafter.arm.uses_mtp) else None
    return Machine(target, head, drafter, n_slots, Sampling(greedy=greedy))


def random_prompts(*lengths: int) -> list[list[int]]:
    return [random_tokens(n, seed=n).tolist() for n in lengths]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", METHODS[1:])
def test_speculative_text_equals_plain_text(name, temperature):
    m = make_machine(name, greedy=temperature == 0)
    plain = plain_of(m)
    prompts = random_prompts(3, 9, 20)
    texts = [decode(machine, prompts, 100, 7, temperature).texts for machine in (m, plain)]
    assert texts[0] == texts[1] and min(map(len, texts[0])) > 0


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", METHODS)
def test_graphs_of_steps_and_of_rounds_give_the_text_of_eager_steps(name, batch):
    m, prompts = make_machine(name), random_prompts(3, 9, 20, 1, 30, 2, 64, 5, 11)[:batch + 1]
    tallies = [decode(m, prompts, 90, 7, 1.0, rounds=Rounds(m, batch, graph)) for graph in GRAPHS]
    assert all(t.texts == tallies[0].texts for t in tallies)
    assert all(t.histogram == tallies[0].histogram for t in tallies)


@pytest.mark.parametrize("graph", GRAPHS[1:])
@pytest.mark.parametrize("name", METHODS)
def test_a_graph_serves_long_then_short_prompts_new_seeds_temperatures_and_weights(name, graph):
    m = make_machine(name)
    rounds = Rounds(m, 2, graph)
    for lengths, seed, temperature in (((120, 90), 1, 1.0), ((1, 2), 1, 1.0), ((2, 3), 5, 0.6)):
        prompts = random_prompts(*lengths)
        again = decode(m, prompts, 25, seed, temperature, rounds=rounds)
        assert again.texts == decode(m, prompts, 25, seed, temperature).texts
    m.target.load_state_dict(small_models(seed=5, cfg=m.target.cfg)[0].state_dict())
    changed = decode(m, prompts, 25, seed, temperature, rounds=rounds)
    assert changed.texts == decode(m, prompts, 25, seed, temperature).texts != again.texts


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", METHODS)
def test_rows_past_the_text_may_hold_anything_between_rounds(name, graph):
    m, prompts = make_machine(name), random_prompts(3, 9)
    wanted, tally = decode(m, prompts, 60, 7, 1.0), Tally.empty(2, m.n_slots)
    rounds = Rounds(m, 2, graph)
    for emissions in generate(rounds, prompts, 60, 7, 1.0):
        tally.add(emissions)
        for cache in every_layer(rounds.s.target_kv, rounds.s.mtp_kv, rounds.s.draft_kv):
            for row, pos in enumerate(rounds.s.pos.tolist()):
                cache[row, pos:] = 1e3
    assert (tally.texts, tally.histogram) == (wanted.texts, wanted.histogram)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("wrong", range(1, 8))
@pytest.mark.parametrize("name", ["dflash", "dmtp"])
def test_a_reject_at_any_slot_leaves_everything_right(monkeypatch, name, wrong, graph):
    m, prompts = make_machine(name), random_prompts(3, 9)
    texts = decode(plain_of(m), prompts, 80, 7, 1.0).texts
    answers = [p + t for p, t in zip(prompts, texts)]
    length = max(map(len, answers))
    answers = torch.tensor([a + [0] * (length - len(a)) for a in answers], device=DEVICE)
    wrong_at = torch.tensor(wrong, device=DEVICE)

    def scripted(m, s, logits, noise):
        """The right token in every slot but one; capturable, like what it stands in for."""
        n = 1 if logits.dim() == 2 else logits.size(1)
        first = 1 if logits.dim() == 2 else m.n_slots - n
        slots = torch.arange(first, first + n, device=DEVICE)
        tokens = answers.gather(1, (s.pos[:, None] + slots).clamp(max=answers.size(1) - 1))
        tokens = torch.where(slots == wrong_at, (tokens + 1) % 23, tokens)
        return tokens[:, 0] if logits.dim() == 2 else tokens

    monkeypatch.setattr(speculate, "propose", scripted)
    tally = decode(m, prompts, 60, 7, 1.0, rounds=Rounds(m, 2, graph))
    assert tally.texts == [text[:60] for text in texts]
    assert all(sum(h) - h[wrong - 1] <= 1 for h in tally.histogram)


@pytest.mark.parametrize("name", METHODS)
def test_eager_steps_never_wait_for_the_gpu(name):
    m, prompts = make_machine(name), random_prompts(3, 9)
    rounds = Rounds(m, 2)
    for i, _ in enumerate(generate(rounds, prompts, 40, 7, 1.0)):
        if i == 3:
            break
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            rounds.run(128)
        with pytest.raises(RuntimeError):
            rounds.s.pos.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
