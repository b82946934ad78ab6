"""Test shared beginnings of prompts, found from their texts, against the tree of their token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flexhybrid.batch import beginnings
from flexhybrid.batch.beginnings import Beginnings
from flexhybrid.batch.openai import Draft
from flexhybrid.core.context.prefixes import PromptTree
from flexhybrid.core.workload import Workload
from flexhybrid.requests import RequestCodec, load_tokenizer
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.sampling_params import SamplingParams

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "experiments/checkpoints/opt-stdlib-2k"


def texts_that_begin_alike(rng: np.random.Generator, count: int) -> list[str]:
    """Draw texts that extend one another's beginnings, cut at any character."""
    words = (ROOT / "flexhybrid/shipped/held_out.txt").read_text().split()[:4000]

    def some(most: int) -> str:
        begin, size = rng.integers(len(words) - most), rng.integers(1, most)
        return " ".join(words[begin : begin + size])

    texts = [some(90)]
    while len(texts) < count:
        begin = texts[rng.integers(len(texts))]
        if rng.random() < 0.7:
            begin = begin[: rng.integers(len(begin) + 1)]
        texts.append(f"{begin} {some(40)}"[:2400])
    return [texts[i] for i in rng.permutation(count)]


def found_in(drafts: list[Draft], chunk: int, codec: RequestCodec) -> tuple[list[int], np.ndarray]:
    """Return for each prompt the number of its shared beginning and the tokens in it."""

    def count(some: list[Draft]) -> list[int]:
        return [int(str(size)) for size in codec.count_all([(draft.prompt, draft.params) for draft in some])]

    found = Beginnings(count)
    numbers = [n for first in range(0, len(drafts), chunk) for n in found.find(drafts[first : first + chunk])]
    lengths = Workload(np.array(count(drafts)), np.ones(len(drafts), int), None, found.prefixes(np.array(numbers)))
    return numbers, lengths.shared_tokens


def drafts_of(prompts: list) -> list[Draft]:
    return [Draft("", prompt, SamplingParams(), "m", "/v1/completions") for prompt in prompts]


def test_beginnings_of_texts_are_those_of_their_tokens():
    codec = RequestCodec(Checkpoint(MODEL).shape, Path(MODEL), load_tokenizer(Path(MODEL)))
    for seed in range(2):
        prompts = texts_that_begin_alike(np.random.default_rng(seed), 60)
        ids = [codec.check(prompt, SamplingParams()) for prompt in prompts]
        tree = PromptTree(ids.__getitem__)
        for request in range(60):
            tree.path(request)
        exact = np.array([16 * len(tree.shared(request)) for request in range(60)])
        for of in (prompts, ids):
            numbers, shared = found_in(drafts_of(of), 60, codec)
            assert (shared <= exact).all()  # a word less than what is alike is found, seldom a block
            assert shared.sum() >= 0.9 * exact.sum()
            for request in range(60):  # those whose beginnings are one do begin alike
                others = [i for i in range(60) if numbers[request] >= 0 and numbers[i] == numbers[request]]
                tokens = int(shared[request])
                assert all(ids[i][:tokens] == ids[request][:tokens] for i in others)


def test_later_chunks_share_beginnings_of_earlier_ones(monkeypatch):
    system, rng = list(range(100)), np.random.default_rng(0)
    prompts = [[*system, *rng.integers(200, 900, 20).tolist()] for _ in range(12)]
    prompts += [[*range(300, 360), n] for n in range(3)] + [[n, *system] for n in range(3)]
    codec = RequestCodec(Checkpoint(MODEL).shape, Path(MODEL), None)
    of_request = found_in(drafts_of(prompts), 3, codec)[0]
    assert of_request == [0] * 12 + [1] * 3 + [-1] * 3
    monkeypatch.setattr(beginnings, "KEPT", 0)
    assert found_in(drafts_of(prompts), 3, codec)[0][:6] == [0] * 3 + [1] * 3
