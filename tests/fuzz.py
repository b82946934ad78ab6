"""Random cases against oracles that share no code with what they judge: ``make fuzz``, and a short round in the suite.

    tokens      transformers' greedy generate, for random models under random lossless policies
    sampling    transformers' logits warpers: what may be drawn, and how often; a request alone draws the same
    selections  plain accounts of H2O and InfiniGen, token by token and head by head
    search      random policies of the same space: none that fits is predicted to be faster
    clocks      the virtual clock, for the array clock's seconds of random policies on random machines
    cascade     each request walked by itself through the thresholds; the cost of the largest model alone
    threads     one LLM used from several threads at once
    lines       hostile lines of a run's input: no job ends, each line is answered or refused by name

An area is a function and a strategy. Rounds go through the areas with seeds of their own until the time is over; a case
that fails is shrunk by hypothesis, printed with the command that repeats its round, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from models import InMemory, save_drawn, save_opt, save_text_model
from oracles.heavy_hitters import plain_h2o
from oracles.speculative import plain_tokens
from oracles.walks import walked
from oracles.warpers import warped
from random_cases import compare, random_case
from runs import run_wave
from scipy import stats
from strategies import calibrated_answers, llama_shapes, lossless_policies, opt_shapes
from toy_machine import MIB, SHAPE, machine
from transformers.utils.logging import disable_progress_bar

from flexhybrid import LLM, SamplingParams, cli
from flexhybrid.batch.openai import Refused
from flexhybrid.batch.requests import LineReader, LineRules
from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.fit import Fitted
from flexhybrid.cascade.thresholds.search import SearchOptions
from flexhybrid.cascade.thresholds.search import search as search_cascade
from flexhybrid.core.admission import wave_plan
from flexhybrid.core.errors import InputError
from flexhybrid.core.memory import fits
from flexhybrid.core.policy import Placement, Policy, Selection
from flexhybrid.core.problem import Budgets, Problem
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.compare.exactness import compare_tokens
from flexhybrid.runtime.storage.loader import Checkpoint
from policy_search.search import MODEL_ERROR, SearchSettings, search
from policy_search.search_problem import FULL, LOSSLESS, PLAIN, Option
from sim.simulate import simulate

SHARES = st.sampled_from((0.1, 0.25, 0.5, 0.8, 1.0))
LONGEST_TEXT = 96  #: tokens of prompt and answer in the areas with models of their own


def random_prompts(draw, vocab: int, longest: int, most: int = 6) -> list[list[int]]:
    """Draw prompts of one to ``longest`` tokens without special tokens."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=most))
    generator = np.random.default_rng(draw(st.integers(0, 10**6)))
    return [generator.integers(3, vocab, length).tolist() for length in lengths]


# ---- tokens


@st.composite
def token_cases(draw) -> dict:
    shape = draw(st.one_of(opt_shapes(), llama_shapes()))
    max_tokens = draw(st.integers(1, 20))
    return {
        "shape": shape,
        "prompts": random_prompts(draw, shape["vocab"], shape["positions"] - max_tokens),
        "max_tokens": max_tokens,
        "policy": replace(draw(lossless_policies()), max_batch=draw(st.sampled_from((None, None, 2)))),
        "ignore_eos": draw(st.booleans()),
    }


