"""Test attention that reads keys and values in place against a softmax over contiguous keys."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from oracles.contexts import POLICIES, hidden_at_random, laid_out, plain_attention, seen_by
from toy_machine import machine

from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.llm import LLM
from flexhybrid.runtime.kernels import in_place
from flexhybrid.runtime.kernels.attention import Extent, ScoreRule
from flexhybrid.sampling_params import SamplingParams

pytest.importorskip("numba", reason="numba is not installed")
from flexhybrid.runtime.kernels.compiled.attention import KINDS  # noqa: E402


@st.composite
def contexts(draw):
    """Draw (batch, groups, queries per group, head size, tokens of each request in each part, seed)."""
    batch, groups, queries = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    lengths = st.lists(st.sampled_from([0, 1, 15, 16, 40, 300]), min_size=batch, max_size=batch)
    parts = [*draw(st.lists(lengths, max_size=2)), [1] * batch]  # the new token is never missing
    return batch, groups, queries, draw(st.sampled_from([4, 6, 32, 80])), parts, draw(st.integers(0, 2**16))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@given(
    case=contexts(),
    threads=st.integers(1, 3),
    hides=st.booleans(),
    scaling=st.sampled_from((0.1, 0.3)),
    way=st.sampled_from(("kernels", "torch", "softcap")),
)
def test_it_is_a_softmax_over_all_parts_of_each_context(dtype, case, threads, hides, scaling, way):
    """A window may hide the first tokens of some blocks, or all of them."""
    batch, groups, queries, d, part_tokens, seed = case
    generator = torch.Generator().manual_seed(seed)
    pieces = [
        laid_out(generator, dtype, groups, d, tokens, head_major=index % 2 == 0)
        for index, tokens in enumerate(part_tokens)
    ]
    if hides:  # but never the new token
        for index, (contexts, extent, memory) in enumerate(pieces[:-1]):
            pieces[index] = contexts, hidden_at_random(generator, extent), memory
    query = torch.randn(batch, groups * queries, d, generator=generator).to(dtype)
    totals = np.sum(part_tokens, axis=0)
    rule = ScoreRule(scaling, 1.5 if way == "softcap" else None)
    layout = in_place.layout_of([extent for _, extent, _ in pieces], groups, 1, by_kernels=way == "kernels")
    bounds = in_place.bounds_of(
        totals, groups, threads, in_place.SHARED_PRODUCTS
    )  # as if there were enough work for several threads
    memories = [memory for _, _, memory in pieces]
    with patch.object(in_place, "WIDENED_ELEMENTS", 2000), ThreadPoolExecutor(threads) as pool, torch.inference_mode():
        attended = layout._replace(bounds=bounds, share=pool.map).attend(query, memories, rule)
    assert attended.dtype == dtype
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for request in range(batch):
        expected, _ = plain_attention(query[request], seen_by(pieces, request), rule)
        torch.testing.assert_close(attended[request].double(), expected.flatten(), atol=close, rtol=close)


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 5), st.integers(1, 2048)
)
def test_no_thread_has_more_than_its_part_and_an_item(tokens, groups, threads, width):
    bounds = in_place.bounds_of(np.array(tokens), groups, threads, width)
    assert bounds[0] == 0 and bounds[-1] == len(tokens) * groups and bounds == sorted(set(bounds))
    if threads == 1 or sum(tokens) * groups * width < in_place.SHARED_PRODUCTS:
        assert len(bounds) == 2
        return
    of_item = np.repeat(tokens, groups)
    for first, end in zip(bounds, bounds[1:], strict=False):
        assert of_item[first:end].sum() <= of_item.sum() / threads + of_item.max()


@pytest.mark.parametrize("name", POLICIES)
def test_it_gives_the_tokens_of_assembled_contexts(tiny, name, monkeypatch, tmp_path):
    """Each representation and tier is used, by requests of different lengths in one mini-batch."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 60, length).tolist() for length in (1, 15, 16, 40)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for attention in ("", "fused"):
        monkeypatch.setenv("FLEXHYBRID_ATTENTION", attention)
        with LLM(tiny, POLICIES[name], device="cpu", dtype="float32", hardware=machine(), disk_dir=tmp_path) as llm:
            assert llm.problem.attends_in_place == (attention == "")
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        answers.append([output.outputs[0].token_ids for output in outputs if output])
    assert answers[0] == answers[1]


def wrong(array, at, value):
    changed = array.copy()
    changed[at] = value
    return changed


#: {argument: what it is replaced by}, each of which would let the kernel leave its memory or take it for another type.
WRONG: dict[str, list[dict[str, Any]]] = {
    "blocks": [{"blocks": lambda x: wrong(x, (0, 0), -1)}, {"blocks": lambda x: x.astype(float)}],
    "tokens": [
        {"tokens": lambda x: wrong(x, 1, -1)},
        {"tokens": lambda x: wrong(x, 0, 33)},
        {"tokens": lambda x: x.astype(np.float32)},
    ],
    "hidden": [{"hidden": lambda x: np.full((2, 2), 17)}, {"hidden": lambda x: np.full((2, 2), -1)}],
    "shapes": [{"tokens": lambda x: x[:1]}, {"hidden": lambda x: np.zeros((2, 1), int)}],
    "strides": [{"token_stride": lambda x: -x}, {"head_stride": lambda x: -x}, {"values": lambda x: -1}],
    "query": [
        {"query": lambda x: x[:1]},
        {"query": torch.Tensor.double},
        {"query": torch.Tensor.long},
        {"query": lambda x: x[:, :3]},
        {"query": lambda x: x.to("meta")},
    ],
    "memories": [
        {"memories": lambda x: [x[0][:-1]]},
        {"memories": lambda x: [x[0].double()]},
        {"memories": lambda x: [x[0].half()[:2]]},
        {"memories": lambda x: [x[0].transpose(1, 2)]},
        {"memories": lambda x: [*x, *x]},
        {"memories": lambda x: [x[0].to("meta")]},
        {"blocks": lambda x: wrong(x, (1, 1), x.max() + 1)},
        {"head_stride": lambda x: x + 1},
        {"values": lambda x: x * 2},
    ],
    "bounds": [{"bounds": lambda x: [0, 5]}, {"bounds": lambda x: [-1, 4]}, {"bounds": lambda x: [0, 3]}],
}


@pytest.mark.parametrize("argument", WRONG)
def test_no_kernel_is_given_addresses_outside_its_memory(argument):
    groups, d = 2, 8
    pool = torch.zeros(3, 2, groups, BLOCK_TOKENS, d)
    blocks = np.array([[0, 1], [1, 2]]) * (2 * groups * BLOCK_TOKENS * d)
    right = {"blocks": blocks, "tokens": np.array([17, 32]), "token_stride": d, "head_stride": BLOCK_TOKENS * d}
    right |= {"values": groups * BLOCK_TOKENS * d, "hidden": None}
    right |= {"query": torch.ones(2, 4, d), "memories": [pool], "bounds": [0, 4]}

    def attend(given):
        extent = Extent(**{name: given[name] for name in Extent._fields})
        layout = in_place.layout_of([extent], groups, 1)._replace(bounds=given["bounds"])
        return layout.attend(given["query"], given["memories"], ScoreRule(d**-0.5))

    assert (attend(right) == 0).all()
    for change in WRONG[argument]:
        ((name, made),) = change.items()
        with pytest.raises(ValueError, match=f"attend_items: {argument}: "):
            attend(right | {name: made(right[name])})
