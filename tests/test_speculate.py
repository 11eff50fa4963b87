"""The text is the target's own, whatever drafts it; and the caches stay right after every round.

Plain decoding is the oracle for the text: float64, token by token equal. Recomputation from scratch
is the oracle for caches and states: a fault there lowers acceptance and never shows in the text.
"""

import itertools
import math
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import speculate
from dflash import DraftConfig, sample_anchors
from dmtp import ARMS, Drafter, block_loss
from kit import every_layer, random_tokens, small_config, small_drafter, small_models
from model import Llama, join_projections
from mtp import MTP, MTPLoss, target_losses
from speculate import (Machine, Rounds, Sampling, acceptance_length, bucket,
                       conditional_acceptance, cumulative_acceptance, decode, distinct_4grams,
                       generate, gumbel, mix, new_state, perturb, prefill, round_steps, uniforms)

METHODS = ["none", "mtp x 1", "mtp x 4", "dflash", "dmtp"]  # on the largest grids
ALL_METHODS = ["none", "mtp x 1", "mtp x 4", *ARMS]
FILTERS = {"off": {}, "top-k": {"top_k": 5}, "top-p": {"top_p": 0.8}}


def machine(method: str, target: Llama, mtp: MTP, drafters: dict, **changes) -> Machine:
    """The machine of a method; changes are Machine's fields."""
    n_slots = {"none": 1, "mtp x 1": 2, "mtp x 4": 5}.get(method, 8)
    uses_mtp = ARMS[method].uses_mtp if method in ARMS else method != "none"
    head = mtp if uses_mtp else None
    m = Machine(target, head, drafters.get(method), n_slots, Sampling())
    return replace(m, **changes)


# ----------------------------------------------------------------------------------------------
# a briefly trained model: its drafters are right now and then


def lines_of_code(n: int) -> str:
    """n lines of invented code: some of it is easy to foresee, some is chance."""
    rng = np.random.default_rng(0)
    names = ["left", "right", "total", "count", "name", "path"]
    shapes = ["def {a}_{b}({a}, {b}):", "    return {a} + {n}", "    {a} = {b}[{n}]",
              "    if {a} > {b}:", "        raise ValueError({a})", "    for {a} in range({n}):"]
    picks = rng.integers(0, len(names), (n, 3))
    return "".join(shapes[x].format(a=names[y], b=names[z], n=y * z) + chr(10) for x, y, z in picks)


@pytest.fixture(scope="module")
def trained():
    """Target, head and both drafters after a few seconds on invented code, one byte a token."""
    torch.manual_seed(0)
    text = torch.tensor([max(b - 30, 0) for b in lines_of_code(2000).encode()])
    cfg = small_config(vocab_size=100, context=192, n_layer=3)
    target, mtp = Llama(cfg), MTP(cfg)
    draft = DraftConfig((0, 1, 2), n_layer=1)
    drafters = {name: Drafter(cfg, draft, ARMS[name]) for name in ("dflash", "dmtp")}

    def fit(modules, loss_of, steps):
        parameters = [p for module in modules for p in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=6e-3, fused=True)
        for step in range(steps):
            starts = torch.from_numpy(np.random.default_rng(step).integers(0, len(text) - 129, 8))
            loss_of(torch.stack([text[i:i + 129] for i in starts]), step).backward()
            optimizer.step()
            optimizer.zero_grad()

    fit([target, mtp], lambda w, step: target_losses(target, mtp, w, MTPLoss()).total, 200)
    for drafter in drafters.values():
        fit([drafter], lambda w, step: block_loss(
            target, mtp, drafter, w[:, :-1], sample_anchors(8, 128, 8, 0, step)).loss, 120)
    prompts = [text[i:i + n].tolist() for i, n in ((40, 9), (2000, 1), (3000, 30))]
    models = target.double(), mtp.double(), {name: d.double() for name, d in drafters.items()}
    return *models, prompts


PLAIN: dict = {}
HISTOGRAM = [0] * 8  # of the block drafters' rounds
COMPARED = [0]       # tokens
N_NEW = 150

on_temperatures = pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
on_filters = pytest.mark.parametrize("filters", list(FILTERS))