def check_tokens(case: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        reference = InMemory(save_drawn(folder, case["shape"]))
        expected = reference.generate(case["prompts"], case["max_tokens"], case["ignore_eos"])
        params = SamplingParams(max_tokens=case["max_tokens"], temperature=0.0, ignore_eos=case["ignore_eos"])
        with LLM(folder, case["policy"], device="cpu", dtype="float32", disk_dir=folder, hardware=machine()) as llm:
            answers = llm.generate(case["prompts"], params)
    outcome = compare_tokens(reference, case["prompts"], expected, [a.outputs[0].token_ids for a in answers])
    assert outcome.exact, outcome.first_wrong


# ---- sampling

DRAWS = 500


@st.composite
def sampling_cases(draw) -> dict:
    return {
        "vocab": draw(st.sampled_from((11, 61, 300))),
        "prompt": draw(st.lists(st.integers(3, 10), min_size=1, max_size=20)),
        "temperature": draw(st.sampled_from((0.3, 0.8, 1.0, 2.0, 10.0))),
        "top_k": draw(st.sampled_from((0, 0, 1, 3, 50))),
        "top_p": draw(st.sampled_from((1.0, 1.0, 0.9, 0.5, 0.1))),
        "min_p": draw(st.sampled_from((0.0, 0.0, 0.05, 0.5))),
        "seed": draw(st.integers(0, 2**32)),
    }


def check_sampling(case: dict) -> None:
    limits = {name: case[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    params = [SamplingParams(max_tokens=3, seed=case["seed"] + i, ignore_eos=True, **limits) for i in range(DRAWS)]
    with tempfile.TemporaryDirectory() as folder:
        model = save_opt(folder, vocab=case["vocab"], seed=case["seed"] % 1000)
        with LLM(folder, "hybrid(0.5)", device="cpu", dtype="float32") as llm:
            answers = [a.outputs[0].token_ids for a in llm.generate([case["prompt"]] * DRAWS, params)]
            for i in (0, DRAWS - 1):
                (alone,) = llm.generate([case["prompt"]], params[i : i + 1])
                assert alone.outputs[0].token_ids == answers[i], f"request {i} draws other tokens alone"
    with torch.inference_mode():
        logits = model(torch.tensor([case["prompt"]])).logits[0, -1]
    first = np.bincount([answer[0] for answer in answers], minlength=case["vocab"])
    # Rounding may put a token on either side of top_p's edge: such a token may be drawn, and need not be.
    edges = (case["top_p"] - 1e-5, case["top_p"], min(case["top_p"] + 1e-5, 1.0))
    _, probabilities, widest = (
        torch.softmax(warped(logits, **limits | {"top_p": p}).double(), 0).numpy() for p in edges
    )
    assert not first[widest == 0].any(), f"drawn against the limits: {np.flatnonzero(first * (widest == 0))}"
    expected, often = probabilities * DRAWS, probabilities * DRAWS >= 5
    if often.sum() > 1 and np.array_equal(widest > 0, probabilities > 0):
        observed = np.append(first[often], first[~often].sum())
        expected = np.append(expected[often], expected[~often].sum())
        used = expected > 0
        pvalue = stats.chisquare(observed[used], expected[used]).pvalue
        assert pvalue > 1e-7, f"tokens are drawn as often as chance gives once in {1 / max(pvalue, 1e-300):.0e} tries"


# ---- selections


@st.composite
def selection_cases(draw) -> dict:
    family = draw(st.sampled_from(("opt", "llama")))
    shape = {"layers": draw(st.integers(2, 4)), "heads": 4, "positions": LONGEST_TEXT, "scale": 0.15}
    if family == "llama":
        shape |= {"kind": "llama", "kv_heads": draw(st.sampled_from((1, 2, 4)))}
    max_tokens = draw(st.integers(2, 24))
    prompts = random_prompts(draw, 61, LONGEST_TEXT - max_tokens, 4)
    method, tokens = draw(st.sampled_from(("heavy_hitter", "speculative"))), draw(st.sampled_from((100, 250, 8192)))
    if method == "heavy_hitter":
        host = draw(st.sampled_from((0.0, 0.4, 1.0)))
        cache = {entry: share for entry, share in (("kv@host", host), ("kv@device", 1 - host)) if share}
        whole = draw(st.sampled_from((None, 0, 1, 2, shape["layers"])))
        selection = Selection(method, budget=draw(SHARES), whole_layers=whole)
    else:
        pool = draw(st.sampled_from((0.4, 0.7, 1.0)))
        host = draw(st.sampled_from((0.6, 1.0))) if pool == 1 else 1.0
        blocks = draw(st.sampled_from((None, 5, 9, 30))) if pool == 0.4 else None
        head_dim = shape.get("head_dim", 16)
        block_bytes = shape["layers"] * 16 * 2 * shape.get("kv_heads", shape["heads"]) * head_dim * 4
        cache = {"kv@host": host} | ({"act@host": 1 - host} if host < 1 else {})
        selection = Selection(
            method, alpha=draw(st.sampled_from((0.3, 1.0, 4.0))), partial_ratio=draw(SHARES),
            max_fraction=draw(SHARES), pool=None if blocks else pool,
            pool_bytes=blocks and blocks * block_bytes, victim=draw(st.sampled_from(("fifo", "lru", "counter"))),
            partial_keys="device", whole_layers=draw(st.sampled_from((None, 1, 2, shape["layers"]))),
            columns=draw(st.sampled_from((None, "request"))),
        )  # fmt: skip
    weights = Placement(device=0.3, host=0.7)
    schedule = draw(st.sampled_from(("column", "row")))
    policy = Policy("case", weights, cache=cache, selection=selection, schedule=schedule, max_mini_batch_tokens=tokens)
    return {"shape": shape, "prompts": prompts, "max_tokens": max_tokens, "policy": policy}


def check_selections(case: dict) -> None:
    policy, prompts, max_tokens = case["policy"], case["prompts"], case["max_tokens"]
    with tempfile.TemporaryDirectory() as folder:
        save_drawn(folder, case["shape"])
        checkpoint = Checkpoint(folder)
        ours = run_wave(checkpoint, policy, prompts, max_tokens).tokens
        if policy.selection.method == "heavy_hitter":
            options = policy.selection.budget, policy.cache, policy.selection.whole_layers or 0
            plain = [plain_h2o(checkpoint, prompt, max_tokens, *options) for prompt in prompts]
        else:
            plain, _ = plain_tokens(checkpoint, policy, prompts, max_tokens)
    assert ours == plain


# ---- searches and clocks


@st.composite
def machines(draw):
    """Draw a machine on which the limiting resource depends on the policy."""
    return machine(
        link=draw(st.sampled_from((0.05, 0.3, 1.0, 5.0))),
        gflops=draw(st.sampled_from((10.0, 60.0, 400.0))),
        memory=draw(st.sampled_from((2.0, 8.0, 60.0))),
        disk=draw(st.sampled_from((0.02, 0.1, 0.5))),
    )


@st.composite
def search_cases(draw) -> dict:
    return {
        "hardware": draw(machines()),
        "budgets": Budgets(*(draw(st.sampled_from(sizes)) * MIB for sizes in ((40, 60, 200), (24, 64, 400), (256,)))),
        "space": draw(st.sampled_from((PLAIN, LOSSLESS, FULL))),
        "prompt_tokens": draw(st.integers(1, 300)),
        "max_tokens": draw(st.integers(1, 40)),
        "max_batch": draw(st.sampled_from((1, 4, 32))),
        "margin": draw(st.sampled_from((0.0, MODEL_ERROR))),
        "rivals": draw(st.integers(0, 10**6)),
    }


def random_rival(generator: np.random.Generator, problem, batch: int) -> Policy:
    """Draw a policy of the searched space: one of its options with random shares of cache and weights."""
    option: Option = problem.options[generator.integers(len(problem.options))]
    entries = ["kv@host"] if option.attention == "host" else list(problem.entries)
    entries = list(generator.choice(entries, size=min(len(entries), generator.integers(1, 4)), replace=False))
    shares = generator.dirichlet(np.ones(len(entries)))
    device, disk = (generator.choice([0.0, 1.0, generator.random()]) for _ in range(2))
    disk = min(disk * generator.integers(0, 2), 1 - device)
    weights = Placement(round(device, 6), round(1 - round(device, 6) - round(disk, 6), 6), round(disk, 6))
    policy = option.policy({entry: float(share) for entry, share in zip(entries, shares)}, weights)
    return replace(policy, max_batch=batch, max_mini_batch_tokens=int(generator.choice([1024, 4096, 16384])))


def check_search(case: dict) -> None:
    problem = Problem(shape=SHAPE, hardware=case["hardware"], budgets=case["budgets"])
    lengths = case["prompt_tokens"], case["max_tokens"]
    options = SearchSettings(max_batch=case["max_batch"], space=case["space"], margin=case["margin"])
    try:
        best = search(problem, Workload.uniform(1, *lengths), options)
    except InputError:
        return  # nothing fits: the rivals are drawn from what a search returns
    assert fits(wave_plan(problem, best.policy, Workload.uniform(best.batch, *lengths)), case["budgets"])
    assert not best.complete or best.gap >= -1e-9
    generator = np.random.default_rng(case["rivals"])
    for _ in range(40):
        batch = int(generator.integers(1, case["max_batch"] + 1))
        rival = random_rival(generator, best.problem, batch)
        try:
            if not case["space"].allows(rival) or not fits(
                wave_plan(problem, rival, Workload.uniform(batch, *lengths)), case["budgets"]
            ):
                continue
        except InputError:
            continue  # a share that no block carries
        priced = simulate(problem, rival, batch, *lengths)
        favour = 1 + (best.margin or 0)  # what fits the device stays there unless another is faster by more
        assert best.prediction["tokens_per_s"] * favour >= priced.tokens_per_s * (1 - 3e-3), (
            f"{priced.tokens_per_s:g} tokens/s instead of {best.prediction['tokens_per_s']:g}, by {rival}"
        )
        assert best.prediction["tokens_per_s"] * (1 + best.gap) >= priced.tokens_per_s * (1 - 3e-3), (
            f"unproved: {rival}"
        )


#: Kind of random case -> largest error of the array clock's total seconds. Serial chains hide no wrong wait.
CLOCK_ERRORS = {"column": 0.05, "row": 0.08, "serial": 0.15}
CLOCK_CASES = st.fixed_dictionaries({"kind": st.sampled_from(list(CLOCK_ERRORS)), "seed": st.integers(0, 10**6)})


def check_clocks(case: dict) -> None:
    array_s, virtual_s = compare(random_case(np.random.default_rng(case["seed"]), case["kind"]))
    assert abs(array_s / virtual_s - 1) <= CLOCK_ERRORS[case["kind"]], f"{array_s:g} s, virtual clock {virtual_s:g} s"


# ---- cascades

CASCADE_CASES = st.fixed_dictionaries(
    {
        "family": st.fixed_dictionaries(
            {"num_models": st.integers(2, 4), "num_requests": st.sampled_from((40, 200)), "seed": st.integers(0, 10**6)}
        ),
        "options": st.builds(
            SearchOptions,
            mode=st.sampled_from(("ap", "eo")),
            method=st.sampled_from(("exact", "exact", "sampling")),
            drop=st.sampled_from(("best", "paper", "none")),
            skips=st.sampled_from(("fitted", "paper", "none")),
            caution=st.sampled_from((1.0, 1.5, 5.0, 30.0)),
        ),
    }
)


def check_cascade(case: dict) -> None:
    answers, options = calibrated_answers(**case["family"]), case["options"]
    models = tuple(CascadeModel(str(i), energy_j=float(cost)) for i, cost in enumerate(answers.cost))
    fitted = Fitted(models, "classification", None, answers.correct, answers.confidence, np.zeros((len(models), 2)))
    try:
        searched = search_cascade(fitted, options)
    except InputError:
        assert options != SearchOptions(), "the largest alone is a cascade by default, and it pays"
        return  # no such cascade pays
    right, cost = walked(answers.only(searched.kept), searched.cascade.thresholds, searched.cascade.skips)
    assert np.isclose(cost, searched.route.cost)
    assert right == searched.route.num_correct
    assert searched.route.cost <= answers.cost[-1] * (1 + 1e-9), (
        f"{searched.route.cost:g} a request, {answers.cost[-1]:g} by the largest alone"
    )
    if options.mode == "ap" and options.skips != "paper":
        assert right >= answers.correct[-1].sum(), f"{right} right, fewer than the largest alone"


# ---- threads


@st.composite
def thread_cases(draw) -> dict:
    prompts = random_prompts(draw, 61, 40, 8)
    return {"policy": draw(lossless_policies()), "prompts": prompts, "threads": draw(st.integers(2, 6))}


def check_threads(case: dict) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        save_opt(folder)
        with LLM(folder, case["policy"], device="cpu", dtype="float32", disk_dir=folder, hardware=machine()) as llm:

            def answer(prompt: list[int]) -> list[int]:
                return llm.generate([prompt], params)[0].outputs[0].token_ids

            alone = [answer(prompt) for prompt in case["prompts"]]
            with ThreadPoolExecutor(case["threads"]) as threads:
                together = list(threads.map(answer, case["prompts"] * 3))
    assert together == alone * 3


# ---- lines

LINES, ROUND = 1000, 0  #: of a file; the seed of the round
NUMBERS = (0, 1, 2, -1, 0.5, 1e-310, 1e30, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, float("nan"), float("inf"))
TEXTS = (
    "", "a", "1", "\ud800", "\0", "\u2028", "e\u0301", "\U0001f600", "a" * 300, "9" * 5000, "{{ x }}", "<s>", "\ufeff",
)  # fmt: skip
REGEXES = ("(", "[0-9]+", "(a|b)*", "((((((a?){9}){9}){9}){9}){9})")
FORMS = (*REGEXES, {"type": "object"}, {"type": 3}, {"$ref": "#"}, {"enum": []})
FIELDS = (
    "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs",
    "prompt_logprobs", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "echo", "stream", "suffix",
    "model", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids", "response_format",
    "tools", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "tool_choice",
    "user", "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "metadata", "best_of",
    "prompt", "messages", "parallel_tool_calls", "custom_id", "method", "url", "body", "role", "content",
    "tool_calls",
)  # fmt: skip
ENDINGS = (b"", b"\0", b"\xff", b",", b"}", b"]", b"\r", b" {}", b"\xef\xbb\xbf")


def nasty(generator: random.Random, depth: int = 0):
    """Return a value that some field does not expect."""
    kind = generator.randrange(9 if depth < 3 else 5)
    if kind < 5:
        return generator.choice((None, True, False, *NUMBERS, *TEXTS, *FORMS, *range(3, 20)))
    if kind == 5:
        value: list | dict = []
        for _ in range(generator.choice((3, 100, 250))):
            value = [value] if generator.random() < 0.5 else {"a": value}
        return value
    if kind == 6:
        keys = (*TEXTS, *FIELDS, "type", "text", "function", "name", "arguments")
        return {generator.choice(keys): nasty(generator, depth + 1) for _ in range(generator.randrange(4))}
    return [nasty(generator, depth + 1) for _ in range(generator.choice((0, 1, 2, 3, 40)))]


def hostile_line(generator: random.Random, number: int) -> bytes:
    """Return a request with changes to its fields, its structure or its bytes."""
    said = [{"role": "user", "content": generator.choice(("abc", [{"type": "text", "text": "abc"}]))}]
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": generator.choice(("{}", '{"a": NaN}', {}))},
    }
    if generator.random() < 0.3:
        said += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    chat = generator.random() < 0.4
    body = {"messages": said} if chat else {"prompt": generator.choice(("abc", [5, 6], ["abc"], [[7]]))}
    body |= {"max_tokens": 2, "temperature": 0}
    url = "/v1/chat/completions" if chat else "/v1/completions"
    name = number if generator.random() < 0.97 else number // 2  # which there may be already
    line = {"custom_id": f"r{name}", "method": "POST", "url": url, "body": body}
    line = body if generator.random() < 0.1 else line
    for _ in range(generator.choice((0, 1, 1, 1, 2, 3))):
        holder = generator.choice((body, body, body, body, said[0], said[-1], call["function"], line))
        if generator.random() < 0.1 and holder:
            holder.pop(generator.choice(list(holder)))
        else:
            name = generator.choice(FIELDS)
            value = nasty(generator)
            many = name in ("n", "best_of") and isinstance(value, int) and value > 4
            holder[name] = 10**400 if many else value  # 16,384 answers are many, and allowed
    raw = json.dumps(line, ensure_ascii=generator.random() < 0.5).encode("utf-8", "surrogatepass")
    if generator.random() < 0.02:
        deep = generator.choice((300, 990, 1000, 5000, 100_000))
        raw = raw[:-1] + b', "metadata": ' + b"[" * deep + b"]" * deep + b"}"
    for _ in range(generator.choice((0, 0, 0, 0, 0, 0, 1, 2))):
        start = generator.randrange(len(raw) + 1)
        cut = generator.choice((raw[start : start + 9] * 2, generator.randbytes(2), b"", *ENDINGS))
        raw = raw[:start] + cut + raw[start + generator.randrange(4) :]
    return generator.choice((b"", b"  ", b"null", b"[]")) if generator.random() < 0.01 else raw.replace(b"\n", b" ")


def check_lines(seed: int) -> None:
    """Check that each line that is valid alone is answered, and that each other line is refused."""
    generator, wanted = random.Random(f"{ROUND} {seed}"), {}  # hypothesis begins each round with 0
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setenv("FLEXHYBRID_CACHE", str(folder / "cache"))
        save_text_model(folder / "model")
        lines = [hostile_line(generator, number) for number in range(LINES)]
        (folder / "in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        words = ["run", "-i", folder / "in.jsonl", "-o", folder / "out.jsonl", "--model", folder / "model", "--quiet"]
        words += ["--policy", "kv_only", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "64"]
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            assert cli.main([*map(str, words)]) == 0, "the job ended"
        for row in map(json.loads, (folder / "out.jsonl").open(encoding="utf-8")):
            number = int(row["id"].removeprefix("batch_req_"))
            assert number not in wanted, f"line {number} has two answers"
            wanted[number], body = row["response"]["status_code"], row["response"]["body"]
            if wanted[number] != 200:
                error = body["error"]
                assert error["code"] and len(error["message"]) < 2000 and "Traceback" not in error["message"], error
                assert "cannot be served" not in error["message"], (error, lines[number - 1][:2000])
                OUTCOMES[error["code"]] += 1
            else:
                OUTCOMES["answered"] += 1
        blank = {number for number, raw in enumerate(lines, 1) if not raw.strip(b" \t\r\n")}
        assert sorted([*wanted, *blank]) == list(range(1, LINES + 1))
        OUTCOMES["blank"] += len(blank)
        with LLM(folder / "model", "kv_only", device="cpu", dtype="float32") as llm:
            read, ids = LineReader(LineRules("jsonl", {}, 0), llm.codec), set()
            for number, status in sorted(wanted.items()):
                try:
                    request = read(lines[number - 1], number)
                except Refused as refused:
                    answered = False
                    ids.add(refused.custom_id)
                else:
                    answered = request.custom_id not in ids
                    ids.add(request.custom_id)
                assert (status == 200) == answered, lines[number - 1]


OUTCOMES: Counter = Counter()  #: of the lines so far, by the code of their error


# ---- rounds


class Area(NamedTuple):
    check: Callable
    cases: st.SearchStrategy
    examples: int  #: of a round


AREAS = {
    "tokens": Area(check_tokens, token_cases(), 15),
    "sampling": Area(check_sampling, sampling_cases(), 4),
    "selections": Area(check_selections, selection_cases(), 4),
    "search": Area(check_search, search_cases(), 3),
    "clocks": Area(check_clocks, CLOCK_CASES, 15),
    "cascade": Area(check_cascade, CASCADE_CASES, 20),
    "threads": Area(check_threads, thread_cases(), 4),
    "lines": Area(check_lines, st.integers(0, 10**6), 2),
}


def run_round(name: str, seed: int, examples: int | None = None) -> str:
    """Check the cases of one round; return the shrunk failure, or an empty text."""
    check, cases, usual = AREAS[name]
    globals()["ROUND"] = seed

    @seeded(seed)
    @settings(
        max_examples=examples or usual, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(cases)
    def judge(case):
        check(case)

    try:
        judge()
    except Exception as error:
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-4:])
        return "".join([*frames, *traceback.format_exception_only(error)])
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=240, help="time after which no round starts")
    parser.add_argument("--rounds", type=int, help="rounds of each area, instead of a time")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each round has the next one")
    parser.add_argument("--only", nargs="+", choices=AREAS, default=list(AREAS), help="areas")
    parser.add_argument("--lines", type=int, default=LINES, help="lines of a file of the area lines")
    args = parser.parse_args()
    globals()["LINES"] = args.lines
    torch.set_num_threads(1)
    disable_progress_bar()
    began, failures, done = time.monotonic(), 0, dict.fromkeys(args.only, 0)
    for seed in count(args.seed):
        if args.rounds is not None and seed - args.seed >= args.rounds:
            break
        for name in args.only:
            if args.rounds is None and time.monotonic() - began > args.seconds:
                break
            failure = run_round(name, seed)
            done[name] += AREAS[name].examples
            if failure:
                failures += 1
                print(f"{failure}\nmake fuzz ARGS='--only {name} --seed {seed} --rounds 1'\n", flush=True)
        else:
            continue
        break
    checked = ", ".join(f"{name} {cases}" for name, cases in done.items())
    print(f"cases: {checked}; {failures} rounds failed; {time.monotonic() - began:.0f} s")
    if OUTCOMES:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"lines: {dict(OUTCOMES.most_common())}; the process took {peak} MiB at most")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
