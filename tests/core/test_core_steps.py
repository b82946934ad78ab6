"""Test a mini-batch's step: token ids, split points and selections against slow, plain counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from toy_machine import SHAPE as TOY

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.cache_entries import StoredCopy
from flexhybrid.core.context.selection import kept_tokens, selected_tokens
from flexhybrid.core.context.split import SplitLines, split_point, split_seconds
from flexhybrid.core.hardware import LINKS, Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import PAGE_BYTES, stream
from flexhybrid.core.policy import Bits, Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.core.schedule import buffer_sizes
from flexhybrid.core.schedule.step_work import counts_of, step_work
from flexhybrid.core.schedule.steps import make_step
from flexhybrid.core.wave import Wave, admit
from flexhybrid.core.workload import Workload

SHAPE = ModelShape("tiny", "opt", 3, 64, 4, 4, 16, 256, 128, 4096)
P = 4  # bytes an element


def machine(compute: float = 1e-12, link: float = 1e-10) -> Hardware:
    lines = dict.fromkeys(LINKS, Line(2e-5, 0.0, link))
    return Hardware("toy", "cpu", {**lines, "compute": Line(1e-5, compute, 1e-12), "host_compute": Line(1e-5)})


def wave_of(policy: Policy, prompts, generated, shape: ModelShape = SHAPE, hardware: Hardware | None = None) -> Wave:
    return admit(
        Problem(shape=shape, dtype="float32", hardware=hardware or machine()),
        policy,
        Workload(np.array(prompts), np.array(generated)),
    )


def steps_of(wave: Wave):
    """Yield every step of a wave's first mini-batch, with the requests that run then."""
    group = wave.mini_batches[0]
    for iteration in range(int(wave.workload.max_tokens[group].max())):
        yield iteration, make_step(wave, iteration, 0, group[wave.workload.max_tokens[group] > iteration])


def works_of(wave: Wave, step, whole: bool = False):
    return step_work(wave.shape, wave.policy, wave.stored, counts_of(step, wave), whole)


# --- token ids --------------------------------------------------------------------------------------------------------

shares = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(
    lambda weights: dict(
        zip(("tok", "kv@host", "act@host", "both(kv@host,act@device)"), (weight / sum(weights) for weight in weights))
    )
)
lengths = st.lists(st.tuples(st.integers(1, 120), st.integers(1, 40)), min_size=1, max_size=3)


