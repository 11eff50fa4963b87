"""Draft, verify, commit: speculative decoding whose text is exactly the target's own.

    python speculate.py --prompt "def main("                 stream text, coloured by its proposer
    python speculate.py --prompt "def main(" --check         ... and compare with plain decoding
    python speculate.py --bench                              acceptance on held-out prompts
    python speculate.py --paired out-1 out-2 out-3           what differs over seeds, with intervals

One round, for a block [A, T1, .., TK] whose pending token A stands at position pos:

    noise          the luck of every position of the block, a function of (seed, request, position)
    t1             lm_head(mtp_state) -> T1, and T1's fused embedding
    draft          [E(A), fused T1, mask ..] -> T2 .. TK, one parallel forward
    verify         the target on all S tokens; `choice`: its own token after each slot; the longest
                   prefix of proposals that equals it is accepted
    advance mtp    the head on (state_j, choice_j): its cache, and the state to predict the next T1
    advance draft  the taps become the drafter's context
    commit         emit choice[0 .. n_keep], the last of which is the new A

The invariant at every round boundary: each cache is valid exactly on rows [0, pos), and mtp_state
is the head's output at row pos - 1. Plain decoding is the same loop with one slot and no drafter.

Why the text is exact, at any temperature: every emitted token is the target's own choice, given the
true text before it; a proposal only decides how many of them one forward yields. And since the luck
of a position is fixed by (seed, request, position), it is the same token for every drafter.

A step takes (m, s), returns nothing and writes s in place. Its shapes follow from m and the number
of rows, nothing is read from the device, nothing is drawn: any step, or the whole round, can be a
CUDA Graph. (Steps that choose tokens also read the temperature; their docstrings leave that out.)
"""

import argparse
import codecs
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data import prepare
from dflash import N_BEST, slot_positions
from dmtp import (ARMS, Drafter, check_compiler, describe_device, differing, interval,
                  load_drafter, load_target, no_memory, note_unfinished, pick_device, save_json,
                  verdict)
from model import KV, MAX_SLOTS, Llama, at_least_float32, join_projections, new_cache
from mtp import MTP

# ----------------------------------------------------------------------------------------------
# randomness is data

MASK32 = 0xFFFFFFFF


def mix(h: Tensor) -> Tensor:
    """A bijection on 32-bit integers (in int64) in which every input bit moves every output bit.

    Both multipliers are below 2^31, so no product leaves int64.
    Source: the two-round multiply-xorshift form found by public searches for hashes of low bias.
    """
    h = h ^ (h >> 16)
    h = (h * 0x21F0AAAD) & MASK32
    h = h ^ (h >> 15)
    h = (h * 0x735A2D97) & MASK32
    return h ^ (h >> 15)


def uniforms(h: Tensor) -> Tensor:
    """32-bit hashes -> float32 inside (0, 1), exactly: ((h >> 9) + 0.5) / 2^23.

    subtle: 24 bits would at times round to 1.0, and its gumbel of infinity wins every argmax.
    """
    return ((h >> 9).float() + 0.5) * 2.0 ** -23


