"""Test the fields of SamplingParams, and the texts cut by stop texts."""

import copy
import dataclasses
import functools
import pickle

import numpy as np
import pytest
from transformers import AutoTokenizer

from flexhybrid import InputError, SamplingParams, shipped
from flexhybrid.sampling_params import NEUTRAL
from flexhybrid.text import StopWatch, answer_text

# ---- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, words",
    (
        *(({"max_tokens": value}, "max_tokens is .*None .JSON: null. for the") for value in (0, 2.5, True, "9")),
        *(({"min_tokens": value}, "min_tokens is") for value in (-1, 17, None, 1.0)),
        *(({"temperature": value}, "temperature is") for value in (-1, float("nan"), float("inf"), True, "1", None)),
        *(({"top_k": value}, "top_k is") for value in (-2, 1.5, True, None)),
        *(({"top_p": value}, "top_p is") for value in (0, -0.1, 1.1, float("nan"), True, None)),
        *(({"min_p": value}, "min_p is") for value in (-0.1, 1.1, float("nan"), True, None)),
        *(({"seed": value}, "seed is") for value in ("x", -1, 2**64, True, 1.0)),
        *(({"n": value}, "n is") for value in (0, 2.0, True)),
        *(({"frequency_penalty": value}, "frequency_penalty is") for value in (-2.1, 3, True, "1", None)),
        *(({"presence_penalty": value}, "presence_penalty is") for value in (-2.1, float("nan"))),
        *(({"repetition_penalty": value}, "repetition_penalty is") for value in (0, -1, float("inf"))),
        *(
            ({"logit_bias": value}, "logit_bias is")
            for value in ({"a": 1}, {-1: 1}, {3: "x"}, [3], {1: True}, {"1": 1, 1: 2})
        ),
        *(({"allowed_token_ids": value}, "allowed_token_ids is") for value in ([], ["a"], [-1], 3)),
        *(({"bad_words": value}, "bad_words is") for value in ("word", [""], [3], {"a": 1})),
        *(({"stop": value}, "stop is") for value in ("", ["a", ""], [3], 3, {"a": 1}, b"a")),
        *(({"stop_token_ids": value}, "stop_token_ids is") for value in (3, [-1], ["a"], [True], "12", [1.0])),
        *(({name: "no"}, name) for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")),
    ),
)
def test_wrong_values_are_refused_by_name(field, words):
    with pytest.raises(InputError, match=words) as caught:
        SamplingParams(**field)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_are_not_supported_may_only_ask_for_nothing(name):
    for value in NEUTRAL[name]:
        assert SamplingParams(**{name: value}) == SamplingParams()
    for value in (0.5, "x", 7, {"json": 1}, np.arange(3), True if True not in NEUTRAL[name] else 3):
        with pytest.raises(InputError, match=f"{name} is not supported: .*supported: n, max_tokens"):
            SamplingParams(**{name: value})


def test_an_unknown_field_is_refused_with_its_neighbours():
    with pytest.raises(InputError, match=r"unknown sampling parameter 'max_token'; did you mean max_tokens"):
        SamplingParams(max_token=3)
    with pytest.raises(InputError, match="did you mean presence_penalty"):
        SamplingParams(presence_penality=0.0)


def test_spellings_of_the_same_thing_are_equal():
    assert SamplingParams(top_k=-1, stop="a", stop_token_ids=[3, 3]) == SamplingParams(stop=("a",), stop_token_ids=[3])
    params = SamplingParams(seed=np.uint64(2**64 - 1), max_tokens=None, top_k=np.int64(5), stop=["b", "a", "b"])
    assert params.stop == ("b", "a") and dataclasses.replace(params, top_k=6).top_k == 6
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3


# ---- texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shipped.CHECKPOINT)


def words_of(table):
    """Return a decoder that joins pieces and drops a leading space, as sentencepiece tokenizers do."""
    return lambda ids: b"".join(table[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")


PIECES = [b" the", b" cat", *("é".encode()[i : i + 1] for i in (0, 1)), b"st", b"op", "😀".encode()[:1]]


def test_a_watched_text_is_the_decoded_one(tokenizer):
    text = "def naïve(self): return '日本 😀' + self.x  # ümlaut\n" * 20
    ids = tokenizer(text)["input_ids"]
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    spent = []
    watch = StopWatch(lambda tokens: spent.append(len(tokens)) or decode(tokens), ids[:7], ("nowhere",))
    assert all(watch.push(token) is None for token in ids[7:])
    assert watch.settled + watch.tail == answer_text(decode, ids[:7], ids[7:])
    assert decode(ids[:7]) + watch.settled + watch.tail == decode(ids)
    assert max(spent) <= 16  # 13, and a character that is not complete


def test_bytes_that_never_become_a_character_do_not_hide_a_stop():
    watch = StopWatch(words_of(PIECES), [0], ("op",))
    assert [watch.push(token) for token in [6] * 30 + [5]][-1] == "op"


def test_a_prompt_that_ends_within_a_character():
    decode = words_of(PIECES)
    assert decode([0, 2]) == "the\ufffd"
    assert answer_text(decode, [0, 2], [3, 1]).endswith(" cat") and answer_text(decode, [0], [1]) == " cat"
    assert answer_text(decode, [], [1]) == "cat"
