"""The Triton kernels of decode attention against a softmax in float64, in Triton's interpreter: numpy, no GPU.

Run by test_interpreted in a process of its own: TRITON_INTERPRET must be set before triton is first imported, and a
process that interprets cannot compile.
"""

import contextlib

import numpy as np
import pytest
import torch
from interpreted import hasten
from models import save_llama
from oracles import attend_table
from oracles.contexts import hidden_at_random, laid_out, plain_attention, seen_by
from tiny_models import greedy
from toy_machine import machine

from flexhybrid import LLM, Policy, SamplingParams
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.kernels import attend_triton
from flexhybrid.runtime.kernels.attention import Extent, ScoreRule
from flexhybrid.runtime.verbs import attending_in_place

hasten(attend_triton._entries)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities and of what is not taken


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())


def check(seed: int, dtype, sizes: tuple[int, int, int], part_tokens: list[list[int]], **asked) -> None:
    """Attend with ``sizes`` (key heads, queries of each, head elements) over ``part_tokens`` in each part."""
    groups, queries, d = sizes
    generator, batch = torch.Generator().manual_seed(seed), len(part_tokens[0])
    rows = torch.randn(batch, (2 * groups + groups * queries) * d, generator=generator).to(dtype)
    own = Extent(np.arange(batch)[:, None] * rows.shape[1], np.ones(batch, np.int64), 0, d, groups * d)
    own_tokens = [row[None, : 2 * groups * d].unflatten(1, (2, groups, d)) for row in rows]
    pieces = [(own_tokens, own, rows)]
    for index, tokens in enumerate(part_tokens):
        contexts, extent, memory = laid_out(generator, dtype, groups, d, tokens, head_major=index % 2 == 0)
        if asked.get("hides"):
            extent = hidden_at_random(generator, extent)
        pieces.append((contexts, extent, memory))
    sinks = torch.randn(groups * queries, generator=generator).to(dtype) if asked.get("sinks") else None
    rule, names = ScoreRule(0.3, asked.get("softcap"), sinks), list(range(len(pieces)))
    query = rows[:, 2 * groups * d :].view(batch, groups * queries, d)
    extents, memories = [extent for _, extent, _ in pieces], [memory for _, _, memory in pieces]
    table = attend_triton.table_of(extents, names, (groups, d), torch.from_numpy)
    sums = None if sinks is not None else torch.empty(batch, groups * queries)
    ours, _ = attend_triton._attended(query, memories, table, rule, sums, asked.get("parts"))
    by_torch = torch.empty_like(ours), None if sums is None else torch.empty_like(sums)
    attend_table.launch(query, memories, table, rule, by_torch, None)
    close = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    assert ours.dtype == (dtype if sums is None else torch.float32)
    for request in range(batch):
        expected, logarithm = plain_attention(query[request], seen_by(pieces, request), rule)
        for attended, of_sums in ((ours, sums), by_torch):
            torch.testing.assert_close(attended[request].double(), expected, **close)
            if of_sums is not None:
                torch.testing.assert_close(of_sums[request].double(), logarithm, atol=1e-4, rtol=1e-4)


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LENGTHS = [[150, 0, 17], [15, 33, 0]]
CASES = {
    "one query": (F32, (2, 1, 16), LENGTHS, {}),
    "one query, three parts": (F32, (3, 1, 24), LENGTHS, {"parts": 3, "hides": True}),
    "groups": (F32, (2, 3, 16), LENGTHS, {"hides": True}),
    "groups, more parts than blocks": (F32, (1, 4, 20), [[40, 1]], {"parts": 7}),
    "many queries": (F32, (1, 70, 16), [[40]], {"parts": 2}),
    "softcap": (F32, (2, 2, 16), LENGTHS, {"softcap": 1.5, "hides": True}),
    "softcap, one query, parts": (F32, (2, 1, 16), LENGTHS, {"softcap": 1.5, "parts": 2}),
    "sinks": (F32, (2, 2, 16), LENGTHS, {"sinks": True}),
    "sinks, parts": (F32, (2, 3, 16), LENGTHS, {"sinks": True, "parts": 3, "hides": True}),
    "wide heads, several tiles": (F32, (2, 18, 256), [[20, 3]], {"parts": 2}),
    "odd heads": (F32, (2, 1, 6), LENGTHS, {"hides": True}),
    "bfloat16": (BF16, (2, 4, 32), LENGTHS, {"hides": True}),
    "bfloat16, one query, parts": (BF16, (2, 1, 32), LENGTHS, {"parts": 2}),
    "bfloat16, sinks, parts": (BF16, (2, 2, 16), LENGTHS, {"sinks": True, "parts": 2}),
    "float16": (F16, (1, 5, 40), [[130, 3]], {"parts": 2, "softcap": 20.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_softmax_over_all_parts_of_each_context(name):
    dtype, sizes, part_tokens, asked = CASES[name]
    check(len(name), dtype, sizes, part_tokens, **asked)


def test_a_query_that_sees_nothing_gets_zeros():
    """A shared part may lie before a request's window."""
    pool = torch.randn(2, 2, 1, BLOCK_TOKENS, 16)
    hidden, query = np.array([[16, 16]]), torch.randn(1, 3, 16)
    extent = Extent(np.array([[0, 512]]), np.array([32]), 16, 256, 256, hidden)
    table = attend_triton.table_of([extent], ["pool"], (1, 16), torch.from_numpy)
    for parts in (1, 2):
        attended, sums = table.attend_and_sum(query, [pool], ScoreRule(0.25), parts)
        assert not attended.any() and (sums == -torch.inf).all()


def test_a_nan_spreads_only_to_queries_that_see_it():
    generator = torch.Generator().manual_seed(1)
    contexts, extent, memory = laid_out(generator, F32, 1, 16, [20, 20], head_major=True)
    table = attend_triton.table_of([extent], ["pool"], (1, 16), torch.from_numpy)
    query, rule = torch.randn(2, 2, 16, generator=generator), ScoreRule(0.25)
    assert table.attend(query, [memory], rule).isfinite().all()
    first = int(extent.blocks[0, 0]) // (2 * 16 * BLOCK_TOKENS)
    memory[first, 0, 0, 3, 5] = torch.nan
    attended = table.attend(query, [memory], rule)
    assert attended[0].isnan().all() and attended[1].isfinite().all()


def test_the_proof_is_passed_and_finds_other_results(monkeypatch):
    for dtype, queries, d in ((F32, 1, 16), (BF16, 4, 24)):
        attend_triton.prove(torch.device("cpu"), dtype, queries, d)
    launch = attend_triton.launch

    def other(query, memories, table, *others):
        launch(query, memories, table._replace(kinds=table.kinds & ~(31 << 8)), *others)  # nothing is hidden

    monkeypatch.setattr(attend_triton, "launch", other)
    with pytest.raises(RuntimeError, match="differ by"):
        attend_triton.prove(torch.device("cpu"), F32, 1, 16)


@pytest.mark.parametrize(
    "cache",
    [{"kv@host": 0.25, "kv@device": 0.25, "act@device": 0.25, "act@host": 0.25}, {"tok": 0.6, "kv@device": 0.4}],
    ids=str,
)
def test_a_run_by_the_kernels_gives_transformers_tokens(tmp_path, monkeypatch, cache):
    """All tiers and representations are used, with grouped queries, a window in the second layer and a recomputed
    prefix."""
    model = save_llama(
        tmp_path, kind="mistral", sliding_window=20, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=32
    )
    prompts = [[5, 9, 11], list(range(3, 40))]
    launches, launch = [], attend_triton.launch
    monkeypatch.setattr(attending_in_place, "by_numba", lambda state: False)
    monkeypatch.setattr(attend_triton, "launch", lambda *args: (launches.append(args[5] is None), launch(*args)))
    monkeypatch.setitem(attend_triton.SPLITS, False, (1024, 2))  # so that some contexts are read in parts
    policy = Policy(cache=cache)
    with LLM(tmp_path, policy, device="cpu", dtype="float32", hardware=machine()) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [answer.outputs[0].token_ids for answer in answers] == greedy(model, prompts, 4)
    assert len(launches) == 2 * 3