def gumbel(seed: Tensor, request: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise (B, S, V) of the tokens at positions (B, S) of requests (B,), float32.

    The argmax of logits + this is a sample of softmax(logits). No generator: a function of the
    arguments, whatever the batch, the block or the drafter. seed is () int64.
    """
    key = mix((mix(((seed & MASK32) + 0x9E3779B9) & MASK32) ^ (seed >> 32)) & MASK32)  # ()
    key = mix((key + request) & MASK32)                                                # (B,)
    key = mix((key[:, None] + positions) & MASK32)[:, :, None]                         # (B, S, 1)
    token = torch.arange(vocab_size, device=positions.device)                          # (V,)
    # a second key, so that two positions with neighbouring first keys do not share shifted noise
    h = mix((mix((token + key) & MASK32) + mix(key ^ 0x5BD1E995)) & MASK32)            # (B, S, V)
    return -torch.log(-torch.log(uniforms(h)))


@dataclass(frozen=True)
class Sampling:
    """Which filters are on. Configuration: part of what a captured graph would be keyed by."""

    greedy: bool = False   # temperature 0
    top_k: int = 0         # tokens kept, 0 is off
    top_p: float = 1.0     # probability mass kept, 1 is off


def perturb(logits: Tensor, noise: Tensor, temperature: Tensor, sampling: Sampling) -> Tensor:
    """Scores (.., V) for the argmax: filter(logits / temperature) + noise; logits if greedy.

    top-k keeps exactly k tokens, ties going to the lowest id; top-p keeps the fewest likeliest
    tokens whose probability reaches top_p, after top-k.
    """
    if sampling.greedy:
        return logits
    scores = at_least_float32(logits) / temperature
    if sampling.top_k or sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(scores.size(-1), device=scores.device)
        if sampling.top_k:
            ordered = ordered.masked_fill(rank >= sampling.top_k, -math.inf)
        if sampling.top_p < 1:
            p = ordered.softmax(dim=-1)
            ordered = ordered.masked_fill(p.cumsum(dim=-1) - p >= sampling.top_p, -math.inf)
        scores = torch.empty_like(scores).scatter_(-1, order, ordered)
    return scores + noise


# ----------------------------------------------------------------------------------------------
# the round, as plain data


@dataclass(frozen=True)
class Machine:
    """Models and configuration of the steps. Everything that decides a shape is here."""

    target: Llama
    mtp: MTP | None          # the head, where the method has it
    drafter: Drafter | None  # the block drafter, where the method has one
    n_slots: int             # S; 1 is plain decoding
    sampling: Sampling
    coupled: bool = True     # drafts share the target's luck; False: they are the argmax of logits
    eot: int = -1            # the end-of-text id, -1: never stop at it
    kv_len: int = 0          # cache rows that attention reads, a bucket above max(pos) + S
    drafts: list | None = None  # --trace, eager only: collects the logits that proposals come from


def plain_of(m: Machine) -> Machine:
    """Plain decoding with the same target, sampling and stops."""
    return replace(m, mtp=None, drafter=None, n_slots=1)


@dataclass(frozen=True)
class RoundState:
    """All that changes during decoding, allocated once. Written in place, never rebound."""

    pos: Tensor          # (B,) int64      position of A = block[:, 0]
    limit: Tensor        # (B,) int64      a row stands still once pos = limit
    request: Tensor      # (B,) int64      index of the prompt in the whole list: keys the noise
    block: Tensor        # (B, S) int64    [A, T1, .., TK] as sent to the target
    mtp_state: Tensor    # (B, C)          the MTP state that predicts T1
    t1_emb: Tensor       # (B, C)          fused embedding of T1
    noise: Tensor        # (B, S, V)       for the token that follows each slot
    choice: Tensor       # (B, S) int64    the target's own token after each slot
    n_accept: Tensor     # (B,) int64      proposals accepted
    n_keep: Tensor       # (B,) int64      of those, kept after the stops
    states: Tensor       # (B, S, C)       target states at each slot
    taps: Tensor         # (B, S, n_tap C) target taps at each slot
    mtp_rows: Tensor     # (B, S, C)       MTP states at each slot, where they are context
    emit: Tensor         # (B, 2 + S) int64  [tokens to emit, n_accept, choice]: all the host reads
    seed: Tensor         # () int64
    temperature: Tensor  # () float32
    target_kv: KV        # (B, L, G, D) a layer, keys and values, as the next two
    mtp_kv: KV
    draft_kv: KV


def new_state(m: Machine, n_rows: int, seed: int, temperature: float) -> RoundState:
    """Buffers for n_rows rows, all zero."""
    cfg, like, S = m.target.cfg, m.target.lm_head.weight, m.n_slots
    draft = None if m.drafter is None else m.drafter.dflash.draft
    n_tap = 0 if draft is None else len(draft.tap_layers)
    width_mtp = cfg.width if draft is not None and m.drafter.arm.context_has_mtp else 0
    length = cfg.context + S
    n_noise = 1 if m.sampling.greedy else cfg.vocab_size

    def ids(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=like.device)

    return RoundState(
        pos=ids(n_rows), limit=ids(n_rows), request=ids(n_rows), block=ids(n_rows, S),
        mtp_state=like.new_zeros(n_rows, cfg.width), t1_emb=like.new_zeros(n_rows, cfg.width),
        noise=torch.zeros(n_rows, S, n_noise, device=like.device),
        choice=ids(n_rows, S), n_accept=ids(n_rows), n_keep=ids(n_rows),
        states=like.new_zeros(n_rows, S, cfg.width),
        taps=like.new_zeros(n_rows, S, n_tap * cfg.width),
        mtp_rows=like.new_zeros(n_rows, S, width_mtp),
        emit=ids(n_rows, 2 + S), seed=ids() + seed,
        temperature=torch.full((), temperature, device=like.device),
        target_kv=new_cache(cfg, cfg.n_layer, n_rows, length, like),
        mtp_kv=new_cache(cfg, 0 if m.mtp is None else 1, n_rows, length, like),
        draft_kv=new_cache(cfg, 0 if draft is None else draft.n_layer, n_rows, length, like))


def choose(m: Machine, s: RoundState, logits: Tensor, noise: Tensor) -> Tensor:
    """The target's token ids (..) for logits (.., V)."""
    return perturb(logits, noise, s.temperature, m.sampling).argmax(dim=-1)


def propose(m: Machine, s: RoundState, logits: Tensor, noise: Tensor) -> Tensor:
    """A drafter's token ids (..) for logits (.., V): with the target's luck, or the plain argmax.

    Coupling cannot change the text, only how often a proposal hits it. Source: Daliri, Musco and
    Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding"; the two
    sources of this project draft the argmax.
    """
    if m.drafts is not None:
        m.drafts.append(logits)
    return choose(m, s, logits, noise) if m.coupled else logits.argmax(dim=-1)


def noise_step(m: Machine, s: RoundState) -> None:
    """Reads pos, request, seed. Writes noise. Not needed when greedy."""
    positions = slot_positions(s.pos + 1, m.n_slots)  # of the token after each slot
    s.noise.copy_(gumbel(s.seed, s.request, positions, m.target.cfg.vocab_size))


def t1_step(m: Machine, s: RoundState) -> None:
    """Reads mtp_state, noise. Writes block[:, 1], t1_emb. T1's head, choice, embedding, fusion."""
    s.block[:, 1] = propose(m, s, m.target.lm_head(s.mtp_state), s.noise[:, 0])
    if m.drafter is not None:
        s.t1_emb.copy_(m.drafter.fuse(m.target.embed_tokens(s.block[:, 1]), s.mtp_state))


def chain_step(m: Machine, s: RoundState) -> None:
    """Reads pos, mtp_state, block[:, 1], noise. Writes block[:, 2:], mtp_kv (as scratch).
    MTP by itself: the head goes on from its own states, as the target's do not exist yet."""
    h = s.mtp_state[:, None]  # (B, 1, C), row pos - 1
    for j in range(1, m.n_slots - 1):
        row = s.pos[:, None] + (j - 1)
        h = m.mtp(m.target, h, s.block[:, j:j + 1], row, s.mtp_kv, m.kv_len)
        s.block[:, j + 1] = propose(m, s, m.target.lm_head(h[:, 0]), s.noise[:, j])


def draft_step(m: Machine, s: RoundState) -> None:
    """Reads pos, block[:, :2], t1_emb, mtp_state, noise, draft_kv.
    Writes block[:, first:], draft_kv (as scratch)."""
    first, offset, dflash = m.drafter.first, m.drafter.arm.offset, m.drafter.dflash
    a_emb = m.target.embed_tokens(s.block[:, 0])                                # (B, C)
    x = m.drafter.block_inputs(a_emb, s.t1_emb, s.mtp_state)                    # (B, S - offset, C)
    out = dflash.forward_round(m.target, x, s.pos, s.draft_kv, m.kv_len, offset)
    out = out[:, first - offset:]                                               # (B, n, C)
    logits, noise = m.target.lm_head(out), s.noise[:, first - 1:-1]             # (B, n, V)
    if dflash.selector is None:
        s.block[:, first:] = propose(m, s, logits, noise)
    else:
        walk(m, s, out, logits, noise)


def walk(m: Machine, s: RoundState, states: Tensor, logits: Tensor, noise: Tensor) -> None:
    """Reads block[:, first - 1]. Writes block[:, first:]. DFlash2's path: slot by slot, the best of
    N_BEST candidates after the token chosen before; states (B, n, C), logits and noise (B, n, V).

    Coupled, candidates are the best of the perturbed logits, and the choice among them is that of
    (logits + pair score) / temperature + noise. A pair table of zeros changes nothing.
    """
    first, selector = m.drafter.first, m.drafter.dflash.selector
    if m.drafts is not None:
        m.drafts.append(logits)
    scores, scale = logits, 1.0
    if m.coupled:
        scores = perturb(logits, noise, s.temperature, m.sampling)
        scale = 1.0 if m.sampling.greedy else s.temperature
    best, candidates = scores.topk(min(N_BEST, scores.size(-1)))                # (B, n, N_BEST)
    for j in range(states.size(1)):
        pair = selector.pair_scores(states[:, j], s.block[:, first - 1 + j], candidates[:, j])
        chosen = (best[:, j] + pair / scale).argmax(dim=-1, keepdim=True)       # (B, 1)
        s.block[:, first + j] = candidates[:, j].gather(1, chosen)[:, 0]


def verify_step(m: Machine, s: RoundState) -> None:
    """Reads block, noise, pos, limit, target_kv.
    Writes choice, n_accept, n_keep, states, taps, target_kv.

    Example, S = 4: block [A, b, c, x] and choice [b, c, d, e]: b and c are accepted, x is not
    (the target wants d), so n_accept = 2 and the round emits b, c, d.
    """
    positions = slot_positions(s.pos, m.n_slots)
    tap_layers = () if m.drafter is None else m.drafter.dflash.draft.tap_layers
    states, taps = m.target(s.block, positions, s.target_kv, m.kv_len, tap_layers)
    s.states.copy_(states)
    if taps is not None:
        s.taps.copy_(taps)
    s.choice.copy_(choose(m, s, m.target.lm_head(states), s.noise))
    hits = (s.block[:, 1:] == s.choice[:, :-1]).long()                  # (B, K)
    s.n_accept.copy_(hits.cumprod(dim=1).sum(dim=1))
    first_eot = ((s.choice == m.eot).cumsum(dim=1) == 0).sum(dim=1)     # S if there is none
    keep = torch.minimum(torch.minimum(s.n_accept, first_eot), s.limit - s.pos - 1)
    s.n_keep.copy_(keep.clamp(min=0))


def advance_mtp_step(m: Machine, s: RoundState) -> None:
    """Reads states, choice, n_keep, pos, limit, mtp_state. Writes mtp_kv, mtp_state, mtp_rows.

    All S rows go through the head; choice_j equals block_{j+1} wherever j was accepted, so no rows
    need to be selected, and those after n_keep are stale rows like any other.
    """
    h = m.mtp(m.target, s.states, s.choice, slot_positions(s.pos, m.n_slots), s.mtp_kv, m.kv_len)
    if m.drafter is not None and m.drafter.arm.context_has_mtp:
        s.mtp_rows.copy_(h)
    kept = h.gather(1, s.n_keep[:, None, None].expand(-1, 1, h.size(2)))[:, 0]  # (B, C)
    moving = (s.pos < s.limit)[:, None]
    s.mtp_state.copy_(torch.where(moving, kept, s.mtp_state))


def advance_draft_step(m: Machine, s: RoundState) -> None:
    """Reads taps, mtp_rows, pos. Writes draft_kv."""
    features, positions = m.drafter.features(s.taps, s.mtp_rows), slot_positions(s.pos, m.n_slots)
    m.drafter.dflash.write_context(m.target, features, positions, s.draft_kv)


def commit_step(m: Machine, s: RoundState) -> None:
    """Reads choice, n_accept, n_keep, and what it writes: emit, block[:, 0], pos, limit. Ended rows
    emit 0."""
    moving = s.pos < s.limit
    count = torch.where(moving, s.n_keep + 1, 0)
    s.emit.copy_(torch.cat((count[:, None], s.n_accept[:, None], s.choice), dim=1))
    pending = s.choice.gather(1, s.n_keep[:, None])[:, 0]
    pending = torch.where(moving, pending, s.block[:, 0])
    s.block[:, 0] = pending
    s.pos.add_(count)
    s.limit.copy_(torch.where(pending == m.eot, s.pos, s.limit))


def round_steps(m: Machine) -> list:
    """The steps of one round, in order."""
    mtp, draft = m.mtp is not None, m.drafter is not None
    order = ((noise_step, not m.sampling.greedy), (t1_step, mtp),
             (chain_step, mtp and not draft and m.n_slots > 2), (draft_step, draft),
             (verify_step, True), (advance_mtp_step, mtp), (advance_draft_step, draft),
             (commit_step, True))
    return [step for step, taken in order if taken]


def prefill(m: Machine, s: RoundState, prompts: list[list[int]], n_new: int,
            first_request: int) -> None:
    """Process prompts, one a row, and establish the invariant.

    Writes every field that a round reads, but for seed and temperature, which it reads too.
    n_new (at least 1) tokens are wanted, A included.
    Never captured: its shapes are the prompts'.
    """
    device, context = s.pos.device, m.target.cfg.context
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    P = max(len(p) for p in prompts)
    tokens = torch.tensor([p + [0] * (P - len(p)) for p in prompts], device=device)    # (B, P)
    rows = torch.arange(len(prompts), device=device)
    positions = torch.arange(P, device=device).expand(len(prompts), P)
    tap_layers = () if m.drafter is None else m.drafter.dflash.draft.tap_layers
    states, taps = m.target(tokens, positions, s.target_kv, P, tap_layers)
    s.request.copy_(rows + first_request)
    noise = torch.zeros((), device=device)
    if not m.sampling.greedy:
        noise = gumbel(s.seed, s.request, lengths[:, None], m.target.cfg.vocab_size)[:, 0]
    pending = choose(m, s, m.target.lm_head(states[rows, lengths - 1]), noise)         # (B,)
    h = None
    if m.mtp is not None:
        next_tokens = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
        next_tokens[rows, lengths - 1] = pending
        h = m.mtp(m.target, states, next_tokens, positions, s.mtp_kv, P)
        s.mtp_state.copy_(h[rows, lengths - 1])
    if m.drafter is not None:
        features = m.drafter.features(taps, h)
        m.drafter.dflash.write_context(m.target, features, positions, s.draft_kv)
    s.block[:, 0] = pending
    s.pos.copy_(lengths)
    limit = (lengths + n_new - 1).clamp(max=context - 1)
    s.limit.copy_(torch.where(pending == m.eot, lengths, limit))


def row_of(s: RoundState, row: int) -> RoundState:
    """One row of s as a state of views: what is written to it is written to s."""
    def view(x):
        return tuple(map(view, x)) if isinstance(x, tuple) else x[row:row + 1] if x.dim() else x

    return RoundState(**{f.name: view(getattr(s, f.name)) for f in fields(s)})


# ----------------------------------------------------------------------------------------------
# running the steps: eager, compiled, captured

GRAPHS = ("off", "step", "round")


def capture(step: Callable, side, pool) -> Callable:
    """A step as one CUDA Graph, to be called like it; the step itself where there is no CUDA.

    It runs before it is captured, on the side stream, as CUDA demands: kernels are loaded then.
    subtle: one stream for all, as each has a workspace of the matrix library, which stays.
    """
    if side is None:
        return step
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side):
        step()
    return graph.replay


