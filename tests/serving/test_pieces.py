"""Test that the pieces of a stream together are the whole answer, whatever its tokens, and never change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexhybrid import LLM, SamplingParams, shipped
from flexhybrid.requests import Generated
from flexhybrid.serving.live import News
from flexhybrid.serving.streaming import AnswerPieces


@pytest.fixture(scope="module")
def codec():
    with LLM(shipped.QWEN3, "kv_only", device="cpu", dtype="float32") as llm:
        yield llm.codec


def tokens_of(codec):
    """Draw tokens of texts with long characters, cut anywhere, and any tokens."""
    text = st.text(alphabet="aé日本🙂 \n'tn.,", max_size=12)
    ids = text.map(lambda one: codec.tokenizer.encode(one, add_special_tokens=False))
    any_ids = st.lists(st.integers(0, codec.shape.vocab - 1), max_size=4)
    return st.lists(ids | any_ids, max_size=8).map(lambda parts: sum(parts, []))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("cleans", [False, True])
def test_pieces_make_the_answer(codec, data, logprobs, cleans):
    codec.tokenizer.clean_up_tokenization_spaces = cleans
    ids = data.draw(tokens_of(codec).filter(bool))
    stops = tuple(data.draw(st.lists(st.text(alphabet="aé日 ", min_size=1, max_size=3), max_size=2)))
    prompt = codec.tokenizer.encode("def f", add_special_tokens=False)
    generated, _ = codec.open(prompt, SamplingParams(stop=stops, logprobs=logprobs), 0)
    for place, token in enumerate(ids):
        generated.token_ids.append(token)
        if logprobs:
            generated.records += np.array([-place, 2, (token + 1) % 50, -0.5], np.float32).tobytes()
        if generated.watch and (stop := generated.watch.push(token)):
            generated.stop = stop
            break
    whole = codec.completion(generated)
    pieces, made, sent = AnswerPieces(codec, Generated(0, prompt, generated.params, None)), [], 0
    each = len(generated.records) // max(1, len(generated.token_ids))
    while len(generated.token_ids) - sent > 1:
        count = data.draw(st.integers(1, len(generated.token_ids) - sent - 1))
        records = bytes(generated.records[each * sent : each * (sent + count)])
        made.append(pieces.add(News(generated.token_ids[sent : sent + count], records, False)))
        sent += count
    made = [one for one in made if one] + [pieces.last(whole)]
    assert "".join(one.text for one in made) == whole.text
    assert sum((one.token_ids for one in made), []) == whole.token_ids
    for one in made:
        assert one.text.encode().decode() == one.text
        if logprobs:
            assert len(one.logprobs) == len(one.token_ids)
    if logprobs:
        texts = [place[token].decoded_token for one in made for token, place in zip(one.token_ids, one.logprobs)]
        assert texts == [place[token].decoded_token for token, place in zip(whole.token_ids, whole.logprobs)]