@pytest.mark.parametrize("batch", [1, 3])
@on_filters
@on_temperatures
@pytest.mark.parametrize("method", METHODS[1:])
def test_speculative_text_equals_plain_text(trained, method, temperature, filters, batch):
    target, mtp, drafters, prompts = trained
    sampling = Sampling(greedy=temperature == 0, **FILTERS[filters])
    prompts = prompts[-batch:]
    key = (temperature, filters, batch)
    if key not in PLAIN:
        plain = machine("none", target, mtp, drafters, sampling=sampling)
        PLAIN[key] = decode(plain, prompts, N_NEW, 7, temperature)
    tally = decode(machine(method, target, mtp, drafters, sampling=sampling), prompts, N_NEW, 7,
                   temperature)
    assert tally.texts == PLAIN[key].texts
    assert all(len(t) == N_NEW for t in tally.texts)
    COMPARED[0] += sum(map(len, tally.texts))
    if method in ("dflash", "dmtp"):
        HISTOGRAM[:] = [a + b for a, b in zip(HISTOGRAM, tally.total())]


def test_the_grid_above_saw_every_accept_count_and_20000_tokens():
    if len(PLAIN) < 18:
        pytest.skip("needs the whole grid above in the same run")
    assert COMPARED[0] == 4 * 9 * 4 * N_NEW > 20000
    assert min(HISTOGRAM) > 0, HISTOGRAM


@on_filters
@on_temperatures
def test_plain_text_equals_sampling_from_the_full_forward(trained, temperature, filters):
    """The baseline against the obvious loop: no cache, no batch, one token at a time."""
    target, mtp, drafters, prompts = trained
    sampling = Sampling(greedy=temperature == 0, **FILTERS[filters])
    texts = [list(p) for p in prompts]
    for request, text in enumerate(texts):
        for _ in range(20):
            states, _ = target(torch.tensor([text]))
            position = torch.tensor([[len(text)]])
            noise = gumbel(torch.tensor(9), torch.tensor([request]), position, 100)
            scores = perturb(target.lm_head(states)[0, -1], noise[0, 0], torch.tensor(temperature),
                             sampling)
            text.append(scores.argmax().item())
    m = machine("none", target, mtp, drafters, sampling=sampling)
    generated = decode(m, prompts, 20, 9, temperature).texts
    assert [p + t for p, t in zip(prompts, generated)] == texts


# ----------------------------------------------------------------------------------------------
# oracle drafters


def oracle(monkeypatch, texts: list[list[int]], n_right) -> None:
    """Before every verification n_right(row, round) proposals become the text's, the next wrong."""
    steps = speculate.round_steps
    rounds = itertools.count()

    def write(m: Machine, s) -> None:
        i = next(rounds)
        for row, text in enumerate(texts):
            at = s.pos[row].item()
            right = (text + [0] * 2 * m.n_slots)[at + 1:at + m.n_slots]
            n = n_right(row, i)
            wrong = [(t + 1) % m.target.cfg.vocab_size for t in right[n:n + 1]]
            s.block[row, 1:] = torch.tensor(right[:n] + wrong + right[n + 1:])

    def with_oracle(m: Machine) -> list:
        out = steps(m)
        at = out.index(speculate.verify_step)
        return out[:at] + [write] + out[at:]

    monkeypatch.setattr(speculate, "round_steps", with_oracle)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ALL_METHODS[2:])
def test_text_equals_plain_text_for_drafters_of_any_accuracy(monkeypatch, method, temperature):
    cfg = small_config(context=200)
    target, mtp = small_models(cfg=cfg)
    drafters = {name: small_drafter(cfg, name) for name in ARMS}
    prompts = [[1, 2, 3], [4], [5] * 20]
    m = machine(method, target, mtp, drafters, sampling=Sampling(greedy=temperature == 0))
    plain = decode(replace(m, mtp=None, drafter=None, n_slots=1), prompts, 120, 3, temperature)
    rng = np.random.default_rng(0)
    texts = [p + t for p, t in zip(prompts, plain.texts)]
    oracle(monkeypatch, texts, lambda row, i: int(rng.integers(0, m.n_slots)))
    tally = decode(m, prompts, 120, 3, temperature)
    assert tally.texts == plain.texts
    assert min(tally.total()) > 0, tally.total()


def every_pair(n: int) -> list[int]:
    """A cyclic order of 0 .. n - 1 with each ordered pair as neighbours (an Eulerian circuit)."""
    unused = {a: list(range(n)) for a in range(n)}
    stack, circuit = [0], []
    while stack:
        if unused[stack[-1]]:
            stack.append(unused[stack[-1]].pop())
        else:
            circuit.append(stack.pop())
    return circuit