def compile_step(step: Callable) -> Callable:
    """A step through torch.compile, for one machine alone.

    subtle: each gets a copy of the step's code, and with it a cache of its own. So nothing has to
    be asked at a call, whether the machine is still the same: that costs 0.2 ms a step. And what
    is read twice is stored: a product's rows would be computed again for every row of its weights.
    """
    own = FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
    options = {"guard_filter_fn": lambda guards: [False] * len(guards),
               "realize_reads_threshold": 0}
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def bucket(rows: int, length: int) -> int:
    """Cache rows to read: a power of two from 128 on, at most the cache's length."""
    return min(length, max(128, 1 << (rows - 1).bit_length()))


class Rounds:
    """A machine with buffers for n_rows rows, and the steps of a round on them, ready to be called.

    graph: off is eager; step is a CUDA Graph for each step; round is one for the whole round. The
    steps of a bucket of cache rows are made when it is first met, while nothing moves (limit =
    pos). New prompts, seeds, temperatures and weights are new contents of the same tensors.
    Compiled code is made for one bucket, that of `longest` tokens (of the context, by default), and
    on a CPU in bfloat16 for the weights as they are.
    """

    def __init__(self, m: Machine, n_rows: int, graph: str = "off", compiled: bool = False,
                 longest: int | None = None):
        assert graph in GRAPHS, graph
        context = m.target.cfg.context
        self.longest = min(longest or context, context)
        self.m, self.graph, self.compiled = m, graph, compiled
        self.s = new_state(m, n_rows, 0, 1.0)
        self.device = self.s.pos.device
        captures = graph != "off" and self.device.type == "cuda"
        self.side = torch.cuda.Stream() if captures else None
        self.pool = torch.cuda.graph_pool_handle() if captures else None
        self.ready: dict[int, dict[str, Callable]] = {}
        self.clock: dict[str, list[float]] | None = None  # seconds of every step, if it is a dict
        self.since = math.nan          # when the last round of steps ended
        self.prefill_seconds = 0.0

    def kv_len(self, rows: int) -> int:
        """Cache rows to read."""
        length = self.s.target_kv[0][0].size(1)
        wanted = self.longest + self.m.n_slots if self.compiled else rows
        assert rows <= wanted, "a text longer than the steps were compiled for"
        return bucket(wanted, length)

    @torch.no_grad()
    def steps(self, kv_len: int) -> dict[str, Callable]:
        """The steps by name, ready; made now, if the bucket is new."""
        if kv_len not in self.ready:
            m, s = replace(self.m, kv_len=kv_len), self.s
            limit = s.limit.clone()
            s.limit.copy_(s.pos)
            # weights in the matrix library's own order, into which it would bring them every time
            packed = self.device.type == "cpu" and s.states.dtype == torch.bfloat16
            steps = {}
            for step in round_steps(m):
                name = step.__name__.removesuffix("_step")
                if self.compiled:
                    step = compile_step(step)
                steps[name] = partial(step, m, s)
                if self.compiled:
                    with torch._inductor.config.patch(freezing=packed):
                        steps[name]()
            if self.graph == "round":
                parts = list(steps.values())
                steps = {"round": lambda: [part() for part in parts]}
            if self.graph != "off":
                steps = {name: capture(step, self.side, self.pool)
                         for name, step in steps.items()}
            s.limit.copy_(limit)
            self.ready[kv_len] = steps
        return self.ready[kv_len]

    @torch.no_grad()
    def run(self, kv_len: int) -> None:
        """One round. With a clock the device is waited for after every step."""
        steps = self.steps(kv_len)
        if self.clock is None:
            for step in steps.values():
                step()
            return
        start = time.perf_counter()
        if not math.isnan(self.since):
            self.clock.setdefault("host", []).append(start - self.since)
        for name, step in steps.items():
            step()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            end = time.perf_counter()
            self.clock.setdefault(name, []).append(end - start)
            start = end
        self.since = start

    def prefill(self, s: RoundState, prompts: list[list[int]], n_new: int,
                first_request: int) -> list[int]:
        """The pending token of every prompt, processed into s."""
        start = time.perf_counter()
        prefill(self.m, s, prompts, n_new, first_request)
        pending = s.block[:, 0].tolist()
        self.prefill_seconds += time.perf_counter() - start
        return pending

    def refill(self, row: int, prompt: list[int], n_new: int, request: int) -> int:
        """The pending token of a prompt, processed by itself and put into a row."""
        [pending] = self.prefill(row_of(self.s, row), [prompt], n_new, request)
        return pending


# ----------------------------------------------------------------------------------------------
# the loop


class Emission(NamedTuple):
    """What one prompt got from one round. n_accept is -1 for the token that prefill chose."""

    row: int        # of the prompt in the list; where it stands in the batch does not matter
    tokens: list[int]
    n_accept: int
    overshoot: int  # accepted proposals and the target's token that the stops cut off
    ended: bool     # the text has reached its end


def refuse_long(prompts: list[list[int]], context: int) -> None:
    for i, prompt in enumerate(prompts):
        if len(prompt) >= context:
            raise ValueError(
                f"prompt {i + 1} has {len(prompt)} tokens, the context is {context} with what is "
                f"generated: shorten the prompt to {context - 1} or less")


@torch.no_grad()
def generate(rounds: Rounds, prompts: list[list[int]], n_new: int, seed: int = 0,
             temperature: float = 1.0, first_request: int = 0) -> Iterator[list[Emission]]:
    """Decode the prompts; yields the emissions of prefill, then of every round.

    As many at a time as rounds have rows: one that ends is replaced by the next prompt, which
    changes no text. The host reads `emit` once a round, and the first token of a prompt.
    """
    if n_new == 0:
        yield [Emission(row, [], -1, 0, True) for row in range(len(prompts))]
        return
    m, s, context = rounds.m, rounds.s, rounds.m.target.cfg.context
    n_rows, n_new = s.pos.size(0), min(n_new, context)
    refuse_long(prompts, context)
    assert n_rows <= len(prompts), (n_rows, len(prompts))
    prompt_of, pos, limit, live = ([0] * n_rows for _ in range(4))  # what the host knows of a row
    waiting = iter(range(n_rows, len(prompts)))
    emissions = []

    def begin(row: int, i: int, pending: int) -> None:
        """Prompt i stands in a row, and prefill has chosen its first token."""
        prompt_of[row], pos[row] = i, len(prompts[i])
        limit[row] = min(len(prompts[i]) + n_new, context) - 1
        live[row] = pos[row] < limit[row] and pending != m.eot
        emissions.append(Emission(i, [pending], -1, 0, not live[row]))

    s.seed.fill_(seed)
    s.temperature.fill_(temperature)
    for row, pending in enumerate(rounds.prefill(s, prompts[:n_rows], n_new, first_request)):
        begin(row, row, pending)
    while True:
        for row in range(n_rows):
            while not live[row] and (i := next(waiting, None)) is not None:
                begin(row, i, rounds.refill(row, prompts[i], n_new, first_request + i))
        yield emissions
        if not any(live):
            return
        rounds.run(rounds.kv_len(max(p for p, alive in zip(pos, live) if alive) + m.n_slots))
        emissions = []
        for row, (count, n_accept, *choice) in enumerate(s.emit.tolist()):
            if not live[row]:
                continue
            first_eot = choice.index(m.eot) if m.eot in choice else m.n_slots
            n_accept = min(n_accept, first_eot + 1)
            pos[row] += count
            live[row] = pos[row] < limit[row] and choice[count - 1] != m.eot
            emissions.append(Emission(prompt_of[row], choice[:count], n_accept,
                                      n_accept + 1 - count, not live[row]))


