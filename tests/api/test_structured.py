"""Test structured outputs against jsonschema, re and partial regular expressions, alone and in batches."""

import gc
import json
import re
import sys
import weakref

import jsonschema
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import wider_policies
from runs import answered, lines_of

from flexhybrid import LLM, InputError, Policy, SamplingParams, StructuredOutputsParams, runner, shipped
from flexhybrid.core.admission import Places
from flexhybrid.structured_outputs import KEPT_GRAMMARS, Grammars
from sim.presets import hybrid

pytest.importorskip("llguidance")

POLICIES = {"kv": "kv_only", "act": hybrid(1.0, 256), "one at a time": Policy(max_batch=1)}
POLICIES |= {name: wider_policies(256, 64, 8)[name] for name in ("tok", "host attention")}
PROMPTS = shipped.prompts()[:6]


@pytest.fixture(scope="module")
def llm():
    return LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32")


def answer(llm, form, **params):
    asked = SamplingParams(**{"max_tokens": 60, "structured_outputs": form} | params)
    return llm.generate([PROMPTS[0]], asked)[0].outputs[0]


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_only_some_grammars_are_kept_besides_those_in_use(llm):
    """300 answers have a schema each. Unused grammars are dropped; a grammar in use stays right."""

    def schema(number):
        return StructuredOutputsParams(json={"type": "object", "properties": {f"f{number}": {"enum": [number]}}})

    def mask(grammar):
        words = np.zeros(-(-llm.shape.vocab // 32), dtype=np.int32)
        grammar.fill(words)
        return words.tolist()

    grammars = Grammars(llm.tokenizer, llm.shape.vocab, llm.shape.eos_token_ids)
    running = grammars.compile(schema(0)).begin()
    opening = llm.tokenizer.encode("{", add_special_tokens=False)[-1]
    running.advance(opening)
    before = mask(running)
    made = [weakref.ref(grammars.compile(schema(number))) for number in range(1, 300)]
    gc.collect()
    assert sum(ref() is not None for ref in made) <= KEPT_GRAMMARS
    again = grammars.compile(schema(0)).begin()
    again.advance(opening)
    assert mask(running) == before == mask(again)


# ---- the masks themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [r"\d{3}-[a-f]{2,4}( or [A-Z]\w*)?", r"(def|class) [a-z_]+\(self\):", r"a*b?c+"])
def test_a_mask_allows_the_tokens_after_which_the_pattern_can_match(llm, pattern):
    """All tokens of the vocabulary are tried along random answers, except parts of characters. If the pattern allows
    only one continuation, only its longest token is allowed."""
    texts = [llm.tokenizer.decode([token]) for token in range(llm.shape.vocab)]
    whole = np.array(["\ufffd" not in text and token > 2 and text != "" for token, text in enumerate(texts)])
    generator = np.random.default_rng(0)
    grammar = llm.codec.rules.grammars().compile(StructuredOutputsParams(regex=pattern))
    begun, text = grammar.begin(), ""
    for _ in range(12):
        words = np.zeros(-(-llm.shape.vocab // 32), dtype=np.int32)
        begun.fill(words)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: llm.shape.vocab].astype(bool)
        expected = np.array([regex.fullmatch(pattern, text + one, partial=True) is not None for one in texts])
        alone = (allowed & whole).sum() == 1
        assert (allowed <= expected)[whole].all() and (alone or (allowed == expected)[whole].all())
        ends = llm.shape.eos_token_ids[0]
        assert allowed[ends] == (re.fullmatch(pattern, text) is not None)
        if not (choices := np.flatnonzero(allowed & whole)).size:
            break
        token = int(generator.choice(choices))
        begun.advance(token)
        text += texts[token]
    assert text


# ---- whole answers ---------------------------------------------------------------------------------------------------

SCALARS = st.sampled_from([
    {"type": "integer", "minimum": -3, "maximum": 120}, {"type": "boolean"}, {"type": "null"},
    {"enum": ["red", "green", 7]}, {"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[0-9]{5}$"},
])  # fmt: skip
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.dictionaries(st.sampled_from("abcé"), inner, min_size=1, max_size=3).map(
            lambda some: {"type": "object", "properties": some, "required": list(some), "additionalProperties": False}
        )
    ),
    max_leaves=4,
)


@settings(max_examples=12)
@given(st.lists(SCHEMAS, min_size=1, max_size=4), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_answers_satisfy_their_schemas(llm, schemas, temperature, seed):
    params = [
        SamplingParams(
            temperature=temperature, seed=seed, max_tokens=90,
            structured_outputs={"json": schema, "disable_any_whitespace": True},
        )
        for schema in schemas
    ]  # fmt: skip
    ended = 0
    for schema, one in zip(schemas, llm.generate(PROMPTS[: len(schemas)], params), strict=True):
        if one.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(one.outputs[0].text), schema)
            ended += 1
    assert ended or temperature


def test_patterns_choices_objects_and_grammars(llm):
    for seed in range(3):
        text = answer(llm, {"regex": r"\d{3}-[a-f]{2,4}"}, seed=seed).text
        assert re.fullmatch(r"\d{3}-[a-f]{2,4}", text)
        assert answer(llm, {"choice": ["yes", "no", 'a "é"\n']}, seed=seed).text in ("yes", "no", 'a "é"\n')
        assert set(answer(llm, {"grammar": 'start: ("ab" | "c")+'}, seed=seed).text) <= set("abc")
        assert re.fullmatch("x=(1|22)", answer(llm, {"grammar": 'root ::= "x=" ("1" | "22")'}, seed=seed).text)
    out = answer(llm, StructuredOutputsParams(json_object=True, disable_any_whitespace=True), temperature=0)
    assert out.finish_reason == "length" or isinstance(json.loads(out.text), dict)


def test_a_form_has_priority_over_other_limits(llm):
    """The form decides if it has ended, or allows only tokens that other options forbid."""
    for more in ({"min_tokens": 9}, {"bad_words": ["yes"]}, {"ignore_eos": True}, {"allowed_token_ids": [5, 6]}):
        assert answer(llm, {"choice": ["yes"]}, max_tokens=12, temperature=0, **more).text == "yes"


def test_wrong_forms_are_refused_by_name(llm, tiny, monkeypatch):
    for form, words in (
        ({}, "exactly one of json"), ({"json": {}, "regex": "a"}, "given: json and regex"), ({"jsn": {}}, "mean json"),
        ({"json": "{"}, "json is no JSON schema"), ({"json": 3}, "json is 3"), ({"regex": 3}, "regex is 3"),
        ({"choice": []}, "choice is"), ({"choice": "yes"}, "choice is"), ({"structural_tag": "x", "regex": "a"}, "not"),
        ({"json": {"type": "nope"}}, "json of structured outputs.*cannot be used"), ({"regex": "("}, "cannot be used"),
        ({"grammar": "x"}, "cannot be used"), ("json", "structured_outputs is"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words) as caught:
            answer(llm, form)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="has structured outputs, but .* no tokenizer"):
        LLM(tiny, "kv_only", device="cpu", dtype="float32").generate(
            [[5]], SamplingParams(structured_outputs={"regex": "a"})
        )
    with pytest.raises(InputError, match="give one of them"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"})
    guided = SamplingParams(guided_decoding={"regex": "ab?"})
    assert guided == SamplingParams(structured_outputs=StructuredOutputsParams(regex="ab?")) and hash(guided)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match="pip install llguidance"):
        LLM(shipped.CHECKPOINT, "kv_only", device="cpu", dtype="float32").generate(["a"], guided)


# ---- company ---------------------------------------------------------------------------------------------------------

FORMS = [
    {"json": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]}},
    {"regex": r"[a-z]{1,5}( [a-z]{2}){0,6}"},
    {"choice": ["return", "import os"]},
]
ASKED = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1.0]), "seed": st.integers(0, 3), "max_tokens": st.integers(1, 14)},
    optional={"structured_outputs": st.sampled_from(FORMS), "n": st.integers(1, 2), "logprobs": st.just(1),
              "presence_penalty": st.just(0.5), "min_tokens": st.just(1), "stop": st.sampled_from(["e", "re"])},
)  # fmt: skip


