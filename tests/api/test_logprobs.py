"""Test log probabilities against transformers, in Python and in files; the rest of the batch has no effect."""

import json
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import wider_policies
from runs import answered, lines_of

from flexhybrid import LLM, SamplingParams, shipped
from flexhybrid.batch.openai import CHAT, COMPLETIONS, Request
from flexhybrid.batch.replies import answer_line
from flexhybrid.jobs.run.forecast import first_batch
from flexhybrid.runner import Replies
from flexhybrid.runtime.logprob_log import Noted, records
from flexhybrid.sampling_params import noted_bytes
from sim.presets import hybrid

POLICIES = {"kv": "kv_only", "act": hybrid(1.0, 64), **wider_policies(64, 32, 8)}
POLICIES = {name: policy for name, policy in POLICIES.items() if name not in ("kvpr", "two copies")}  # need a machine


def places_of(model, ids: list[int]) -> np.ndarray:
    """Return log probabilities [tokens, vocab] of the token after each token, by transformers."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()


def check_place(place: dict, token: int, expected: np.ndarray, count: int) -> None:
    """Check one position; ``place``: token id -> Logprob, ``expected``: log probabilities of the vocabulary."""
    ranked = np.argsort(-expected)[:count].tolist()
    assert list(place)[0] == token and set(place) == {token, *ranked}
    for one, logprob in place.items():
        assert logprob.logprob == pytest.approx(expected[one], abs=2e-4)
        assert logprob.rank == 1 + (expected > expected[one]).sum()


def check_answer(model, answer, params: SamplingParams) -> None:
    prompt = answer.prompt_token_ids
    for output in answer.outputs:
        if params.logprobs is None:
            assert output.logprobs is None and output.cumulative_logprob is None
            continue
        expected = places_of(model, prompt + output.token_ids)[len(prompt) - 1 :]
        assert len(output.logprobs) == len(output.token_ids)
        for place, token, logprobs in zip(output.logprobs, output.token_ids, expected):
            check_place(place, token, logprobs, params.logprobs)
        total = sum(place[token].logprob for place, token in zip(output.logprobs, output.token_ids))
        assert output.cumulative_logprob == pytest.approx(total)
    if params.prompt_logprobs is None:
        assert answer.prompt_logprobs is None
        return
    first, *others = answer.prompt_logprobs
    assert first is None and len(others) == len(prompt) - 1
    for place, token, logprobs in zip(others, prompt[1:], places_of(model, prompt)):
        check_place(place, token, logprobs, params.prompt_logprobs)


@pytest.mark.parametrize("name", POLICIES)
def test_logprobs_are_those_of_transformers_under_every_policy(tiny_opt, name):
    """Prompts are computed whole and in chunks, in mixed batches. Log probabilities do not include sampling options."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 61, n).tolist() for n in (21, 5, 5, 12, 1)]
    params = [
        SamplingParams(logprobs=3, prompt_logprobs=2, max_tokens=7, seed=1, top_k=9, n=2),
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(prompt_logprobs=0, max_tokens=2, temperature=0),
        SamplingParams(logprobs=0, max_tokens=5, temperature=0, repetition_penalty=2.0, logit_bias={7: 50}),
        SamplingParams(logprobs=20, prompt_logprobs=20, max_tokens=6, temperature=0.5, seed=2),
    ]
    llm = LLM(tiny_opt[0], POLICIES[name], device="cpu", dtype="float32")
    for answer, one in zip(llm.generate(prompts, params), params, strict=True):
        check_answer(tiny_opt[1], answer, one)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 9), st.sampled_from([3, 17, 300]), st.integers(0, 2**31))
def test_records_equal_a_plain_ranking(rows, count, vocab, seed):
    """Few distinct values make many ties, in which the smaller id comes first."""
    generator = np.random.default_rng(seed)
    logits = generator.choice([-math.inf, -2.0, 0.0, 0.5, 3.0], (rows, vocab), p=[0.1, 0.4, 0.3, 0.1, 0.1])
    logits[:, 0] = 1.0
    tokens = generator.integers(0, vocab, rows)
    made = records(torch.from_numpy(logits).float(), torch.from_numpy(tokens), count).numpy()
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, token, expected in zip(made, tokens, logprobs, strict=True):
        kept = min(count, vocab)
        ranked = np.lexsort((np.arange(vocab), -expected))[:kept]
        assert row[1] == (expected >= expected[token]).sum()
        np.testing.assert_allclose(row[0], expected[token], rtol=1e-5)
        assert row[2 : 2 + kept].tolist() == ranked.tolist() and (row[2 + kept : 2 + count] == -1).all()
        np.testing.assert_allclose(row[2 + count : 2 + count + kept], expected[ranked], rtol=1e-5)