@dataclass
class Tally:
    """Texts and counts of one generation. histogram[row][k]: rounds that accepted exactly k."""

    texts: list[list[int]]
    histogram: list[list[int]]
    overshoot: int = 0
    seconds: float = 0.0      # of the rounds, prefill apart
    seconds_with_prefill: float = 0.0
    round_tokens: int = 0     # emitted by the rounds

    @classmethod
    def empty(cls, n_rows: int, n_slots: int) -> "Tally":
        return cls([[] for _ in range(n_rows)], [[0] * n_slots for _ in range(n_rows)])

    def add(self, emissions: list[Emission]) -> None:
        for e in emissions:
            self.texts[e.row] += e.tokens
            if e.n_accept >= 0:
                self.histogram[e.row][e.n_accept] += 1
                self.round_tokens += len(e.tokens)
                self.overshoot += e.overshoot

    def __add__(self, other: "Tally") -> "Tally":
        """The texts and counts of two generations, one after the other."""
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def total(self) -> list[int]:
        """The histogram over all rows."""
        return [sum(counts) for counts in zip(*self.histogram)]


def decode(m: Machine, prompts: list[list[int]], n_new: int, seed: int, temperature: float,
           first_request: int = 0, rounds: Rounds | None = None) -> Tally:
    """Generate to the end without showing anything."""
    tally = Tally.empty(len(prompts), m.n_slots)
    rounds = rounds or Rounds(m, len(prompts))
    start, before = time.perf_counter(), rounds.prefill_seconds
    for emissions in generate(rounds, prompts, n_new, seed, temperature, first_request):
        tally.add(emissions)
    tally.seconds_with_prefill = time.perf_counter() - start
    tally.seconds = tally.seconds_with_prefill - (rounds.prefill_seconds - before)
    return tally


def acceptance_length(histogram: list[int]) -> float:
    """Tokens a round: 1 + sum k h[k] / sum h[k]. [2, 3, 0, 5] -> 2.8. NaN without rounds."""
    rounds = sum(histogram)
    return 1 + sum(k * n for k, n in enumerate(histogram)) / rounds if rounds else math.nan


def cumulative_acceptance(histogram: list[int]) -> list[float]:
    """P(at least k proposals accepted) for k = 1 .. K. [2, 3, 0, 5] -> [0.8, 0.5, 0.5]."""
    rounds = sum(histogram)
    return [sum(histogram[k:]) / rounds if rounds else math.nan for k in range(1, len(histogram))]


def conditional_acceptance(histogram: list[int]) -> list[float]:
    """P(>= k) / P(>= k - 1) for k = 1 .. K. [2, 3, 0, 5] -> [0.8, 0.625, 1.0]."""
    reached = [sum(histogram[k:]) for k in range(len(histogram))]
    return [b / a if a else math.nan for a, b in pairwise(reached)]


def distinct_4grams(texts: list[list[int]]) -> float:
    """Distinct over all runs of four tokens, within each text: loops, easy to draft, show here."""
    grams = [[tuple(t[i:i + 4]) for i in range(len(t) - 3)] for t in texts]
    return sum(len(set(g)) for g in grams) / max(1, sum(len(g) for g in grams))


# ----------------------------------------------------------------------------------------------
# checking against plain decoding


class Difference(NamedTuple):
    row: int
    index: int        # of the first token that differs, in the generated text
    plain: int        # token ids
    speculative: int
    gap: float        # of the plain run's two perturbed logits
    noise: float      # the largest difference of a block's and single rows' logits on the last 16
                      # tokens, or what rounding may do to the largest of them, if that is more
    tie: bool         # moving the two logits by twice the noise makes either token the choice


@torch.no_grad()
def compare(plain: Machine, prompts: list[list[int]], a: Tally, b: Tally, block: int, seed: int,
            temperature: float) -> list[Difference]:
    """Each row's first difference of plain (a) and speculative (b) texts, and how near the tie was.

    A block and a single row take different kernels, so in low precision near ties may flip;
    compiled steps take others again. In float64 no tie is excused.
    """
    found = []
    for row, (x, y) in enumerate(zip(a.texts, b.texts)):
        if x == y:
            continue
        shorter = min(len(x), len(y))
        index = next((i for i in range(shorter) if x[i] != y[i]), shorter)
        if index == shorter:
            found.append(Difference(row, index, -1, -1, math.inf, 0.0, False))  # one text is longer
            continue
        text = prompts[row] + x[:index]
        one = cached_logits(plain, text, 1)          # (n, V), the last row predicts the difference
        many = cached_logits(plain, text, block)
        rounding = torch.finfo(one.dtype).eps * one.abs().max()
        noise = torch.maximum((one - many).abs().max(), rounding).item()
        position = torch.tensor([[len(text)]], device=one.device)
        luck = gumbel(torch.tensor(seed, device=one.device), torch.tensor([row], device=one.device),
                      position, one.size(-1))[0, 0]
        heat = torch.tensor(temperature, device=one.device)
        scores = perturb(one[-1], luck, heat, replace(plain.sampling, top_k=0, top_p=1.0))
        gap = (scores[x[index]] - scores[y[index]]).item()
        either = []
        for up, down in ((x[index], y[index]), (y[index], x[index])):
            moved = one[-1].clone()
            moved[up] += 2 * noise
            moved[down] -= 2 * noise
            choice = perturb(moved, luck, heat, plain.sampling).argmax().item()
            either.append(choice == up)
        tie = (gap == 0 or all(either)) and one.dtype != torch.float64
        found.append(Difference(row, index, x[index], y[index], gap, noise, tie))
    return found


def cached_logits(m: Machine, text: list[int], block: int) -> Tensor:
    """Logits of the last 16 tokens of a text, through the cache in blocks of this many rows."""
    cfg, like, n = m.target.cfg, m.target.lm_head.weight, min(16, len(text) - 1)
    kv = new_cache(cfg, cfg.n_layer, 1, cfg.context + MAX_SLOTS, like)
    tokens = torch.tensor([text], device=like.device)
    positions = torch.arange(len(text), device=like.device)[None]
    cut = len(text) - n
    m.target(tokens[:, :cut], positions[:, :cut], kv, cut)
    logits = [m.target.lm_head(m.target(tokens[:, i:i + block], positions[:, i:i + block], kv,
                                        bucket(len(text), kv[0][0].size(1)))[0])[0]
              for i in range(cut, len(text), block)]
    return torch.cat(logits)


# ==============================================================================================
# command line and reporting

COLORS = {"mtp": "\033[33m", "dflash": "\033[32m", "target": "\033[36m", "prompt": "\033[2m"}
RESET = "\033[0m"
LEGEND = {"mtp": "proposed by MTP", "dflash": "proposed by DFlash",
          "target": "the target's own token"}


def proposer(m: Machine, slot: int) -> str:
    """Who proposes the token of a block's slot (1 .. K)."""
    first = m.n_slots if m.drafter is None else m.drafter.first
    return "mtp" if slot < first else "dflash"