def recompute(m: Machine, text: list[int], pos: int) -> dict[str, Tensor]:
    """Caches of rows [0, pos) and the MTP state at row pos - 1, afresh from text[:pos + 1]."""
    tokens, positions = torch.tensor([text[:pos]]), torch.arange(pos)[None]
    s = new_state(m, 1, 0, 1.0)
    layers = () if m.drafter is None else m.drafter.dflash.draft.tap_layers
    states, taps = m.target(tokens, positions, s.target_kv, pos, layers)
    if m.mtp is not None:
        h = m.mtp(m.target, states, torch.tensor([text[1:pos + 1]]), positions, s.mtp_kv, pos)
        s.mtp_state.copy_(h[:, -1])
    if m.drafter is not None:
        features = m.drafter.features(taps, None if m.mtp is None else h)
        m.drafter.dflash.write_context(m.target, features, positions, s.draft_kv)
    return s


def caches(s) -> list[Tensor]:
    return every_layer(s.target_kv, s.mtp_kv, s.draft_kv)


@pytest.mark.parametrize("method", ALL_METHODS[1:])
def test_the_invariant_holds_after_every_round_for_all_accept_counts_in_every_order(
        monkeypatch, method):
    """Unwritten and stale rows are poisoned before each round, so that any read would show."""
    cfg = small_config(context=420)
    target, mtp = small_models(cfg=cfg)
    drafters = {name: small_drafter(cfg, name) for name in ARMS}
    m = machine(method, target, mtp, drafters)
    script = every_pair(m.n_slots)
    prompts = [[1, 2, 3, 4, 5], [6]]
    n_new = sum(k + 1 for k in script) + 10
    plain = decode(replace(m, mtp=None, drafter=None, n_slots=1), prompts, n_new + 10, 3, 1.0)
    texts = [p + t for p, t in zip(prompts, plain.texts)]
    oracle(monkeypatch, texts, lambda row, i: script[(i + 3 * row) % len(script)])
    rounds = Rounds(m, 2)
    s = rounds.s
    seen = [[], []]
    for i, emissions in enumerate(generate(rounds, prompts, n_new, 3, 1.0)):
        for e in emissions if i else []:
            seen[e.row].append(e.n_accept)
        for row in range(2):
            pos = s.pos[row].item()
            fresh = recompute(m, texts[row], pos)
            assert s.block[row, 0] == texts[row][pos]
            for cache, right in zip(caches(s), caches(fresh)):
                torch.testing.assert_close(cache[row, :pos], right[0, :pos], rtol=0, atol=1e-9)
                cache[row, pos:] = 1e3
            if m.mtp is not None:
                torch.testing.assert_close(s.mtp_state[row], fresh.mtp_state[0], rtol=0, atol=1e-9)
    assert set(itertools.pairwise(seen[0])) == set(itertools.product(range(m.n_slots), repeat=2))


@pytest.mark.parametrize("method", ["dflash", "dmtp"])
def test_a_window_smaller_than_the_text_changes_proposals_and_not_the_text(method):
    cfg = small_config(context=100)
    target, mtp = small_models(cfg=cfg)
    narrow, wide = (small_drafter(cfg, method, window=w) for w in (5, 4096))
    machines = [machine(method, target, mtp, {method: d}) for d in (narrow, wide)]
    runs = [decode(m, [[1, 2, 3]], 90, 0, 1.0) for m in machines]
    assert runs[0].texts == runs[1].texts
    assert runs[0].histogram != runs[1].histogram


# ----------------------------------------------------------------------------------------------
# where texts end


@pytest.fixture(scope="module")
def small():
    cfg = small_config()
    target, mtp = small_models(cfg=cfg)
    drafters = {name: small_drafter(cfg, name) for name in ARMS}
    return target, mtp, drafters


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_new", [0, 1, 2, 7, 8, 9, 20])
def test_exactly_as_many_tokens_come_as_were_asked_for(monkeypatch, small, method, n_new):
    m = machine(method, *small)
    plain = decode(machine("none", *small), [[1, 2, 3]], 30, 0, 1.0)
    if m.n_slots > 1:
        oracle(monkeypatch, [[1, 2, 3] + plain.texts[0]], lambda row, i: 7)
    tally = decode(m, [[1, 2, 3]], n_new, 0, 1.0)
    assert tally.texts == [plain.texts[0][:n_new]]
    assert n_new > 1 or not sum(tally.total()), "one token needs no round"
    rounds = sum((k + 1) * n for k, n in enumerate(tally.total()))
    assert rounds - tally.overshoot == tally.round_tokens == max(0, n_new - 1)