def test_decoded_tokens_need_a_tokenizer(tiny_opt):
    (answer,) = LLM(tiny_opt[0], "kv_only", device="cpu", dtype="float32").generate(
        [[5]], SamplingParams(logprobs=1, max_tokens=1)
    )
    assert all(one.decoded_token is None for one in answer.outputs[0].logprobs[0].values())
    llm = LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")
    (answer,) = llm.generate(["import os"], SamplingParams(logprobs=2, max_tokens=3, temperature=0))
    for token, place in zip(answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True):
        assert place[token].decoded_token == llm.tokenizer.decode([token]) and place[token].rank == 1
    assert repr(answer.outputs[0].logprobs) == repr(list(answer.outputs[0].logprobs))  # and not of the tokenizer


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_of_completions_gives_what_generate_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    prompt, greedy = "def close(self):", {"temperature": 0, "max_tokens": 5}
    got = answered(tmp_path, shipped.CHECKPOINT, lines_of({
        "plain": {"prompt": prompt, **greedy},
        "logprobs": {"prompt": prompt, **greedy, "logprobs": 2, "n": 2},
        "echo": {"prompt": prompt, **greedy, "logprobs": 1, "echo": True},
        "score": {"prompt": prompt, "max_tokens": 0, "logprobs": 0, "echo": True, "prompt_logprobs": 1},
        "bare echo": {"prompt": prompt, **greedy, "echo": True, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    }))  # fmt: skip
    assert f"{sum(body['usage']['completion_tokens'] for body in got.values())} tokens in" in capsys.readouterr().out
    llm = LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")
    asked = SamplingParams(**greedy, logprobs=2, prompt_logprobs=1)
    (answer,) = llm.generate([prompt], asked)
    output = answer.outputs[0]
    (plain,) = got["plain"]["choices"]
    assert plain["text"] == output.text and plain["logprobs"] is None and "prompt_logprobs" not in plain
    first, second = got["logprobs"]["choices"]
    assert (first["index"], second["index"]) == (0, 1) and second == first | {"index": 1}
    assert got["logprobs"]["usage"]["completion_tokens"] == 2 * len(output.token_ids)
    logprobs = first["logprobs"]
    assert "".join(logprobs["tokens"]) == output.text
    assert [logprobs["text_offset"][i] for i in (0, 1)] == [0, len(logprobs["tokens"][0])]
    for i, token in enumerate(output.token_ids):
        place = output.logprobs[i]
        assert logprobs["token_logprobs"][i] == pytest.approx(place[token].logprob, abs=1e-4)
        expected = {one.decoded_token: pytest.approx(one.logprob, abs=1e-4) for one in place.values()}
        assert logprobs["top_logprobs"][i] == expected
    echo = got["echo"]["choices"][0]
    length = len(answer.prompt_token_ids)
    assert echo["text"] == prompt + output.text and echo["logprobs"]["tokens"][length:] == logprobs["tokens"]
    offsets = dict(zip(echo["logprobs"]["text_offset"], echo["logprobs"]["tokens"], strict=True))
    assert all(echo["text"].startswith(token, offset) for offset, token in offsets.items())
    assert echo["logprobs"]["token_logprobs"][0] is None and echo["logprobs"]["top_logprobs"][0] is None
    score = got["score"]["choices"][0]
    assert score["text"] == prompt and got["score"]["usage"]["completion_tokens"] == 0
    numbers = [place[token].logprob for place, token in zip(answer.prompt_logprobs[1:], answer.prompt_token_ids[1:])]
    assert score["logprobs"]["token_logprobs"] == [None, *(pytest.approx(number, abs=1e-4) for number in numbers)]
    assert score["logprobs"]["tokens"] == echo["logprobs"]["tokens"][:length]
    ids = [list(place) for place in score["prompt_logprobs"][1:]]
    assert ids == [[str(token) for token in place] for place in answer.prompt_logprobs[1:]]
    assert "logprobs" in got["bare echo"]["choices"][0] and got["bare echo"]["choices"][0]["text"].startswith(prompt)


def test_a_file_of_chats_has_openais_logprobs(tmp_path, monkeypatch, capsys):
    import shutil

    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(shipped.CHECKPOINT, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    messages, greedy = [{"role": "user", "content": "import os"}], {"temperature": 0, "max_completion_tokens": 4}
    got = answered(tmp_path, folder, lines_of({
        "two": {"messages": messages, **greedy, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0},
        "none": {"messages": messages, **greedy, "logprobs": False, "top_logprobs": 0},
        "bare": {"messages": messages, **greedy, "logprobs": True, "logit_bias": {"5": 100}},
        "wrong": {"messages": messages, **greedy, "top_logprobs": 2},
    }, CHAT))  # fmt: skip
    assert got["wrong"]["error"]["param"] == "top_logprobs" and got["none"]["choices"][0]["logprobs"] is None
    two = got["two"]["choices"][0]
    content = two["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == two["message"]["content"]
    for entry in content:  # greedy: the chosen one is the first of the most probable
        assert entry["bytes"] == list(entry["token"].encode()) and len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]
    assert got["two"]["prompt_logprobs"][0] is None and len(got["two"]["prompt_logprobs"]) > 1
    bare = got["bare"]["choices"][0]["logprobs"]["content"]
    assert len({entry["token"] for entry in bare}) == 1 and all(entry["top_logprobs"] == [] for entry in bare)


def test_logprobs_of_many_answers_are_kept_as_numbers():
    """Python counts the bytes per token until the line is written; objects would take 6,000."""
    llm = LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")
    num_answers, length, top = 16, 25, 20
    params = SamplingParams(n=num_answers, logprobs=top, max_tokens=length, temperature=0, ignore_eos=True)
    request = Request("one", [5, 6], params, "m", COMPLETIONS)
    logits = torch.randn(length, llm.shape.vocab, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(3, length + 3)
    made = records(logits, tokens, top).numpy()
    replies, reply = Replies(llm.codec), None
    answer_line(1, request, filled_reply(llm, request, tokens, made, replies), 0)  # it keeps the texts of tokens
    tracemalloc.start()
    reply = filled_reply(llm, request, tokens, made, replies)
    line = answer_line(1, request, reply, 0)
    peak = tracemalloc.get_traced_memory()[1] - 1.2 * len(line)
    tracemalloc.stop()
    assert peak / (num_answers * length) < 800
    choices = json.loads(line)["response"]["body"]["choices"]
    logprobs = reply.outputs[7].logprobs
    assert [choice["index"] for choice in choices] == list(range(num_answers))
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
    assert choices[7]["logprobs"]["token_logprobs"] == pytest.approx(expected)
    assert [place[token].logprob for place, token in zip(logprobs, tokens.tolist())] == pytest.approx(expected)
    assert logprobs[-1] == logprobs[length - 1] and logprobs[2:4] == [logprobs[2], logprobs[3]] == list(logprobs)[2:4]
    assert logprobs == reply.outputs[8].logprobs and reply.outputs[7].cumulative_logprob == pytest.approx(sum(expected))
    with pytest.raises(IndexError):
        logprobs[length]


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_the_memory_plan_counts_log_probabilities(url):
    """The planned bytes are 1 to 8 times those that Python counts for two answers with their prompt."""
    llm = LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")
    length = 100
    params = SamplingParams(n=2, logprobs=20, prompt_logprobs=20, max_tokens=length, temperature=0, ignore_eos=True)
    tokens = torch.arange(3, length + 3)
    request = Request("one", [5, *tokens.tolist()], params, "m", url)
    logits = torch.randn(length, llm.shape.vocab, generator=torch.Generator().manual_seed(0))
    made, replies = records(logits, tokens, 20).numpy(), Replies(llm.codec)
    answer_line(1, request, filled_reply(llm, request, tokens, made, replies, made), 0)  # it keeps the texts of tokens
    tracemalloc.start()
    answer_line(1, request, filled_reply(llm, request, tokens, made, replies, made.copy()), 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    lengths = llm.codec.encode([request.token_ids], params).workload
    lengths = replace(lengths, noted=noted_bytes(params, len(request.token_ids), length))
    planned = first_batch(llm, lengths)[1]["host"]["log probabilities"]
    assert peak < planned < 8 * peak


def test_log_probabilities_limit_the_batch_and_may_be_refused(tmp_path, capsys):
    llm = LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32", host_memory="24MiB")
    at_a_time = []
    for count in (None, 0, 20):
        params = SamplingParams(logprobs=count, max_tokens=40, temperature=0, ignore_eos=True)
        llm.generate([[5, 6]] * 1000, params, should_stop=lambda: True)
        at_a_time.append(llm.at_a_time)
    assert at_a_time[0] >= at_a_time[1] > at_a_time[2] > 0
    ask = {"model": "m", "prompt": "import", "max_tokens": 32, "temperature": 0}
    asked = [ask, {**ask, "n": 200, "logprobs": 20}, ask]
    lines = lines_of({str(k): body for k, body in enumerate(asked)})
    error = answered(tmp_path, shipped.CHECKPOINT, lines, "--host-memory", "20MiB")["1"]["error"]
    assert "2 answered, 1 refused" in capsys.readouterr().out
    assert "line 2: host memory" in error["message"] and "the part for log probabilities is" in error["message"]


def filled_reply(llm, request, tokens, made, replies, of_prompt=None):
    """Return the reply to a line with these tokens and records as answers."""
    reply = None
    answers = [llm.codec.open(request.token_ids, request.params, k)[0] for k in range(request.params.n)]
    for token, record in zip(tokens.tolist(), made, strict=True):
        for answer in answers:
            answer.token_ids.append(token)
            answer.note(Noted(record, None))
    answers[0].prompt_records = of_prompt
    for answer in answers:
        reply = replies.add(0, answer, None, "0")
    return reply