@settings(max_examples=30, deadline=None)
@given(shares, lengths)
def test_every_token_is_recomputed_or_cached_once(cache, requests):
    """A prefix of whole blocks is recomputed, never including the newest block; segments hold the rest."""
    wave = wave_of(Policy(cache=cache, max_mini_batch_tokens=1 << 20), *zip(*requests))
    for iteration, step in steps_of(wave):
        if iteration == 0:
            assert not step.recomputed.any() and all(segment.max_tokens == 0 for segment in step.segments)
            continue
        prompts = wave.workload.prompt_tokens[step.requests]
        assert step.context.tolist() == (prompts + iteration - 1).tolist()
        held = sum(segment.num_tokens for segment in step.segments)
        assert (step.recomputed + held).tolist() == step.context.tolist()
        for context, recomputed in zip(step.context.tolist(), step.recomputed.tolist()):
            wanted = math.floor(cache["tok"] * (context // BLOCK_TOKENS) + 0.5 + 1e-9)
            assert recomputed == BLOCK_TOKENS * min(wanted, (context - 1) // BLOCK_TOKENS)
        widths = sum(int(segment.num_tokens.max()) for segment in step.segments)
        assert step.attention_tokens == widths + int(step.recomputed.max()) + 1


def test_a_recomputed_prefix_passes_through_the_whole_layer():
    """Half of 64 context tokens are ids: each product has 32 more rows per request, which attend causally."""
    ids = wave_of(Policy(cache={"tok": 0.5, "kv@host": 0.5}), [64, 64], [2, 2])
    cached = wave_of(Policy(cache={"kv@host": 1.0}), [64, 64], [2, 2])
    with_ids, without = (works_of(wave, make_step(wave, 1, 0, np.arange(2))) for wave in (ids, cached))
    for verb in ("embed", "project", "finish"):
        assert with_ids[verb].tokens == 2 * (32 + 1) and without[verb].tokens == 2, verb
    assert with_ids["finish"].flops == 33 * without["finish"].flops
    assert with_ids["head"] == without["head"] and with_ids["attend"] == without["attend"]
    assert with_ids["load_kv"].link_bytes == without["load_kv"].link_bytes / 2
    assert with_ids["attend_recomputed"].flops == 2 * 4 * 64 * sum(range(1, 33))  # each over those before it
    assert "attend_recomputed" not in without


# --- split point ------------------------------------------------------------------------------------------------------

seconds = st.floats(1e-9, 1e-4)


@settings(max_examples=300)
@given(
    st.builds(SplitLines, st.sampled_from(["paper", "pipeline"]), seconds, st.just(0.0) | seconds, seconds,
              st.just(0.0) | st.floats(1e-6, 1.0), seconds, seconds, st.floats(0, 1e-5)),
    st.integers(1, 40), st.integers(1, 700),
)  # fmt: skip
def test_the_split_point_is_the_best_whole_block(lines, batch, context):
    """It is compared with every number of recomputed tokens. The paper rounds its own rule to the nearest block."""
    assume(lines.load_act_s < lines.load_kv_s)
    chosen = float(split_point(lines, batch, context))
    tokens = np.arange(context + 1.0)
    each = split_seconds(lines, batch, context, tokens)
    assert chosen % BLOCK_TOKENS == 0 and 0 <= chosen <= context
    least = each.min() * (1 + 1e-9)
    if lines.rule == "pipeline":
        assert each[int(chosen)] <= each[::BLOCK_TOKENS].min() * (1 + 1e-9)
    else:
        best = tokens[each <= least]  # where both sides of the rule are flat there may be several
        nearest = np.abs(np.clip(best, 0, context // BLOCK_TOKENS * BLOCK_TOKENS) - chosen).min()
        assert nearest <= BLOCK_TOKENS / 2 + 1
    exact = float(split_point(lines, batch, context, whole_blocks=False))
    assert split_seconds(lines, batch, context, exact) <= least


def test_a_step_cuts_its_segments_at_the_split_point():
    kind = "both(kv@host,act@host)"
    wave = wave_of(Policy(cache={kind: 1.0}), [100, 40, 7], [6, 6, 6], hardware=machine(1e-15, 1e-7))
    for iteration, step in steps_of(wave):
        if not iteration:
            continue
        split = int(split_point(wave.split[kind], 3, int(step.context.max()), 1))
        act, kv = step.segments
        assert (act.representation, kv.representation) == ("act", "kv")
        assert act.num_tokens.tolist() == [min(split, n) for n in step.context.tolist()]
        assert (act.num_tokens + kv.num_tokens).tolist() == step.context.tolist()
        counts = counts_of(step, wave)
        assert counts.blocks[StoredCopy(kind, "act", "host")] == sum(math.ceil(n / 16) for n in act.num_tokens.tolist())
        works = works_of(wave, step)
        assert works["load_act"].link_bytes == counts.blocks[StoredCopy(kind, "act", "host")] * 16 * 64 * P
        rows = sum(math.ceil(n / 16) for n in act.num_tokens.tolist()) * 16  # none of them padding of another request
        assert works["kv_gen"].tokens == rows
        assert {store.representation for store in step.stores} == {"act", "kv"}  # a new token goes to both


# --- selections -------------------------------------------------------------------------------------------------------


def speculative(**changes) -> Selection:
    fields = dict(alpha=4.0, partial_ratio=0.3, max_fraction=0.2, pool=1.0, victim="lru", partial_keys="device")
    return Selection("speculative", **(fields | changes))


def test_selected_tokens_are_infinigens_and_never_more_than_the_share():
    wide = speculative(max_fraction=1.0)
    assert [int(selected_tokens(wide, n)) for n in (512, 1024, 1536, 2048)] == [37, 60, 66, 73]
    for context in range(1, 3000, 37):
        assert selected_tokens(speculative(max_fraction=0.05), context) <= math.ceil(0.05 * context)
        assert selected_tokens(wide, context) <= selected_tokens(wide, context + 37)


def test_alpha_says_how_many_tokens_are_selected():
    """Measured counts of a model are interpolated. A model without counts has OPT-13B's at alpha 4, which grow with
    alpha like opt-stdlib-deep's (6.947, 89.06 and 307.1 of 1,984 tokens at alpha 1, 4 and 9)."""

    def tokens(alpha: float, context: int, model: str = "") -> int:
        return int(selected_tokens(speculative(alpha=alpha, max_fraction=1.0), context, model))

    assert [tokens(alpha, 2048) for alpha in (1.0, 4.0, 9.0)] == [math.ceil(73 * 6.947 / 89.06), 73, 252]
    assert tokens(5.0, 620, "opt-stdlib-4m") == 47 and tokens(5.5, 620, "opt-stdlib-4m") == 54
    assert tokens(0.0, 2048) == tokens(0.0, 620, "opt-stdlib-4m") == 1  # the largest is always there
    counts = [tokens(alpha, 2048) for alpha in np.linspace(0, 30, 61)]
    assert counts == sorted(counts) and counts[-1] > counts[20]


def test_a_selection_loads_rows_behind_the_whole_layers():
    wave = wave_of(Policy(selection=speculative(max_fraction=0.05)), [100, 90], [3, 3])
    step = make_step(wave, 2, 0, np.arange(2))
    first, rest = works_of(wave, step, whole=True), works_of(wave, step)
    context = int(step.context.max())
    rows = 2 * math.ceil(0.05 * context)
    assert first["load_kv"].link_bytes == sum(math.ceil(n / 16) for n in step.context.tolist()) * 16 * 2 * 64 * P
    assert "gather" not in first and first["attend"].tokens == 2 * (context + 1)
    assert rest["gather"].tokens == rows and rest["load_kv"].link_bytes == rows * 2 * 64 * P
    assert rest["attend"].tokens == rows + 2
    assert rest["store_index"].link_bytes == 4 * rows * SHAPE.num_kv_heads
    assert "load_keys" not in rest
    keys = works_of(wave_of(Policy(selection=speculative(partial_keys="host")), [100, 90], [3, 3]), step)["load_keys"]
    assert keys.link_bytes == 2 * context * 5 / 16 * 64 * P  # whole columns: 4.8 of the 16 of a head


@given(st.floats(0.05, 1.0), st.integers(1, 300), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_heavy_hitters_keep_a_share_of_the_prompt(budget, prompt, generated):
    """The share is at least one block, in whole blocks. A kept token replaces a dropped one; no place is written twice
    in an iteration."""
    selection = Selection("heavy_hitter", budget=budget)
    wave = wave_of(Policy(selection=selection), [prompt], [generated])
    most = max(16, 16 * math.ceil(budget * prompt / 16))
    written = set()
    for _, step in steps_of(wave):
        kept = min(most, int(step.context[0]))
        assert int(kept_tokens(selection, prompt, step.context[0], prompt + generated - 1)) == kept
        assert sum(int(segment.num_tokens[0]) for segment in step.segments) == kept
        for store in step.stores:
            places = list(zip(store.blocks.tolist(), store.offsets.tolist()))
            assert len(set(places)) == len(places)
            written |= set(places)
        assert len(written) == min(most, int(step.context[0] + step.new_tokens[0]))
    assert all(block < wave.pool_blocks["kv@host"] for block, _ in written)


# --- disk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kv@disk", "act@disk", "both(kv@disk,act@disk)"])
@pytest.mark.parametrize("bits", [Bits(), Bits(kv=4, act=8)])
def test_what_lies_on_the_disk_is_read_as_often_as_it_is_loaded(kind, bits):
    wave = wave_of(Policy(cache={kind: 0.5, "kv@host": 0.5}, bits=bits), [70, 33], [4, 4], hardware=machine(1e-13))
    stored = wave.stored
    token = {"kv": 2 * 64 * stored.kv, "act": 64 * stored.act}
    for _, step in steps_of(wave):
        works = works_of(wave, step)
        for representation in ("kv", "act"):
            on_disk = [s for s in step.of(representation) if s.tier == "disk"]
            blocks = sum(int(segment.num_blocks.sum()) for segment in on_disk)
            read = works.get(f"read_{representation}")
            assert (read.link_bytes if read else 0) == blocks * 16 * token[representation]
            others = sum(int(s.num_blocks.sum()) for s in step.of(representation) if s.tier == "host")
            load = works.get(f"load_{representation}")
            assert (load.link_bytes if load else 0) == (blocks + others) * 16 * token[representation]
            rows = sum(len(s.rows) for s in step.stores if (s.representation, s.tier) == (representation, "disk"))
            written = works.get(f"write_{representation}")
            assert (written.link_bytes if written else 0) == rows * token[representation]


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 30), st.sampled_from([64, 128, 256]))
def test_slices_of_a_layer_cover_its_streamed_bytes_in_whole_pages(first, second, mini_batches, hidden):
    """Slices from host and disk cover each byte once, as evenly as pages allow."""
    low, high = sorted((first, second))
    weights = Placement(device=low, host=high - low, disk=1.0 - high)
    shape = ModelShape("tiny", "opt", 2, hidden, 4, 4, hidden // 4, 2 * hidden, 128, 4096)
    wave = wave_of(Policy(weights=weights, max_mini_batch_tokens=17), [10] * mini_batches, [2] * mini_batches, shape)
    (placed,) = wave.placed
    streamed, total = (placed.streamed_from, placed.disk_from), placed.layout.total_bytes
    slices = [
        task.payload for task in stream(wave) if task.verb == "load_weights" and (task.iteration, task.layer) == (1, 1)
    ]
    for start, end, pieces in (
        (*streamed, [(s.start, s.end) for s in slices if s.end > s.start]),
        (streamed[1], total, [(s.disk_start, s.disk_end) for s in slices if s.disk_end > s.disk_start]),
    ):
        assert sum(hi - lo for lo, hi in pieces) == end - start
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:]))
        assert all((lo - start) % PAGE_BYTES == 0 for lo, _ in pieces)
        pages = [-(-(hi - lo) // PAGE_BYTES) for lo, hi in pieces]
        assert len(pages) == min(mini_batches, -(-(end - start) // PAGE_BYTES))
        assert not pages or max(pages) - min(pages) <= 1


def test_mini_batches_of_equal_lengths_are_sized_once(monkeypatch):
    """A long file of similar requests is planned in the time of its distinct mini-batches."""
    workload = Workload(np.repeat([40, 40, 90], [16, 16, 4]), np.repeat([5, 9, 9], [16, 16, 4]))
    policy = Policy(cache={"kv@host": 0.5, "act@host": 0.5}, max_mini_batch_tokens=4 * 64, packing="fifo")
    wave = admit(Problem(shape=TOY, dtype="float32"), policy, workload)
    alone = [next(buffer_sizes.mini_batch_sizes(wave, [group])) for group in wave.mini_batches]
    sized = []
    monkeypatch.setattr(buffer_sizes, "_reads", lambda *of, reads=buffer_sizes._reads: sized.append(of) or reads(*of))
    assert [(sizes.plain(), chunks) for sizes, chunks in buffer_sizes.mini_batch_sizes(wave)] == [
        (sizes.plain(), chunks) for sizes, chunks in alone
    ]
    different = {tuple(zip(workload.prompt_tokens[g], workload.max_tokens[g], strict=True)) for g in wave.mini_batches}
    assert len(sized) == len(different) < len(wave.mini_batches)