@pytest.fixture(scope="module")
def wide():
    """Models of 997 tokens: the ids of a short random text are all different."""
    cfg = small_config(vocab_size=997)
    target, mtp = small_models(cfg=cfg)
    return target, mtp, {name: small_drafter(cfg, name) for name in ("dflash", "dmtp")}


@pytest.mark.parametrize("method", ["none", "mtp x 4", "dmtp"])
@pytest.mark.parametrize("index", range(17))
def test_text_stops_at_end_of_text_wherever_in_a_block_it_falls(monkeypatch, wide, method, index):
    """One of the ids that plain decoding produces is declared to be end-of-text.

    The last round counts the proposals that it accepted up to and with end-of-text, and the
    overshoot is what this is more than the tokens it emitted.
    """
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    plain = decode(machine("none", *wide, sampling=Sampling(top_p=0.99)), prompts, 30, 0, 1.0)
    eot = plain.texts[0][index]
    assert plain.texts[0].index(eot) == index and eot not in plain.texts[1]
    m = machine(method, *wide, eot=eot, sampling=Sampling(top_p=0.99))
    if m.n_slots > 1:
        oracle(monkeypatch, [p + t for p, t in zip(prompts, plain.texts)], lambda row, i: 7)
    tally = decode(m, prompts, 30, 0, 1.0)
    assert tally.texts == [plain.texts[0][:index + 1], plain.texts[1]]
    S, expected = m.n_slots, [0] * m.n_slots
    if index:
        full, at = divmod(index - 1, S)  # rounds before the last one; its place in the last block
        expected[S - 1] += full
        expected[min(S - 1, at + 1)] += 1
    assert tally.histogram[0] == expected


@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("length", [1, 39, 40, 41, 46, 47])
def test_text_ends_exactly_at_the_end_of_the_context(small, method, length):
    prompt = random_tokens(length).tolist()
    tally = decode(machine(method, *small), [prompt, [1]], 100, 0, 1.0)
    assert [len(t) for t in tally.texts] == [48 - length, 47]
    assert tally.texts == decode(machine("none", *small), [prompt, [1]], 100, 0, 1.0).texts


# ----------------------------------------------------------------------------------------------
# what the text may depend on


@pytest.mark.parametrize("changes", [{"coupled": False}, {"n_slots": 3}, {"n_slots": 2}])
def test_text_does_not_depend_on_coupling_or_block_size(small, changes):
    m = machine("mtp x 4", *small)
    runs = [decode(x, [[1, 2, 3]], 40, 5, 1.0) for x in (m, replace(m, **changes))]
    assert runs[0].texts == runs[1].texts
    assert runs[0].histogram != runs[1].histogram


@pytest.mark.parametrize("method", ["none", "dmtp"])
def test_text_of_a_request_does_not_depend_on_its_place_in_a_batch(small, method):
    m = machine(method, *small)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    together = decode(m, prompts, 30, 5, 1.0).texts
    for i, prompt in enumerate(prompts):
        assert decode(m, [prompt], 30, 5, 1.0, first_request=i).texts[0] == together[i]


def test_seeds_requests_and_positions_draw_different_texts(small):
    m = machine("dmtp", *small)
    texts = [decode(m, [[1, 2, 3]], 30, seed, 1.0).texts[0] for seed in (0, 1, 2 ** 40, 0)]
    assert texts[0] == texts[3]
    assert len({tuple(t) for t in texts}) == 3
    same_prompt = decode(m, [[1, 2, 3]] * 3, 30, 0, 1.0).texts
    assert len({tuple(t) for t in same_prompt}) == 3


def test_coupled_drafts_hit_more_often_than_argmax_drafts_where_much_is_left_to_chance(trained):
    target, mtp, drafters, prompts = trained
    for method in ("mtp x 4", "dflash", "dmtp"):
        m = machine(method, target, mtp, drafters)
        runs = [decode(replace(m, coupled=c), prompts * 4, 90, 0, 2.0) for c in (True, False)]
        coupled, argmax = (acceptance_length(tally.total()) for tally in runs)
        assert coupled > 1.1 * argmax


# ----------------------------------------------------------------------------------------------
# the law of the text