class Screen:
    """Prints texts as they are accepted, whole characters only.

    Of several rows the first that has not ended streams, and later ones wait for their turn.
    """

    def __init__(self, m: Machine, encoding, prompts: list[str], color: bool):
        self.m, self.encoding, self.color = m, encoding, color
        n = len(prompts)
        self.waiting = [[f"\n--- prompt {i} of {n}\n" * (n > 1) + self.paint(text, "prompt")]
                        for i, text in enumerate(prompts, start=1)]
        self.decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
        self.ended = [False] * len(prompts)
        self.row = 0
        self.show()

    def paint(self, text: str, who: str) -> str:
        # a model may write control characters; a terminal must not obey them
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        return f"{COLORS[who]}{text}{RESET}" if self.color and text else text

    def add(self, emissions: list[Emission]) -> None:
        for e in emissions:
            waiting, decoder = self.waiting[e.row], self.decoders[e.row]
            for j, token in enumerate(e.tokens):
                who = proposer(self.m, j + 1) if j < e.n_accept else "target"
                if token == self.encoding.eot_token:
                    text = decoder.decode(b"", final=True) + "<|endoftext|>"
                else:
                    text = decoder.decode(self.encoding.decode_single_token_bytes(token))
                waiting.append(self.paint(text, who))
            if e.ended:
                waiting.append(decoder.decode(b"", final=True))
                self.ended[e.row] = True
        self.show()

    def show(self) -> None:
        """Print what the row in turn has, and go on to the next one where it has ended."""
        while self.row < len(self.waiting):
            print("".join(self.waiting[self.row]), end="", flush=True)
            self.waiting[self.row].clear()
            if not self.ended[self.row]:
                return
            print()
            self.row += 1


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="python speculate.py (--prompt TEXT | --bench | --paired DIR ..) [options; --help "
              "lists them]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", action="append", metavar="TEXT",
                      help="text to go on from; repeat for a batch")
    what.add_argument("--bench", action="store_true",
                      help="acceptance, speed and stage times of every trained drafter")
    what.add_argument("--paired", nargs="+", type=Path, metavar="DIR",
                      help="of the bench.json in several folders, one a seed: the differences of "
                           "all methods to --base, with intervals")
    add("--base", default="dflash", metavar="METHOD",
        help="of --paired, as --bench names it (default dflash)")
    add("--against", nargs="+", type=Path, default=[], metavar="DIR",
        help="of --paired: as many folders, whose methods are what those of the same name are "
             "compared with, in place of --base")
    add("--drafter", choices=["none", "mtp", *ARMS], default="dmtp",
        help="default dmtp; none is plain decoding")
    add("--mtp-steps", type=int, default=1, metavar="K",
        help=f"proposals of --drafter mtp, 1 to {MAX_SLOTS - 1} (default 1)")
    add("--out", type=Path, default=Path("out"), metavar="DIR",
        help="where the checkpoints are (default out)")
    add("--max-new-tokens", type=int, default=128, metavar="N",
        help="tokens to generate (default 128)")
    add("--temperature", type=float, default=1.0, metavar="F", help="0 is greedy (default 1)")
    add("--top-k", type=int, default=0, metavar="N",
        help="sample from the N likeliest tokens (default 0: off)")
    add("--top-p", type=float, default=1.0, metavar="F",
        help="sample from this probability mass (default 1: off)")
    add("--seed", type=int, default=0, metavar="N", help="of the sampling noise (default 0)")
    add("--argmax-drafts", action="store_true",
        help="drafters propose their argmax, as in the sources")
    add("--ignore-eos", action="store_true", help="do not stop at end-of-text")
    add("--device", metavar="D", help="cpu or cuda (default cuda where there is one)")
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="float32",
        help="default float32")
    add("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    add("--check", action="store_true",
        help="compare with plain decoding; exit 1 if a difference is no near tie")
    add("--trace", action="store_true",
        help="show every round in slow motion, of the first --prompt")
    add("--no-color", action="store_true",
        help="no colours (also when the output is not a terminal)")
    add("--n-prompts", type=int, default=64, metavar="N",
        help="held-out prompts of --bench (default 64)")
    add("--batch", type=int, nargs="+", default=[8], metavar="N",
        help="rows of --bench, one number or several (default 8)")
    add("--drafters", nargs="+", choices=["mtp", *ARMS], metavar="NAME",
        help="of --bench: mtp (1, 4 and --mtp-steps steps) and block drafters (default: all "
             "that are trained)")
    add("--repeats", type=int, default=3, metavar="N",
        help="runs of each method and of plain decoding, in turn, of which --bench takes the "
             "median time (default 3)")
    add("--prompts", type=Path, metavar="FILE",
        help="of --bench: .jsonl with prompt, turns or text, or a text; plain or .gz "
             "(default the held-out data)")
    add("--graph", choices=GRAPHS,
        help="CUDA Graphs: one for each step, or one for the whole round (default round on a GPU, "
             "else off)")
    add("--compile", action="store_true",
        help="run the steps through torch.compile; compiling takes a minute or more")
    args = parser.parse_args(argv)
    check_flags(parser, args)
    return args


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a message where a value is out of range, or a flag is of another mode."""
    n, T, n_cores = args.max_new_tokens, args.temperature, os.cpu_count() or 1
    for name, allowed, fits in (
            ("mtp_steps", f"1 to {MAX_SLOTS - 1}", 1 <= args.mtp_steps < MAX_SLOTS),
            ("max_new_tokens", "0, with --bench 2, or more", n >= (2 if args.bench else 0)),
            ("temperature", "0 (greedy), or 0.001 to 1000", T == 0 or 1e-3 <= T <= 1e3),
            ("top_k", "0 (off), or 1 to 2^31 - 1", 0 <= args.top_k < 2 ** 31),
            ("top_p", "above 0, at most 1 (off)", 0 < args.top_p <= 1),
            ("seed", "0 to 2^63 - 1", 0 <= args.seed < 2 ** 63),
            ("threads", f"1 to {n_cores}, as many as there are cores",
             args.threads is None or 1 <= args.threads <= n_cores),
            ("n_prompts", "1 or more", args.n_prompts > 0),
            ("repeats", "1 or more", args.repeats > 0),
            ("batch", "1 or more", min(args.batch) > 0)):
        if not fits:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, allowed: {allowed}")
    drafters = [args.drafter] if args.prompt else args.drafters or ["mtp"]
    if args.mtp_steps > 1 and "mtp" not in drafters:
        parser.error(f"--mtp-steps is {args.mtp_steps}, the drafters are {', '.join(drafters)}: "
                     "name mtp, or leave it out")
    if args.trace and (args.check or args.compile or args.graph not in (None, "off")):
        parser.error("--trace shows eager rounds: leave out --check, --compile and --graph")
    if args.against and args.base != parser.get_default("base"):
        parser.error("--against takes the place of --base: leave one out")
    flags = {"--prompt": ("drafter", "temperature", "argmax_drafts", "check", "trace", "no_color"),
             "--bench": ("drafters", "prompts", "n_prompts", "batch", "repeats"),
             "--paired": ("paired", "base", "against")}
    mode = "--prompt" if args.prompt else "--bench" if args.bench else "--paired"
    for name in vars(args):
        needed = next((x for x, names in flags.items() if name in names), "--prompt or --bench")
        if mode not in needed and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} goes with {needed} alone: leave it out")


def load_machine(name: str, mtp_steps: int, args: argparse.Namespace, target: Llama, mtp: MTP,
                 checkpoint: dict) -> Machine:
    """The machine of a named method, on target and head that are already loaded."""
    sampling = Sampling(greedy=args.temperature == 0, top_k=args.top_k, top_p=args.top_p)
    eot = -1 if args.ignore_eos else checkpoint["tokenizer"]["eot"]
    drafter, n_slots = None, 1
    if name == "mtp":
        n_slots = mtp_steps + 1
    elif name != "none":
        drafter = load_drafter(args.out, name, target.cfg, checkpoint["fingerprint"])
        drafter = drafter.to(target.lm_head.weight)
        join_projections(drafter)
        n_slots = drafter.dflash.draft.n_slots
    uses_mtp = name == "mtp" or (drafter is not None and drafter.arm.uses_mtp)
    head = mtp if uses_mtp else None
    return Machine(target, head, drafter, n_slots, sampling, not args.argmax_drafts, eot)


def open_target(args: argparse.Namespace) -> tuple[Llama, MTP, dict]:
    """Target and head on the device, in the dtype asked for, projections joined; threads, graphs
    and compiling as asked."""
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams, graphs and clocks are the current device's
    if args.threads:
        torch.set_num_threads(args.threads)
    target, mtp, checkpoint = load_target(args.out)
    dtype = getattr(torch, args.dtype)
    if args.graph not in (None, "off") and device.type != "cuda":
        raise ValueError(f"--graph {args.graph} is a CUDA Graph, the device is {device}: "
                         "leave it out, or use --graph off")
    args.graph = args.graph or ("round" if device.type == "cuda" else "off")
    if args.compile:
        check_compiler(device)
    note_unfinished(args.out / "target.pt", checkpoint)
    models = target.to(device, dtype), mtp.to(device, dtype)
    join_projections(*models)
    return *models, checkpoint


def run_prompt(args: argparse.Namespace) -> int:
    """Stream, then measure against plain decoding in turn, and check if asked. The exit status."""
    target, mtp, checkpoint = open_target(args)
    encoding = prepare.encoding(checkpoint["tokenizer"])
    m = load_machine(args.drafter, args.mtp_steps, args, target, mtp, checkpoint)
    # an empty prompt starts from end-of-text, as a document does
    prompts = [encoding.encode_ordinary(text) or [encoding.eot_token] for text in args.prompt]
    refuse_long(prompts, target.cfg.context)
    settings = (prompts, args.max_new_tokens, args.seed, args.temperature)
    if args.trace:
        run_trace(m, encoding, settings)
        return 0
    longest = max(map(len, prompts)) + args.max_new_tokens
    rounds = make_rounds(m, len(prompts), args, longest)
    color = sys.stdout.isatty() and not args.no_color
    if color:
        print("  ".join(f"{COLORS[who]}{LEGEND[who]}{RESET}" for who in LEGEND))
    screen, tally = Screen(m, encoding, args.prompt, color), Tally.empty(len(prompts), m.n_slots)
    for emissions in generate(rounds, *settings):
        tally.add(emissions)
        screen.add(emissions)
    plain = rounds if m.n_slots == 1 else make_rounds(plain_of(m), len(prompts), args, longest)
    status = print_check(plain, args, settings, tally, m.n_slots) if args.check else 0
    context = target.cfg.context
    if cut := sum(len(prompt) + len(text) >= context and len(text) < args.max_new_tokens
                  for prompt, text in zip(prompts, tally.texts)):
        print(f"note: the context of {context} tokens, prompt included, ended {cut} of "
              f"{len(prompts)} texts", file=sys.stderr)
    if sum(tally.total()):
        all_rounds = {"plain": plain}
        if m.n_slots > 1:
            print_acceptance(m, args, tally)
            all_rounds[args.drafter] = rounds
        print_speed(all_rounds, args, settings)
    return status


def make_rounds(m: Machine, n_rows: int, args: argparse.Namespace, longest: int,
                graph: str | None = None) -> Rounds:
    """Rounds as the arguments say (or with another graph), with the steps of every bucket that a
    text of `longest` tokens meets ready."""
    rounds = Rounds(m, n_rows, graph or args.graph, args.compile, longest)
    start = time.perf_counter()
    for kv_len in sorted({rounds.kv_len(n + m.n_slots) for n in range(1, rounds.longest + 1)}):
        rounds.steps(kv_len)
    if rounds.compiled:
        print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return rounds


def run_trace(m: Machine, encoding, settings: tuple) -> None:
    """Rounds in slow motion, of the first prompt."""
    m = replace(m, drafts=[])
    rounds, before = Rounds(m, 1), None
    prompts, *rest = settings
    for emissions in generate(rounds, prompts[:1], *rest):
        s = rounds.s
        if before is not None:
            trace_round(m, s, encoding, *before, emissions[0])
        before = s.block[0, 0].item(), s.pos[0].item()
        m.drafts.clear()
    if emissions[0].n_accept < 0:
        print("no round to show: the text ended with its first token, or --max-new-tokens did")


def trace_round(m: Machine, s: RoundState, encoding, a: int, pos: int, e: Emission) -> None:
    """Print one round, whose pending token a stood at pos: a line a slot."""
    def show(token: int) -> str:
        return repr(encoding.decode_single_token_bytes(token).decode("utf-8", "replace"))

    K, n_kept = m.n_slots - 1, len(e.tokens)
    choice = s.choice[0].tolist()
    p = m.target.lm_head(s.states)[0].softmax(dim=-1)                                  # (S, V)
    print(f"\nA = {show(a)} at position {pos}\n"
          f"  slot  {'proposed by':12} {'proposal':18} {'sure':>5}   {'the target wants':18} "
          f"{'sure':>5}")
    drafts = [x if x.dim() == 3 else x[:, None] for x in m.drafts]                     # (1, n, V)
    q = torch.cat(drafts, dim=1)[0].softmax(dim=-1) if K else None                     # (K, V)
    for j in range(1, m.n_slots):
        token, own = s.block[0, j].item(), choice[j - 1]
        if j <= e.n_accept:
            fate = "accepted" if j <= n_kept else "accepted, and cut off by a stop"
        elif j == n_kept:
            fate = "rejected: the target's own token is emitted"
        else:
            fate = "not reached"
        who = {"mtp": "MTP", "dflash": "DFlash"}[proposer(m, j)]
        print(f"  T{j:<4} {who:12} {show(token):18} {q[j - 1, token]:5.2f}   {show(own):18} "
              f"{p[j - 1, own]:5.2f}   {fate}")
    if e.n_accept == K and n_kept == m.n_slots:
        bonus = "the bonus after a whole block" if K else "plain decoding: one token a round"
        print(f"  {'':5} {'':12} {'':18} {'':5}   {show(choice[K]):18} {p[K, choice[K]]:5.2f}   "
              f"{bonus}")
    caches = ["target"] + ["MTP"] * (m.mtp is not None) + ["DFlash"] * (m.drafter is not None)
    stale = m.n_slots - n_kept
    print(f"  emitted {n_kept}: {' '.join(show(t) for t in e.tokens)}\n"
          f"  caches of {', '.join(caches)}: valid rows {pos} -> {pos + n_kept}"
          + (f"; the {stale} after them are stale, and written again next round" if stale else ""))


def print_acceptance(m: Machine, args: argparse.Namespace, tally: Tally) -> None:
    histogram, n_tokens = tally.total(), sum(map(len, tally.texts))
    drafts = "coupled" if m.coupled else "argmax drafts"
    mode = "greedy" if m.sampling.greedy else f"T = {args.temperature:g}, {drafts}"
    print(f"\n{args.drafter}, {mode}: {n_tokens} tokens, {sum(histogram)} verification rounds, "
          f"{tally.overshoot} tokens cut off by a stop")
    print(f"  acceptance length  {acceptance_length(histogram):5.2f}   "
          "tokens a round: the accepted proposals, and one of the target")
    print(f"  first-token        {1 - histogram[0] / sum(histogram):5.2f}   "
          "share of rounds whose T1 was accepted\n"
          f"  distinct 4-grams   {distinct_4grams(tally.texts):5.2f}   "
          "of all runs of four tokens; a text that repeats itself is easy to draft")
    print("accepted up to Tk, share of rounds")
    for k, share in enumerate(cumulative_acceptance(histogram), 1):
        print(f"  T{k:<2} {share:6.3f} {'#' * round(40 * share)}")


def print_speed(all_rounds: dict[str, Rounds], args: argparse.Namespace, settings: tuple) -> None:
    """Medians of three runs each, in turn; tokens of the rounds over their time, prefill apart."""
    runs = {name: [] for name in all_rounds}
    for _ in range(3):
        for name, rounds in all_rounds.items():
            tally = decode(rounds.m, *settings, rounds=rounds)
            runs[name].append(tally.round_tokens / tally.seconds)
    medians = {name: statistics.median(values) for name, values in runs.items()}
    text = " | ".join(f"{name} {value:.0f}" for name, value in medians.items())
    factor = f" | factor {medians[args.drafter] / medians['plain']:.2f}" if len(medians) > 1 else ""
    device = next(iter(all_rounds.values())).device
    print(f"tokens/s  {text}{factor}   (decoding only, medians of 3 in turn, "
          f"{describe_setting(args, device)}, batch {len(settings[0])})")


def describe_setting(args: argparse.Namespace, device: torch.device) -> str:
    """What a speed depends on, apart from the text."""
    return (f"{args.dtype}, {device.type}, {describe_device(device)}, graph {args.graph}"
            f"{', compiled' * args.compile}")


def print_check(plain: Rounds, args: argparse.Namespace, settings: tuple, tally: Tally,
                block: int) -> int:
    """Compare with plain decoding by the same kind of steps; 1 if a difference is no near tie."""
    reference = decode(plain.m, *settings, rounds=plain)
    found = compare(plain.m, settings[0], reference, tally, max(block, 2), args.seed,
                    args.temperature)
    n = sum(map(len, reference.texts))
    if not found:
        print(f"check     identical to plain decoding: {n} tokens, {args.dtype}")
    for d in found:
        fate = "a near tie" if d.tie else "MISMATCH"
        print(f"check     prompt {d.row + 1} differs from plain decoding at token {d.index + 1}: "
              f"{d.speculative} for {d.plain}, gap {d.gap:.2e}, "
              f"block against row {d.noise:.2e}: {fate}")
    return int(any(not d.tie for d in found))


# ----------------------------------------------------------------------------------------------
# --bench

# temperature, and whether drafts are coupled (which changes nothing when greedy)
MODES = {"T = 1 coupled": (1.0, True), "T = 1 argmax": (1.0, False), "greedy": (0.0, True)}
STAGES_MODE = "T = 1 coupled"
PROMPT, DOCUMENT = 64, 192  # tokens of a prompt cut from a text, and of that text at least


class Request(NamedTuple):
    """A prompt, and what the user says after the model's answer (nothing, as a rule)."""

    tokens: list[int]
    follow_up: list[int]