@pytest.fixture(scope="module")
def llm_of():
    made = {}

    def make(name: str) -> LLM:
        if name not in made:
            made[name] = LLM(shipped.CHECKPOINT, POLICIES[name], device="cpu", dtype="float32")
        return made[name]

    return make


@settings(max_examples=6)
@given(
    st.lists(st.tuples(st.sampled_from(PROMPTS), st.just({"max_tokens": 6}) | ASKED), min_size=1, max_size=5),
    st.sampled_from(sorted(POLICIES)),
)
def test_structured_answers_do_not_depend_on_the_batch(llm_of, requests, policy):
    params = [SamplingParams(**{"temperature": 0} | one) for _, one in requests]
    together = llm_of(policy).generate([text for text, _ in requests], params)
    for (text, asked), got in zip(requests, together, strict=True):
        for output in got.outputs:
            one = {"temperature": 0, **asked, "n": 1, "seed": asked.get("seed", 0) + output.index}
            alone = llm_of("kv").generate([text], [SamplingParams(**one)])[0].outputs[0]
            assert (output.token_ids, output.text) == (alone.token_ids, alone.text)


def test_a_preempted_request_keeps_its_form(llm_of, monkeypatch, batches):
    """Pools are minimal: the youngest requests are preempted in the middle of their form."""
    monkeypatch.setattr(runner, "batch_size", lambda *_: Places(3, 0.01))
    form = {"regex": "([a-z]{1,9} [0-9]{3}, ){1,90}"}
    params = [SamplingParams(seed=seed, max_tokens=30, structured_outputs=form) for seed in range(4)]
    together = LLM(shipped.CHECKPOINT, Policy(), device="cpu", dtype="float32").generate(PROMPTS[:4], params)
    assert sum(batch.num_back for batch in batches) > 0
    monkeypatch.undo()
    for got, expected in zip(together, llm_of("kv").generate(PROMPTS[:4], params), strict=True):
        assert got.outputs[0].text == expected.outputs[0].text
        assert regex.fullmatch(form["regex"], got.outputs[0].text, partial=True)