def test_sampled_text_follows_the_exact_law():
    """4 tokens, 3 positions: 12,000 speculative texts against 64 enumerated probabilities."""
    cfg = small_config(vocab_size=4, context=24)
    target, mtp = small_models(cfg=cfg)
    m = machine("dmtp", target, mtp, {"dmtp": small_drafter(cfg, "dmtp")})
    n, counts = 12000, dict.fromkeys(itertools.product(range(4), repeat=3), 0)
    for first in range(0, n, 3000):
        for text in decode(m, [[1, 2]] * 3000, 3, 11, 0.9, first_request=first).texts:
            counts[tuple(text)] += 1
    outcomes = torch.tensor(list(counts))
    with torch.no_grad():
        states, _ = target(torch.cat((torch.tensor([[1, 2]]).expand(64, 2), outcomes), dim=1))
        log_p = (target.lm_head(states) / 0.9).log_softmax(dim=-1)[:, 1:4]
    expected = n * log_p.gather(2, outcomes[:, :, None]).sum(dim=(1, 2)).exp()
    assert expected.sum().item() == pytest.approx(n)
    rare = expected < 5  # pooled into one cell
    observed = torch.tensor(list(counts.values())).double()
    o = torch.cat((observed[~rare], observed[rare].sum()[None]))
    e = torch.cat((expected[~rare], expected[rare].sum()[None]))
    chi2 = ((o - e)[e > 0].square() / e[e > 0]).sum().item()
    freedom = int((e > 0).sum()) - 1
    assert freedom > 10
    assert chi2 < freedom + 3.3 * math.sqrt(2 * freedom), (chi2, freedom)  # about one in a thousand


def test_uniforms_are_inside_zero_and_one_for_the_extreme_hash_values():
    u = uniforms(torch.tensor([0, 511, 512, 2 ** 32 - 512, 2 ** 32 - 1]))
    assert u.dtype == torch.float32
    half = 0.5 / 2 ** 23
    assert u.tolist() == [half, half, 3 * half, 1 - half, 1 - half]
    assert torch.isfinite(-torch.log(-torch.log(u))).all()


def test_hash_is_a_bijection_on_samples_and_stays_in_32_bits():
    h = torch.randint(2 ** 32, (200000,), generator=torch.Generator().manual_seed(0))
    h = torch.cat((torch.arange(100000), 2 ** 32 - 1 - torch.arange(100000), h)).unique()
    assert mix(h).unique().numel() == h.numel()
    assert mix(h).min() >= 0 and mix(h).max() < 2 ** 32


def test_gumbel_noise_has_the_standard_law_and_no_repeats_between_neighbours():
    noise = gumbel(torch.tensor(0), torch.arange(4), torch.arange(10, 26).expand(4, 16), 2048)
    assert noise.shape == (4, 16, 2048)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi ** 2 / 6, rel=0.03)
    rows = noise.flatten(0, 1)
    correlation = torch.corrcoef(rows) - torch.eye(64)
    assert correlation.abs().max() < 0.12  # 2,016 pairs of 2,048 values: 5 sigma is 0.11
    shifted = torch.corrcoef(torch.cat((rows[:, 1:], rows[:, :-1])))[:64, 64:]
    assert shifted.abs().max() < 0.12


# ----------------------------------------------------------------------------------------------
# filters, by hand and by a naive rule


def kept(logits: list[float], **sampling) -> list[int]:
    z = torch.tensor(logits, dtype=torch.float64)
    scores = perturb(z, torch.zeros(()), torch.tensor(1.0), Sampling(**sampling))
    return [i for i, v in enumerate(scores.tolist()) if v > -math.inf]


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_id():
    assert kept([1.0, 3.0, 3.0, 3.0, 2.0], top_k=2) == [1, 2]
    assert kept([0.0, 0.0, 0.0], top_k=1) == [0]
    assert kept([0.0, 1.0], top_k=9) == [0, 1]


def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass():
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert kept(logits, top_p=0.4) == [1]
    assert kept(logits, top_p=0.7) == [1, 3]
    assert kept(logits, top_p=0.8) == [1, 2, 3]
    assert kept(logits, top_p=1e-9) == [1]
    assert kept(logits, top_k=2, top_p=0.6) == [1]  # 0.5 / 0.75 of what top-k left


def test_low_precision_logits_are_perturbed_in_float32_and_greedy_ignores_the_noise():
    z = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    noise, temperature = torch.tensor([5.0, 0.0]), torch.tensor(1.0)
    assert perturb(z, noise, temperature, Sampling()).dtype == torch.float32
    assert perturb(z, noise, temperature, Sampling()).argmax() == 0
    assert perturb(z, noise, temperature, Sampling(greedy=True)).argmax() == 1


# ----------------------------------------------------------------------------------------------
# steps that can be captured


