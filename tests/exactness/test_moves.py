"""Test requests that move to the next batch under another policy: they keep their tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from shutil import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import InMemory, save_drawn
from policies import wider_policies
from runs import answered, lines_of
from strategies import model_shapes, sharing_policies
from tiny_models import save_tiny
from toy_machine import machine

from flexhybrid import LLM, Policy, SamplingParams, shipped
from flexhybrid.core.policy import Placement
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.exactness import compare_tokens
from flexhybrid.jobs.progress import StopAsked
from flexhybrid.jobs.run.answering import answer_pending
from flexhybrid.jobs.run.lines import JobLines


class Lines:
    """``PendingRequests`` of greedy answers, whose batches end every ``period`` iterations."""

    def __init__(self, llm, prompts, max_tokens, policies, period):
        self.llm, self.prompts, self.max_tokens, self.policies = llm, prompts, np.array(max_tokens), cycle(policies)
        self.period, self.iterations, self.num_moves, self.num_tokens = period, 0, 0, 0
        self.tokens: list = [None] * len(prompts)
        self.check_input_unchanged = self.begins = lambda *_: None
        self.watch, self.drains, self.lengths = lambda *_: None, lambda: False, None

    def pending(self):
        return np.array([i for i, tokens in enumerate(self.tokens) if tokens is None], dtype=np.int64)

    def workload(self, places):
        return Workload(np.array([len(self.prompts[place]) for place in places]), self.max_tokens[places])

    def num_answers(self, places):
        return np.ones(len(places), np.int64)

    def request(self, number):
        params = SamplingParams(max_tokens=int(self.max_tokens[number - 1]), temperature=0, ignore_eos=True)
        return SimpleNamespace(token_ids=self.prompts[number - 1], params=params, custom_id=None, echo=None)

    def line(self, number, request, output):
        assert self.tokens[number - 1] is None and request.token_ids == self.prompts[number - 1], (
            "a line is answered twice"
        )
        self.tokens[number - 1] = output.outputs[0].token_ids
        return b""

    def write(self, answered):
        assert not any(one.refused for one in answered), "a line is refused"

    def advance(self, num_tokens):
        self.iterations, self.num_tokens = self.iterations + 1, self.num_tokens + num_tokens

    def moves(self):
        return self.iterations >= self.period

    def between_batches(self):
        self.num_moves, self.iterations = self.num_moves + 1, 0
        self.llm.use(next(self.policies))


@settings(max_examples=5)
@given(st.data(), st.lists(sharing_policies(), min_size=2, max_size=3))
def test_requests_that_move_from_policy_to_policy_get_the_references_tokens(tmp_path_factory, data, policies):
    seed, count = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 7))
    folder, generator = tmp_path_factory.mktemp("model"), np.random.default_rng(seed)
    shape = data.draw(model_shapes(96))
    reference = InMemory(save_drawn(folder, shape))
    prompts = [generator.integers(3, shape["vocab"], generator.integers(1, 60)).tolist() for _ in range(count)]
    if data.draw(st.booleans()):  # they begin alike
        prompts = [prompts[0][:40] + prompt[:30] for prompt in prompts]
    max_tokens = generator.integers(1, 20, count).tolist()
    places = data.draw(st.integers(1, count))
    policies = [replace(policy, max_batch=places + i) for i, policy in enumerate(policies)]
    with LLM(folder, policies[0], device="cpu", dtype="float32", hardware=machine(), disk_dir=folder) as llm:
        lines: Any = Lines(llm, prompts, max_tokens, policies[1:] + policies[:1], data.draw(st.integers(1, 6)))
        answer_pending(lines, StopAsked())
    expected = reference.answers(prompts, max_tokens, max_tokens)
    assert compare_tokens(reference, prompts, expected, lines.tokens).exact
    assert lines.num_tokens == sum(max_tokens)  # none twice


POLICIES = [
    Policy("mix", weights=Placement(host=1), cache={"kv@host": 0.5, "act@host": 0.5}, max_batch=4),
    replace(wider_policies(400, 120, 32)["disk"], max_batch=7),
    replace(wider_policies(400, 120, 32)["host attention"], max_batch=3),
]


def asked(first: int) -> list[str]:
    """Return lines with every option of a request; greedy (0) or random (1) lines come first, in turn."""
    draws = [{"temperature": 0}, {"temperature": 0.8, "seed": 5}]
    wishes = [
        {"n": 2, "temperature": 1, "logprobs": 2},
        {"frequency_penalty": 0.9, "repetition_penalty": 1.2},
        {"stop": ["self", ")"], "min_tokens": 12, "echo": True, "logprobs": 1, "prompt_logprobs": 1},
        {"logit_bias": {"40": 3}, "presence_penalty": 1.5, "bad_words": ["return self", "def"]},
    ]
    wishes += [{"guided_regex": r"(a|bc){9,16}d"}, {"guided_json": {"type": "array", "maxItems": 6}}]
    limits = [{"max_tokens": 16 + 3 * number % 14, "return_token_ids": True} for number in range(len(wishes))]
    bodies = [limits[i] | draws[(first + i) % 2] | wish for i, wish in enumerate(wishes)]
    return lines_of({str(i): {"prompt": text} | body for i, (text, body) in enumerate(zip(shipped.prompts(), bodies))})


def logprobs(choices) -> list[float]:
    return [value for one in choices if one["logprobs"] for value in one["logprobs"]["token_logprobs"] if value]


def with_tokenizer(folder: Path, kind: str) -> Path:
    """Save a tiny model of a type with the shipped model's vocabulary."""
    pytest.importorskip("greenlet")
    own = json.loads((shipped.CHECKPOINT / "config.json").read_text())
    save_tiny(folder, kind, vocab_size=own["vocab_size"], max_position_embeddings=512)
    for file in shipped.CHECKPOINT.glob("tokenizer*"):
        copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("kind", ["shipped", "falcon_h1"])
def test_a_moving_request_keeps_all_its_options(tmp_path, monkeypatch, kind):
    """Options are seeds, penalties, stop texts, grammars, log probabilities and several answers. The job is killed and
    resumed meanwhile."""
    pytest.importorskip("llguidance")
    model = shipped.CHECKPOINT if kind == "shipped" else with_tokenizer(tmp_path / kind, kind)
    lines, plain, out = asked(first=kind == "shipped"), tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    out.mkdir()
    expected = answered(plain, model, lines, "--max-num-seqs", "5")
    advance, told = JobLines.advance, {"iterations": 0, "moves": 0}
    policies = cycle(POLICIES)

    def heard(self, count):
        advance(self, count)
        told["iterations"] += 1
        if told["iterations"] == 20:
            raise SystemExit

    def between(self):
        told["moves"] += 1
        self.llm.use(next(policies))

    monkeypatch.setattr(JobLines, "advance", heard)
    monkeypatch.setattr(JobLines, "moves", lambda self: told["iterations"] // 6 > told["moves"])
    monkeypatch.setattr(JobLines, "between_batches", between)
    with pytest.raises(SystemExit):
        answered(out, model, lines, "--max-num-seqs", "5")
    assert 0 < len((out / "out.jsonl").read_bytes().splitlines()) < len(expected)
    given = answered(out, model, lines, "--max-num-seqs", "5")
    assert told["moves"] > 5 and given.keys() == expected.keys()
    for name, body in given.items():
        choices, others = body["choices"], expected[name]["choices"]
        for choice, other in zip(choices, others, strict=True):
            assert all(choice[of] == other[of] for of in ("token_ids", "text", "finish_reason"))
        assert logprobs(choices) == pytest.approx(logprobs(others), abs=2e-4)