def held_out_requests(tokens: np.ndarray, eot: int, n: int) -> list[Request]:
    """The first PROMPT tokens of held-out documents of at least DOCUMENT, in file order."""
    ends = np.flatnonzero(tokens == eot)
    starts = np.concatenate(([0], ends[:-1] + 1))
    chosen = [s for s, e in zip(starts, ends) if e - s >= DOCUMENT][:n]
    return [Request(tokens[s:s + PROMPT].tolist(), []) for s in chosen]


def read_requests(path: Path, encoding, n: int, longest: int) -> list[Request]:
    """Requests from a file, plain or .gz; ValueError names what is wrong with it.

    .jsonl: `turns` (the second follows the model's own answer) or `prompt`, of which the last
    `longest` tokens are taken; or `text`, as held_out_requests takes it. Else the file is one text:
    PROMPT tokens at n evenly spaced places.
    """
    with prepare.open_text(path) as file:
        content = file.read()
    requests = []
    if not prepare.is_jsonl(path):
        tokens = encoding.encode_ordinary(content)
        if len(tokens) < PROMPT * n:
            raise ValueError(f"{path} has {len(tokens)} tokens, {n} prompts of {PROMPT} need "
                             f"{PROMPT * n}: ask for fewer with --n-prompts")
        starts = np.linspace(0, len(tokens) - PROMPT, n).astype(int)
        return [Request(tokens[i:i + PROMPT], []) for i in starts]
    for number, line in enumerate(content.split("\n"), start=1):
        if len(requests) == n or not line.strip():
            continue
        try:
            record = json.loads(line)
            turns = [record["prompt"]] if "prompt" in record else record.get("turns")
            if turns is not None:
                if not isinstance(turns, list) or not turns:
                    raise ValueError("turns is not a list of texts")
                first, *more = (encoding.encode_ordinary(turn) for turn in turns)
                requests.append(Request(first[-longest:] or [encoding.eot_token],
                                        more[0] if more else []))
            elif len(tokens := encoding.encode_ordinary(record["text"])) >= DOCUMENT:
                requests.append(Request(tokens[:PROMPT], []))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"{path}, line {number}: a JSON object with a prompt, turns or a text "
                             f"is expected ({type(e).__name__}: {e})") from e
    return requests


def second_turns(m: Machine, requests: list[Request], texts: list[list[int]],
                 n_new: int) -> list[list[int]]:
    """Where a request goes on: prompt, the model's answer, the follow-up; its end, if too long."""
    room = m.target.cfg.context - n_new
    return [(r.tokens + [t for t in text if t != m.eot] + r.follow_up)[-room:]
            for r, text in zip(requests, texts) if r.follow_up]