class NoHostNumbers(TorchFunctionMode):
    """Refuses tensors made from Python data, which a capture would freeze, and lists as indices."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        made = name in ("tensor", "as_tensor", "asarray", "from_numpy", "new_tensor")
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        if made or any(isinstance(x, list) for x in (index if type(index) is tuple else [index])):
            raise AssertionError(f"{name} of Python data inside a step")
        return function(*args, **(kwargs or {}))


class OneDeviceNoRandomness(TorchDispatchMode):
    """Refuses what is not on meta, given or made: a copy between devices, or host data. And random
    operators: a replay repeats, a generator shifts them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise AssertionError(f"{function} inside a step")
        result = function(*args, **(kwargs or {}))
        if any(t.device.type != "meta" for t in tree_leaves((args, kwargs, result))
               if isinstance(t, Tensor)):
            raise AssertionError(f"{function} met a tensor of another device")
        return result


def tensors(s) -> list[Tensor]:
    """All buffers of a state."""
    return tree_leaves([getattr(s, f.name) for f in fields(s)])


def on_meta(method: str, **changes) -> Machine:
    """A machine without data: reading a value, a shape from data or another device raises there."""
    cfg = small_config()
    target, mtp = small_models(cfg=cfg)
    drafters = {name: small_drafter(cfg, name).to("meta") for name in ARMS}
    return machine(method, target.to("meta"), mtp.to("meta"), drafters, kv_len=40, **changes)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(greedy=True),
                                      Sampling(top_k=3, top_p=0.9)])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_no_step_reads_the_device_draws_numbers_or_has_shapes_that_depend_on_data(method, sampling):
    m = on_meta(method, sampling=sampling, eot=5)
    s = new_state(m, 3, 0, 1.0)
    shapes = [t.shape for t in tensors(s)]
    with torch.no_grad(), NoHostNumbers(), OneDeviceNoRandomness():
        for step in round_steps(m) * 2:
            step(m, s)
    assert [t.shape for t in tensors(s)] == shapes


def reads_a_value(m: Machine, s) -> None:
    s.pos[0].item()


def branches_on_data(m: Machine, s) -> None:
    if s.pos[0] > 0:
        s.pos.add_(1)


def selects_by_mask(m: Machine, s) -> None:
    s.pos[s.pos > 0]


def makes_a_tensor(m: Machine, s) -> None:
    s.pos.copy_(torch.tensor([1, 2, 3], device="meta"))


def draws(m: Machine, s) -> None:
    torch.rand(3, device="meta")


HOST_TENSOR = torch.arange(3)


def mixes_devices(m: Machine, s) -> None:
    s.pos.add_(HOST_TENSOR)


def copies_from_the_host(m: Machine, s) -> None:
    s.pos.copy_(HOST_TENSOR)


def moves_to_the_device(m: Machine, s) -> None:
    s.pos.add_(HOST_TENSOR.to("meta"))


def makes_a_tensor_like_another(m: Machine, s) -> None:
    s.pos.copy_(s.pos.new_tensor([1, 2, 3]))


def reads_at_a_list(m: Machine, s) -> None:
    s.pos[[0, 1]]


def writes_at_a_list(m: Machine, s) -> None:
    s.block[:, [0, 1]] = 0


@pytest.mark.parametrize("fault", [reads_a_value, branches_on_data, selects_by_mask,
                                   makes_a_tensor, makes_a_tensor_like_another, draws,
                                   mixes_devices, copies_from_the_host, moves_to_the_device,
                                   reads_at_a_list, writes_at_a_list])
def test_the_guard_above_catches_each_fault_that_it_is_for(fault):
    m = on_meta("none")
    s = new_state(m, 3, 0, 1.0)
    refused = pytest.raises((AssertionError, RuntimeError, NotImplementedError))
    with torch.no_grad(), NoHostNumbers(), OneDeviceNoRandomness(), refused:
        fault(m, s)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_buffers_keep_their_addresses_and_stay_finite_over_fifty_rounds(method):
    cfg = small_config(context=140)
    target, mtp = small_models(cfg=cfg)
    m = machine(method, target, mtp, {name: small_drafter(cfg, name) for name in ARMS})
    rounds = Rounds(m, 2)
    s = rounds.s
    addresses = [t.data_ptr() for t in tensors(s)]
    n_rounds = sum(1 for _ in generate(rounds, [[1], [2, 3]], 130))
    assert n_rounds > 50
    assert [t.data_ptr() for t in tensors(s)] == addresses
    assert all(torch.isfinite(t.double()).all() for t in tensors(s))


