"""Test memory read from the tasks of a run against the executor's plan and the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles.replay import BY_DEFINITION, peak_parts
from random_cases import UniformCase, small_cases

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.core.context.packing import num_chunks
from flexhybrid.core.memory import memory_plan, total_bytes
from flexhybrid.core.model.attention import AttentionKind
from flexhybrid.core.plan import stream
from flexhybrid.core.problem import attends_in_place
from flexhybrid.core.schedule.buffer_sizes import buffer_sizes
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from sim.array_clock import predict


def plan_of(case: UniformCase, wave) -> dict[str, dict[str, int]]:
    return memory_plan(case.problem, case.policy, buffer_sizes(wave))


def differences(replayed: dict, planned: dict) -> dict[tuple[str, str], int]:
    """Return (tier, part) -> bytes of the plan less those of the replay, if they differ beyond rounding. Assert that
    tasks moved at least four parts."""
    found = {}
    moved = {(tier, part) for tier, parts in replayed.items() for part in parts if part not in BY_DEFINITION}
    assert len(moved) >= 4, moved
    for tier in planned:
        for part in {**planned[tier], **replayed[tier]}:
            beyond = planned[tier].get(part, 0) - replayed[tier].get(part, 0)
            if abs(beyond) > 2:
                found[tier, part] = beyond
    return found


def test_replayed_peaks_are_the_plans_and_the_closed_forms_for_like_requests():
    seen = set()
    for case in small_cases(33, 21, 120):
        wave = case.wave()
        parts = peak_parts(stream(wave), wave)
        assert differences(parts, plan_of(case, wave)) == {}, case
        closed = predict(case.problem, case.candidate, walk=False).row()
        assert closed["peak_bytes"] == pytest.approx(total_bytes(parts), rel=1e-6, abs=40), case
        seen |= {(tier, part) for tier in parts for part in parts[tier]}
    # the cases were not all of one sort: nearly every part that the plan knows was replayed in some of them
    assert len({part for _, part in seen} - set(BY_DEFINITION)) >= 18


def test_attention_in_place_needs_no_attention_buffer():
    """Prompts computed in chunks do need one."""
    without = with_pieces = 0
    for index, case in enumerate(small_cases(21, 26, 120)):
        device = ("cpu", "cuda")[index % 2]
        case = replace(case, hardware=replace(case.hardware, device=device, attends_in_place=True))
        if index % 3 == 0:
            policy = replace(case.policy, max_mini_batch_tokens=96)
            case = replace(case, policy=policy, batch=1, prompt_tokens=max(150, case.prompt_tokens))
        if not attends_in_place(case.problem, case.policy):
            continue
        wave = case.wave()
        parts, planned = peak_parts(stream(wave), wave), plan_of(case, wave)
        assert {"attention buffer", "KV buffers"}.isdisjoint(part for _, part in differences(parts, planned)), case
        in_pieces = num_chunks(case.policy, wave.workload.prompt_tokens[wave.mini_batches[0]]) > 1
        closed = predict(case.problem, case.candidate, walk=False).row()
        close = 0.05 if in_pieces else 1e-6  # a last piece may be a small one
        assert closed["peak_bytes"] == pytest.approx(total_bytes(planned), rel=close, abs=40), case
        assert ("attention buffer" in planned["device"]) == in_pieces, case
        assert ("attention sums" in planned["device"]) == (device == "cuda")
        without, with_pieces = without + (not in_pieces), with_pieces + in_pieces
    assert without >= 6 and with_pieces >= 2


def test_requests_of_many_lengths_have_room_and_at_most_a_block_each_too_much():
    rng = np.random.default_rng(22)
    for case in small_cases(15, 22, 120):
        lengths = (rng.integers(1, most + 1, case.batch) for most in (case.prompt_tokens, case.max_tokens))
        workload = Workload(*lengths)
        wave = admit(case.problem, case.policy, workload)
        block = BLOCK_TOKENS * max(
            case.shape.kv_token_bytes(case.bytes_per_element), case.shape.act_token_bytes(case.bytes_per_element)
        )
        for where, beyond in differences(peak_parts(stream(wave), wave), plan_of(case, wave)).items():
            assert 0 < beyond <= block * case.batch, (case, where)


def test_layers_with_windows_need_what_was_planned():
    """A ring of blocks fits a window at any start: a short run leaves one block of each entry unused."""
    rng, kinds, exact = np.random.default_rng(25), set(), 0
    for case in small_cases(21, 25, 120):
        if case.policy.selection.method != "none":
            continue
        windows = [(17,), (48, None), (16, 16, None), (33, 70)][rng.integers(4)]
        case = replace(case, shape=replace(case.shape, attention=tuple(map(AttentionKind, windows))))
        wave = case.wave()
        planned, kinds = plan_of(case, wave), kinds | {windows}
        closed = predict(case.problem, case.candidate, walk=False).row()
        assert closed["peak_bytes"] == pytest.approx(total_bytes(planned), rel=1e-6, abs=40), case
        rows = {"kv": wave.shape.kv_token_bytes(wave.stored.kv), "act": wave.shape.act_token_bytes(wave.stored.act)}
        beyond = differences(peak_parts(stream(wave), wave), planned)
        for (_, part), size in beyond.items():
            block = BLOCK_TOKENS * rows[part.removesuffix(" pool")]
            assert 0 < size <= block * case.batch * case.shape.num_layers * len(case.policy.cache), (case, part)
        exact += not beyond
    assert len(kinds) == 4 and exact >= 7