def in_mode(m: Machine, mode: str) -> Machine:
    temperature, coupled = MODES[mode]
    return replace(m, sampling=replace(m.sampling, greedy=temperature == 0), coupled=coupled)


def decode_requests(m: Machine, requests: list[Request], temperature: float, batch: int,
                    args: argparse.Namespace, ready: dict) -> Tally:
    """All requests, then their second turns, so many rows at a time.

    `ready` keeps the rounds of each machine and number of rows, warmed up, for the next call.
    """
    def all_of(prompts: list[list[int]], first_request: int) -> Tally:
        n_rows = min(batch, len(prompts))
        if (id(m), n_rows) not in ready:
            rounds = make_rounds(m, n_rows, args, m.target.cfg.context)
            # with a row that is replaced
            decode(m, (prompts * 2)[:n_rows + 1], 4, args.seed, temperature, 0, rounds)
            ready[id(m), n_rows] = rounds
        return decode(m, prompts, args.max_new_tokens, args.seed, temperature, first_request,
                      ready[id(m), n_rows])

    tally = all_of([r.tokens for r in requests], 0)
    again = second_turns(m, requests, tally.texts, args.max_new_tokens)
    return tally + all_of(again, len(requests)) if again else tally


def bench_row(m: Machine, requests: list[Request], temperature: float, batch: int,
              args: argparse.Namespace) -> dict:
    """Decode all requests plainly and with m, in turn, and count; times are medians."""
    device = m.target.lm_head.weight.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    machines, ready = (plain_of(m), m), {}
    runs = [[decode_requests(x, requests, temperature, batch, args, ready) for x in machines]
            for _ in range(args.repeats)]
    base, total = runs[0]
    histogram = total.total()
    if not sum(histogram) or not base.round_tokens:
        raise ValueError("every text ended at its first token: add --ignore-eos, or give other "
                         "prompts")
    lengths = [acceptance_length(h) for h in total.histogram if sum(h)]
    texts = [tally.texts for pair in runs for tally in pair]  # of one prompt, all must be the same
    n_tokens = sum(map(len, total.texts))
    seconds, with_prefill = ([statistics.median(getattr(tally, name) for tally in tallies)
                              for tallies in zip(*runs)]
                             for name in ("seconds", "seconds_with_prefill"))
    plain_speed, speed = base.round_tokens / seconds[0], total.round_tokens / seconds[1]
    plain_e2e = sum(map(len, base.texts)) / with_prefill[0]
    e2e = n_tokens / with_prefill[1]
    return {"temperature": temperature, "coupled": m.coupled, "batch": batch,
            "prompts": len(requests), "new_tokens": n_tokens,
            "histogram": histogram, "overshoot": total.overshoot,
            "acceptance_length": acceptance_length(histogram),
            "per_request_length": statistics.mean(lengths),
            "first_token_acceptance": 1 - histogram[0] / sum(histogram),
            "cumulative_acceptance": cumulative_acceptance(histogram),
            "conditional_acceptance": [None if math.isnan(x) else x
                                       for x in conditional_acceptance(histogram)],
            "distinct_4gram": distinct_4grams(total.texts),
            "texts_that_differ": sum(any(x != same[0] for x in same) for same in zip(*texts)),
            "plain_tokens_per_s": plain_speed, "tokens_per_s": speed, "factor": speed / plain_speed,
            "plain_e2e_tokens_per_s": plain_e2e, "e2e_tokens_per_s": e2e,
            "e2e_factor": e2e / plain_e2e, "peak_memory_bytes": peak_memory(device)}


STAGES = ("noise", "t1", "chain", "draft", "verify", "advance_mtp", "advance_draft", "commit",
          "host")
DROPPED = 16  # first rounds, which warm up