@pytest.mark.parametrize("method", ALL_METHODS)
def test_rows_at_their_limit_stand_still(small, method):
    """So a graph's warm-up, with limit = pos, moves nothing."""
    m = replace(machine(method, *small), kv_len=40)
    s = new_state(m, 2, 0, 1.0)
    with torch.no_grad():
        prefill(m, s, [[1, 2, 3], [4]], 20, 0)
        s.limit.copy_(s.pos)
        kept = [c[row, :n] for c in caches(s) for row, n in ((0, 3), (1, 1))]
        held = (s.pos, s.limit, s.block[:, 0], s.mtp_state, *kept)
        before = [t.clone() for t in held]
        for step in round_steps(m) * 2:
            step(m, s)
    assert all(torch.equal(a, b) for a, b in zip(before, held))
    assert s.emit[:, 0].tolist() == [0, 0]


# ----------------------------------------------------------------------------------------------
# rows replaced, steps made ready, projections joined


@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_row_that_ends_is_replaced_and_no_text_changes(small, method):
    target, mtp, drafters = small
    prompts = [random_tokens(n, seed=n).tolist() for n in (3, 9, 1, 20, 5, 46, 47)]
    m = machine(method, target, mtp, drafters, eot=4)
    alone = decode(m, prompts, 12, 7, 1.0)
    assert len(set(map(len, alone.texts))) > 2  # they end at different times
    for n_rows in (1, 2, 3):
        rounds = Rounds(m, n_rows)
        tally = decode(m, prompts, 12, 7, 1.0, rounds=rounds)
        assert (tally.texts, tally.histogram) == (alone.texts, alone.histogram)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_rounds_serve_new_prompts_seeds_temperatures_and_weights(small, method):
    target, mtp, drafters = small
    m = machine(method, target, mtp, drafters)
    rounds = Rounds(m, 2)
    jobs = [([[1] * 30, [2]], 3, 1.0), ([[3], [4, 5]], 3, 1.0), ([[3], [4, 5]], 8, 0.5)]
    for prompts, seed, temperature in jobs:
        fresh = decode(m, prompts, 14, seed, temperature)
        again = decode(m, prompts, 14, seed, temperature, rounds=rounds)
        assert (again.texts, again.histogram) == (fresh.texts, fresh.histogram)
    other = small_models(seed=5)[0].state_dict()
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    target.load_state_dict(other)
    changed = decode(m, prompts, 14, seed, temperature, rounds=rounds)
    assert changed.texts == decode(m, prompts, 14, seed, temperature).texts != fresh.texts
    target.load_state_dict(before)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_making_steps_ready_moves_nothing(small, monkeypatch, method):
    """Steps are run before they are captured: here, twice, in place of a capture."""
    target, mtp, drafters = small
    m = machine(method, target, mtp, drafters)
    prompts = [[1, 2, 3], [4]]
    wanted = decode(m, prompts, 20, 7, 1.0)

    def run_twice(step, side, pool):
        step()
        step()
        return step

    monkeypatch.setattr(speculate, "capture", run_twice)
    monkeypatch.setattr(speculate, "bucket", lambda rows, length: min(length, rows + 1))
    for graph in ("step", "round"):
        rounds = Rounds(m, 2, graph)
        tally = decode(m, prompts, 20, 7, 1.0, rounds=rounds)
        assert (tally.texts, tally.histogram) == (wanted.texts, wanted.histogram)
        assert len(rounds.ready) > 2  # made in the middle of the text, again and again
        names = [step.__name__.removesuffix("_step") for step in round_steps(m)]
        assert list(rounds.ready[max(rounds.ready)]) == (names if graph == "step" else ["round"])


def test_steps_made_outside_of_a_generation_need_no_gradients(small):
    """A step compiled or captured with gradients would be another one than is run later."""
    seen = []

    def spy(step, side, pool):
        seen.append(torch.is_grad_enabled())
        return step

    target, mtp, drafters = small
    m = machine("dmtp", target, mtp, drafters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculate, "capture", spy)
        Rounds(m, 1, "step").steps(128)
    assert seen == [False] * 7


