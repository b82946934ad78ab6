"""Test penalties, biases and other options of requests against transformers; the rest of the batch has no effect."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.warpers import changed
from policies import wider_policies

from flexhybrid import LLM, InputError, Policy, SamplingParams, runner, shipped
from flexhybrid.core.admission import Places
from sim.presets import hybrid

VOCAB = 61
POLICIES = {"kv": "kv_only", "act": hybrid(1.0, 64), "one at a time": Policy(max_batch=1)}
POLICIES |= {
    name: wider_policies(64, 32, 8)[name] for name in ("tok", "host attention", "row", "chunks, hidden on host")
}


@pytest.fixture(scope="module")
def llm_of(tiny_opt):
    """Return the LLM of a policy, by its name."""

    @cache
    def make(name: str) -> LLM:
        return LLM(tiny_opt[0], POLICIES[name], device="cpu", dtype="float32")

    yield make


def greedy_by_transformers(model, prompt: list[int], params: SamplingParams, **asked) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
        output.append(int(changed(logits, prompt, output, **asked).argmax()))
    return output


PENALISED = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.7},
    {"logit_bias": {"7": 3.5, 9: -100, 11: 2}},
    {"frequency_penalty": 0.5, "presence_penalty": 1.0, "repetition_penalty": 0.6, "logit_bias": {5: 9}},
    {"allowed_token_ids": [4, 8, 15, 16, 23, 42], "repetition_penalty": 2.0},
]


def test_greedy_answers_are_those_of_transformers_processors(tiny_opt, llm_of):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, VOCAB, n).tolist() for n in (9, 1, 14, 5, 20, 8)]
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **asked) for asked in PENALISED]
    answers = llm_of("kv").generate(prompts, params)
    free = llm_of("kv").generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for prompt, one, answer, plain in zip(prompts, params, answers, free, strict=True):
        asked = {
            "frequency": one.frequency_penalty, "presence": one.presence_penalty, "repetition": one.repetition_penalty,
            "bias": dict(one.logit_bias), "allowed": one.allowed_token_ids,
        }  # fmt: skip
        assert answer.outputs[0].token_ids == greedy_by_transformers(tiny_opt[1], prompt, one, **asked)
        assert answer.outputs[0].token_ids != plain.outputs[0].token_ids


def test_bad_words_are_never_generated(tiny):
    llm = LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")
    prompts = shipped.prompts()[:9]
    free = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    words = [answer.outputs[0].text.split()[-1] for answer in free]
    assert sum(len(llm.tokenizer(word)["input_ids"]) > 1 for word in words) > 2
    params = [SamplingParams(temperature=0, max_tokens=24, bad_words=[word]) for word in words]
    for prompt, word, answer in zip(prompts, words, llm.generate(prompts, params), strict=True):
        ids = answer.outputs[0].token_ids
        for bare in (word, f" {word}"):
            bad = llm.tokenizer(bare, add_special_tokens=False)["input_ids"]
            assert all(ids[i : i + len(bad)] != bad for i in range(len(ids))), (prompt, word)
    with pytest.raises(InputError, match="prompt 0 has bad_words, but .* no tokenizer"):
        LLM(tiny, "kv_only", device="cpu").generate([[5]], SamplingParams(bad_words=["a"]))


def test_options_outside_the_vocabulary_are_refused_by_name(llm_of):
    for asked, words in (
        ({"logit_bias": {61: 1}}, "logit_bias of prompt 0 holds token id 61"),
        ({"allowed_token_ids": [3, 99]}, "allowed_token_ids of prompt 0 holds token id 99"),
        (
            {"allowed_token_ids": [2, 5], "stop_token_ids": [5], "min_tokens": 2},
            "leaves no token for its first min_tok",
        ),
    ):
        with pytest.raises(InputError, match=words):
            llm_of("kv").generate([[5, 6]], SamplingParams(**asked))


# ---- company changes nothing -----------------------------------------------------------------------------------------

IDS = st.integers(3, VOCAB - 1)
ASKED = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.8, 1.5]), "seed": st.integers(0, 3), "max_tokens": st.integers(1, 9)},
    optional={
        "n": st.integers(1, 3),
        "frequency_penalty": st.sampled_from([-1.0, 0.7]),
        "presence_penalty": st.sampled_from([-0.5, 2.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "logit_bias": st.dictionaries(IDS, st.integers(-5, 5), max_size=3),
        "allowed_token_ids": st.lists(IDS, min_size=5, unique=True),
        "stop_token_ids": st.lists(IDS, min_size=10, max_size=30, unique=True),
        "ignore_eos": st.just(True),
        "top_k": st.sampled_from([1, 9]),
        "top_p": st.sampled_from([0.4, 0.9]),
        "min_p": st.sampled_from([0.05, 0.5]),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
    },
)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.lists(IDS, min_size=1, max_size=30), st.just({}) | ASKED), min_size=1, max_size=5),
    st.sampled_from(sorted(POLICIES)),
)
def test_a_request_gets_the_same_answer_in_any_batch(llm_of, requests, policy):
    """Answer k of n is the only answer of a request with seed + k."""
    prompts, params = (
        [ids for ids, _ in requests],
        [SamplingParams(**{"temperature": 0} | asked) for _, asked in requests],
    )
    together = llm_of(policy).generate(prompts, params)
    for prompt, (_, asked), answer in zip(prompts, requests, together, strict=True):
        assert [output.index for output in answer.outputs] == list(range(asked.get("n", 1)))
        for output in answer.outputs:
            one = {"temperature": 0, **asked, "n": 1, "seed": asked.get("seed", 0) + output.index}
            alone = llm_of("kv").generate([prompt], [SamplingParams(**one)])[0].outputs[0]
            assert (output.token_ids, output.finish_reason) == (alone.token_ids, alone.finish_reason)


def test_preempted_requests_keep_their_options(llm_of, tiny_opt, monkeypatch, batches):
    """Pools are minimal, so the youngest requests are preempted; they return with their tokens so far as prompt."""
    monkeypatch.setattr(runner, "batch_size", lambda *_: Places(4, 0.01))
    generator = np.random.default_rng(2)
    asking = [
        {"frequency_penalty": 1.2, "temperature": 0.9}, {"repetition_penalty": 1.4}, {"presence_penalty": 1.0},
        {"logprobs": 2, "prompt_logprobs": 1, "min_tokens": 30}, {}, {"n": 2, "temperature": 1.3, "logprobs": 0},
        {"logit_bias": {7: 4.0}, "top_k": 5, "temperature": 0.7},
    ]  # fmt: skip
    common = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    params = [common | {"seed": seed} | asked for seed, asked in enumerate(asking)]
    prompts = [generator.integers(3, VOCAB, 5 + 3 * i % 20).tolist() for i in range(len(params))]
    llm = LLM(tiny_opt[0], Policy(), device="cpu", dtype="float32")
    together = llm.generate(prompts, [SamplingParams(**asked) for asked in params])
    assert sum(batch.num_back for batch in batches) > 0
    monkeypatch.undo()
    apart = [
        (prompt, asked | {"n": 1, "seed": asked["seed"] + k})
        for prompt, asked in zip(prompts, params, strict=True)
        for k in range(asked.get("n", 1))
    ]
    roomy = llm_of("kv").generate([prompt for prompt, _ in apart], [SamplingParams(**asked) for _, asked in apart])
    outputs = [(answer, output) for answer in together for output in answer.outputs]
    for (answer, output), expected in zip(outputs, roomy, strict=True):
        assert output.token_ids == expected.outputs[0].token_ids
        assert_same(output.logprobs, expected.outputs[0].logprobs)
        assert_same(answer.prompt_logprobs, expected.prompt_logprobs)


def assert_same(places: list | None, others: list | None) -> None:
    """Check for equal tokens and, up to their last digits, equal log probabilities."""
    assert (places is None) == (others is None)
    for place, other in zip(places or [], others or [], strict=True):
        values, expected = ({token: one.logprob for token, one in (of or {}).items()} for of in (place, other))
        assert values == pytest.approx(expected, abs=1e-4)


def test_samples_of_one_prompt_differ_and_shared_parameters_keep_their_rule(llm_of):
    params = SamplingParams(n=4, temperature=2.0, seed=2**64 - 2, max_tokens=8, ignore_eos=True)
    first, second = llm_of("kv").generate([[5, 6], [5, 6]], params)
    drawn, again = ([tuple(output.token_ids) for output in answer.outputs] for answer in (first, second))
    assert len(set(drawn)) == 4 and again == drawn  # one seed means the same for every prompt, as in vLLM
    wrapped = SamplingParams(temperature=2.0, seed=0, max_tokens=8, ignore_eos=True)  # 2**64 - 2 + 2
    assert llm_of("kv").generate([[5, 6]], wrapped)[0].outputs[0].token_ids == list(drawn[2])
    unseeded = llm_of("kv").generate([[5, 6]], [SamplingParams(n=5, temperature=2.0, max_tokens=8, ignore_eos=True)])
    assert len({tuple(output.token_ids) for output in unseeded[0].outputs}) == 5


def test_a_request_is_answered_when_all_its_samples_are_done(llm_of):
    heard = []
    llm = LLM(llm_of("kv").checkpoint.path, "kv_only", device="cpu", dtype="float32")
    params = [SamplingParams(n=n, max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 1)]
    answers = llm.generate([[5], [6]], params, on_answer=lambda place, answer: heard.append((place, answer)))
    assert [place for place, _ in heard] == [1, 0] and dict(heard) == dict(enumerate(answers))
    assert [answer.request_id for answer in (*answers, *llm.generate([[7]]))] == ["0", "1", "2"]
    assert all(answer.finished for answer in answers)