def stage_times(m: Machine, prompts: list[list[int]], temperature: float,
                args: argparse.Namespace) -> dict:
    """Medians in ms a round of every step, and of whole rounds without a clock between the steps.

    End-of-text is ignored, and the texts go on to the end of the context.
    """
    m, context = replace(m, eot=-1), m.target.cfg.context
    timed, whole = (make_rounds(m, len(prompts), args, context, graph)
                    for graph in ("off" if args.graph == "off" else "step", args.graph))
    timed.clock = {}
    for rounds in (timed, whole):
        ends = [time.perf_counter()
                for _ in generate(rounds, prompts, context, args.seed, temperature)]
    seconds = [b - a for a, b in pairwise(ends)]  # of the whole ones, the last
    n = min(DROPPED, len(seconds) // 2)
    stages = {name: 1e3 * statistics.median(times[n:] or times)
              for name, times in timed.clock.items()}
    return stages | {"round": 1e3 * statistics.median(seconds[n:])}


def weight_reads(m: Machine) -> float:
    """Bytes of weights that a round reads, relative to a plain step."""
    def n(*modules) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    head = n(m.target.lm_head)
    plain = n(m.target) - n(m.target.embed_tokens)
    total = plain
    if m.mtp is not None:
        n_chain = m.n_slots - 2 if m.drafter is None else 0
        total += (1 + n_chain) * (n(m.mtp) + head)
    if m.drafter is not None:
        context = [x for layer in m.drafter.dflash.layers
                   for x in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        total += n(m.drafter) + head + n(*context)  # keys and values: of the block, of the context
        if (selector := m.drafter.dflash.selector) is not None:
            total -= n(selector.before, selector.after)  # of which rows are looked up
    return total / plain


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that a GPU's allocator gave out at a time since its count was reset, for all
    that is loaded; on a CPU, of the whole process so far. None where nobody counts."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # not on every system
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def run_bench(args: argparse.Namespace) -> int:
    """Tables over methods and modes, and bench.json; an earlier one becomes bench.old.json.

    Until the last row is there, those that are stand in bench.part.json.
    """
    target, mtp, checkpoint = open_target(args)
    encoding = prepare.encoding(checkpoint["tokenizer"])
    requests, source = bench_requests(args, target, checkpoint, encoding)
    args.batch = list(dict.fromkeys(min(b, len(requests)) for b in args.batch))
    trained = [name for name in ARMS if (args.out / f"{name}.pt").exists()]
    wanted = list(dict.fromkeys(args.drafters or ["mtp", *trained]))
    methods = [(f"mtp x {k}", "mtp", k) for k in sorted({1, 4, args.mtp_steps})
               if "mtp" in wanted] + [(name, name, 1) for name in wanted if name != "mtp"]
    # one that is missing is found before anything is measured
    machines = {label: load_machine(name, k, args, target, mtp, checkpoint)
                for label, name, k in methods}
    device = target.lm_head.weight.device
    path, part = args.out / "bench.json", args.out / "bench.part.json"
    measured = (f"{len(requests)} prompts of {source}, {args.max_new_tokens} new tokens, "
                f"seed {args.seed}"
                f"{f', top-k {args.top_k}' * (args.top_k > 0)}"
                f"{f', top-p {args.top_p:g}' * (args.top_p < 1)}"
                f"{', end-of-text ignored' * args.ignore_eos}")
    setting = f"{measured}, {describe_setting(args, device)}, torch {torch.__version__}"
    print(f"{setting}\n"
          "length: tokens a verification round, over all rounds | request: the mean of each "
          "request's | first: share of rounds whose T1 was accepted\n"
          f"4-grams: distinct share | tokens/s: decoding only, median of {args.repeats} | factor: "
          "over plain decoding's, in turn | end to end: tokens/s with prefill and waiting\n"
          "differ: prompts whose texts are not all plain decoding's\n\n"
          f"{'mode':14} {'batch':>5} {'method':14} {'length':>7} {'request':>8} {'first':>6} "
          f"{'4-grams':>8} {'tokens/s':>9} {'factor':>7} {'end to end':>11} {'factor':>7} "
          f"{'differ':>7}")
    rows = []
    for batch in args.batch:
        for mode, (temperature, coupled) in MODES.items():
            if not coupled and batch != args.batch[0]:
                continue  # acceptance does not depend on the batch
            for label, m in machines.items():
                row = {"drafter": label, "mode": mode, "measured": measured, "dtype": args.dtype,
                       "target_seed": checkpoint.get("settings", {}).get("seed"),
                       "setting": setting, "repeats": args.repeats}
                row |= bench_row(in_mode(m, mode), requests, temperature, batch, args)
                rows.append(row)
                save_json(part, rows)
                print(f"{mode:14} {batch:5} {label:14} {row['acceptance_length']:7.3f} "
                      f"{row['per_request_length']:8.3f} {row['first_token_acceptance']:6.3f} "
                      f"{row['distinct_4gram']:8.3f} {row['tokens_per_s']:9.0f} "
                      f"{row['factor']:7.2f} {row['e2e_tokens_per_s']:11.0f} "
                      f"{row['e2e_factor']:7.2f} {row['texts_that_differ']:7d}", flush=True)
    print_positions([row for row in rows if row["batch"] == rows[0]["batch"]])
    print_stages(args, rows, machines, requests)
    if peak := max(row["peak_memory_bytes"] or 0 for row in rows):
        print(f"\npeak memory {peak / 2 ** 20:.0f} MiB, "
              + ("given out by the allocator" if device.type == "cuda" else "of the whole process"))
    save_json(part, rows)
    if path.exists():
        path.replace(args.out / "bench.old.json")
    part.replace(path)
    return int(args.dtype == "float64" and any(row["texts_that_differ"] for row in rows))


def bench_requests(args: argparse.Namespace, target: Llama, checkpoint: dict,
                   encoding) -> tuple[list[Request], str]:
    """The prompts, and where they come from, with a digest of it."""
    longest = target.cfg.context - args.max_new_tokens
    too_long = ValueError(f"--max-new-tokens is {args.max_new_tokens}, the context is "
                          f"{target.cfg.context} with the prompt: ask for fewer")
    if longest < 1:
        raise too_long
    if args.prompts:
        requests = read_requests(args.prompts, encoding, args.n_prompts, longest)
        source, digest = str(args.prompts), prepare.file_digest(args.prompts)
    else:
        data = prepare.load(checkpoint["data"])
        if data.tokenizer != checkpoint["tokenizer"]:
            raise ValueError(f"data/{checkpoint['data']} was prepared again with another "
                             "tokenizer: train again")
        requests = held_out_requests(data.val, data.tokenizer["eot"], args.n_prompts)
        source, digest = "the held-out data", data.meta["digests"]["val.bin"]
    if any(len(r.tokens) > longest for r in requests):
        raise too_long
    if not requests:
        raise ValueError(f"{source} has no prompt, and no document of {DOCUMENT} tokens: give "
                         "another file with --prompts")
    if len(requests) < args.n_prompts and not args.prompts:
        raise ValueError(f"--n-prompts is {args.n_prompts}, {source} has {len(requests)} documents "
                         f"of {DOCUMENT} tokens: ask for fewer")
    return requests, f"{source} (sha256 {digest[:8]})"


def print_positions(rows: list[dict]) -> None:
    """Acceptance by position, conditional and cumulative: numbers, and a chart."""
    n = max(len(row["histogram"]) for row in rows) - 1
    for kind, meaning in (("conditional", "of the rounds that accepted all before it, the share "
                                          "that accepted Tk"),
                          ("cumulative", "the share of rounds that accepted all up to Tk")):
        print(f"\n{kind} acceptance: {meaning} | chart: a column a proposal\n"
              "rounds: of verification | cut off: accepted tokens behind a stop, not emitted\n\n"
              f"{'mode':14} {'method':14} {'rounds':>7} {'cut off':>7} "
              + " ".join(f"{f'T{k}':>5}" for k in range(1, n + 1)) + "  chart")
        for row in rows:
            shares = row[f"{kind}_acceptance"]
            cells = [" " * 5 if x is None else f"{x:5.2f}" for x in shares]
            cells += [" " * 5] * (n - len(shares))
            chart = "".join(" ▁▂▃▄▅▆▇█"[round(8 * (x or 0))] for x in shares)
            print(f"{row['mode']:14} {row['drafter']:14} {sum(row['histogram']):7} "
                  f"{row['overshoot']:7} {' '.join(cells)}  {chart}")


def print_stages(args: argparse.Namespace, rows: list[dict], machines: dict[str, Machine],
                 requests: list[Request]) -> None:
    """Where the time of a round goes; the rows in STAGES_MODE get what is printed of them."""
    machines = {"plain": plain_of(next(iter(machines.values())))} | machines
    row_of_method = {(row["drafter"], row["mode"], row["batch"]): row for row in rows}
    print(f"\nms a round, medians at {STAGES_MODE}, end-of-text ignored, to the end of the context,"
          f" first {DROPPED} rounds dropped (half of a few) | round: whole, with no clock inside\n"
          "reads: bytes of weights over a plain step's | expected: length / (round / plain step) | "
          "factor: measured above\n\n"
          f"{'batch':>5} {'method':14} " + " ".join(f"{x.replace('advance_', '+'):>7}"
                                                    for x in STAGES)
          + f" {'round':>7} {'/ plain':>7} {'reads':>6} {'expected':>8} {'factor':>7}")
    for batch in args.batch:
        prompts = [r.tokens for r in requests[:batch]]
        plain: dict = {}
        for label, m in machines.items():
            times = stage_times(in_mode(m, STAGES_MODE), prompts, MODES[STAGES_MODE][0], args)
            plain = plain or times
            ratio, reads = times["round"] / plain["round"], weight_reads(m)
            ends = ""
            if row := row_of_method.get((label, STAGES_MODE, batch)):
                expected = row["acceptance_length"] / ratio
                row |= {"stages_ms": times, "plain_stages_ms": plain, "reads": reads,
                        "expected_factor": expected}
                ends = f" {expected:8.2f} {row['factor']:7.2f}"
            print(f"{batch:5} {label:14} "
                  + " ".join(f"{times[x]:7.2f}" if x in times else " " * 7 for x in STAGES)
                  + f" {times['round']:7.2f} {ratio:7.2f} {reads:6.2f}" + ends, flush=True)


def run_paired(args: argparse.Namespace) -> int:
    """Differences of the acceptance between methods, or folders, over trainings that are paired."""
    ours = [read_rows(folder) for folder in args.paired]
    theirs = [read_rows(folder) for folder in args.against] or ours
    refuse_unpaired(args, ours, theirs)
    methods = [key for key in ours[0] if all(key in rows for rows in ours + theirs)]
    names = list(dict.fromkeys(label for _, label in methods))
    if not names or not (args.against or args.base in names):
        raise ValueError(f"--base is {args.base}, all of these folders have: "
                         f"{', '.join(names) or 'no method in common'}")
    mean, row = statistics.fmean, ours[0][methods[0]]
    pairs = args.against or [args.base] * len(ours)
    print(f"{row['measured']}, {row['dtype']}\n"
          f"pairs: {', '.join(f'{a} - {b}' for a, b in zip(args.paired, pairs))}\n"
          "difference: with the 95% interval of its mean over pairs (Student's t), and relative to "
          "the base; not resolved: it holds 0")
    for name, title in (("acceptance_length", "acceptance length, tokens a verification round"),
                        ("first_token_acceptance", "share of rounds whose T1 was accepted")):
        print(f"\n{title}\n\n{'mode':14} {'method':14} {'mean':>7} {'base':>7} "
              f"{'difference':>17} {'relative':>9}")
        for mode, label in methods:
            if not args.against and label == args.base:
                continue
            own = [rows[mode, label][name] for rows in ours]
            base = [rows[mode, label if args.against else args.base][name] for rows in theirs]
            found = interval([x - y for x, y in zip(own, base)])
            width = "" if found["half_width"] is None else f"+- {found['half_width']:.3f}"
            change = f"{found['mean'] / mean(base):+.1%}" if mean(base) else "-"
            print(f"{mode:14} {label:14} {mean(own):7.3f} {mean(base):7.3f} {found['mean']:+7.3f} "
                  f"{width:9} {change:>9}  {verdict(found)}".rstrip())
    return 0


def refuse_unpaired(args: argparse.Namespace, ours: list[dict], theirs: list[dict]) -> None:
    """ValueError for folders that are not measured alike, or not one for one."""
    for folders in (args.paired, args.against):
        if twice := [f for i, f in enumerate(folders) if f.resolve() in
                     [x.resolve() for x in folders[:i]]]:
            raise ValueError(f"{twice[0]} is given twice: name each folder once")
    if len(ours) != len(theirs):
        raise ValueError(f"--paired has {len(ours)} folders, --against {len(theirs)}: give as many")
    own, base = ([next(iter(rows.values())) for rows in side] for side in (ours, theirs))
    for folder, row in zip(args.paired + args.against, own + base):
        if differ := differing(*({k: x[k] for k in ("measured", "dtype")} for x in (row, own[0])),
                               f"of {args.paired[0]}"):
            raise ValueError(f"{folder} was measured otherwise: {differ}. Give --bench the same "
                             "flags in all")
    seeds, base_seeds = ([row["target_seed"] for row in side] for side in (own, base))
    if seeds != base_seeds:
        raise ValueError(f"the targets of --paired have seeds {seeds}, of --against {base_seeds}: "
                         "name the folders in the same order of seeds")


def read_rows(folder: Path) -> dict[tuple[str, str], dict]:
    """{(mode, method): row} of folder/bench.json, at the first batch; at least one."""
    path = folder / "bench.json"
    hint = f"python speculate.py --bench --out {shlex.quote(str(folder))}"
    if not path.exists():
        raise ValueError(f"there is no {path}: make it with {hint}")
    try:
        rows = json.loads(path.read_text("utf-8"))
        batch = rows[0]["batch"]
        needed = ("acceptance_length", "first_token_acceptance", "measured", "dtype", "target_seed")
        return {(row["mode"], row["drafter"]): {name: row[name] for name in needed}
                for row in rows if row["batch"] == batch}
    except (ValueError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"{path} was not written by this program, or by an older one: "
                         f"make it again with {hint}") from e


def main(argv: list[str] | None = None) -> int:
    prepare.never_fail_to_print()
    args, began = parse_args(argv), time.time()
    try:
        if args.paired:
            return run_paired(args)
        return run_bench(args) if args.bench else run_prompt(args)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as e:
        print(f"error: {no_memory(e)}: give fewer rows at a time, or --dtype bfloat16",
              file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        part = args.out / "bench.part.json"
        kept = args.bench and part.exists() and part.stat().st_mtime >= began
        print("\nstopped" + f"; the rows so far are in {part}" * kept, file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