def test_compiled_machines_share_no_code_and_give_the_texts_of_eager_ones(monkeypatch):
    """Nothing at a call asks which machine it is, so each has code of its own. It is traced as
    always, and then run by Python: to make machine code of it would take minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    target, mtp = small_models()
    drafters = {"dmtp": small_drafter(target.cfg, "dmtp")}
    texts = []
    for method, coupled in (("dmtp", False), ("dmtp", True), ("none", True)):
        m = machine(method, target, mtp, drafters, coupled=coupled)
        rounds = [Rounds(m, 2), Rounds(m, 2, compiled=True, longest=23)]
        eager, compiled = (decode(m, [[1, 2, 3], [4]], 20, 7, 1.0, rounds=r) for r in rounds)
        assert (eager.texts, eager.histogram) == (compiled.texts, compiled.histogram)
        texts.append(eager.histogram)
    assert texts[0] != texts[1]


def test_compiled_steps_read_the_bucket_of_the_longest_text_and_refuse_a_longer_one(small):
    target, mtp, drafters = small
    m = machine("dmtp", target, mtp, drafters)
    rounds = Rounds(m, 1, compiled=True, longest=10)
    assert rounds.kv_len(9) == rounds.kv_len(18) == bucket(18, target.cfg.context + 8)
    with pytest.raises(AssertionError, match="longer"):
        rounds.kv_len(19)


def test_a_clock_times_every_step_of_every_round_and_changes_nothing(small):
    target, mtp, drafters = small
    m = machine("dmtp", target, mtp, drafters)
    rounds = Rounds(m, 2)
    rounds.clock = {}
    tally = decode(m, [[1, 2, 3], [4]], 20, 7, 1.0, rounds=rounds)
    assert tally.texts == decode(m, [[1, 2, 3], [4]], 20, 7, 1.0).texts
    n = max(sum(h) for h in tally.histogram)
    names = ["noise", "t1", "draft", "verify", "advance_mtp", "advance_draft", "commit"]
    assert {name: len(times) for name, times in rounds.clock.items()} == {
        **dict.fromkeys(names, n), "host": n - 1}  # between rounds


@pytest.mark.parametrize("method", ALL_METHODS)
def test_joined_projections_change_no_text(method):
    target, mtp = small_models()
    drafters = {name: small_drafter(target.cfg, name) for name in ARMS}
    m = machine(method, target, mtp, drafters)
    before = decode(m, [[1, 2, 3], [4]], 30, 7, 1.0)
    join_projections(target, mtp, *drafters.values())
    after = decode(m, [[1, 2, 3], [4]], 30, 7, 1.0)
    assert (after.texts, after.histogram) == (before.texts, before.histogram)


# ----------------------------------------------------------------------------------------------
# measures


def test_acceptance_measures_by_hand():
    histogram = [2, 3, 0, 5]
    assert acceptance_length(histogram) == pytest.approx(2.8)
    assert conditional_acceptance(histogram) == pytest.approx([0.8, 0.625, 1.0])
    assert cumulative_acceptance(histogram) == pytest.approx([0.8, 0.5, 0.5])
    assert math.isnan(acceptance_length([0, 0]))
    assert distinct_4grams([[1, 2, 1, 2, 1, 2, 1]]) == 0.5  # 1212 2121 1212 2121
    assert distinct_4grams([[1, 2], [1, 2, 3, 4]]) == 1.0


def test_buckets_are_powers_of_two_from_128_and_never_past_the_cache():
    buckets = [bucket(n, 1000) for n in (1, 128, 129, 256, 257, 600)]
    assert buckets == [128, 128, 256, 256, 512, 1000]
    assert bucket(40, 56) == 56


def test_every_emitted_token_is_counted_once(trained):
    target, mtp, drafters, prompts = trained
    for method in METHODS:
        tally = decode(machine(method, target, mtp, drafters), prompts, 50, 1, 1.0)
        emitted = sum(map(len, tally.texts))
        assert emitted == 150
        rounds = sum((k + 1) * n for k, n in enumerate(tally.total()))
        assert rounds - tally.overshoot == emitted - len(prompts)


def test_mtp_chain_is_the_head_fed_with_its_own_states(small):
    """mtp x 3 proposals against a loop that runs the head over the whole text for every token."""
    target, mtp, drafters = small
    m = machine("mtp x 4", *small, n_slots=4, sampling=Sampling(greedy=True), kv_len=40)
    s = new_state(m, 1, 0, 1.0)
    with torch.no_grad():
        prefill(m, s, [[1, 2, 3]], 20, 0)
        for step in round_steps(m)[:3]:
            step(m, s)
        states = target(torch.tensor([[1, 2, 3]]))[0]
        tokens, proposals = [2, 3, s.block[0, 0].item()], []
        for _ in range(3):
            h = mtp(target, states, torch.tensor([tokens]))
            proposals.append(target.lm_head(h)[0, -1].argmax().item())
            states, tokens = torch.cat((states, h[:, -1:]), dim=1), tokens + proposals[-1:]
    assert s.block[0, 1:].tolist() == proposals