def test_a_failing_lane_leaves_no_wait_for_a_mask(llm, monkeypatch):
    from flexhybrid.runtime.verbs import VERB_FUNCTIONS

    store_out = VERB_FUNCTIONS["store_out"]

    def failing(state, task):
        if task.iteration == 2:
            raise OSError("gone")
        store_out(state, task)

    monkeypatch.setitem(VERB_FUNCTIONS, "store_out", failing)
    with pytest.raises(OSError, match="gone"):
        answer(llm, {"regex": "a{30}"})
    monkeypatch.undo()
    assert answer(llm, {"regex": "a{30}"}).text == "a" * 30


def test_a_file_asks_in_openais_and_vllms_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    schema = {"type": "object", "properties": {"b": {"enum": [1, 2]}}, "required": ["b"], "additionalProperties": False}
    asked = {
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": schema}}},
        "guided": {"guided_json": schema}, "newer": {"structured_outputs": {"json": schema}},
        "choice": {"guided_choice": ["one", "two"]}, "pattern": {"guided_regex": "a+b", "n": 2},
        "object": {"response_format": {"type": "json_object"}}, "text": {"response_format": {"type": "text"}},
        "both": {"guided_json": schema, "guided_regex": "a"}, "tag": {"response_format": {"type": "structural_tag"}},
        "broken": {"guided_regex": "("},
    }  # fmt: skip
    bodies = {name: {"prompt": "x = ", "max_tokens": 40, **form} for name, form in asked.items()}
    rows = answered(tmp_path, shipped.CHECKPOINT, lines_of(bodies))
    refused = {name: rows.pop(name)["error"]["param"] for name in ("both", "tag", "broken")}
    assert refused == {"both": "guided_json", "tag": "response_format", "broken": None}
    texts = {name: body["choices"][0]["text"] for name, body in rows.items()}
    for name in ("schema", "guided", "newer"):
        if rows[name]["choices"][0]["finish_reason"] == "stop":
            jsonschema.validate(json.loads(texts[name]), schema)
    assert texts["choice"] in ("one", "two")
    for choice in rows["pattern"]["choices"]:
        assert regex.fullmatch("a+b", choice["text"], partial=choice["finish_reason"] == "length")
