"""Test the questions of the tasks made here for lm-evaluation-harness."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from experiments.studies.accuracy_study import TEXTS
from flexhybrid import shipped

TASKS = TEXTS.with_name("tasks")


def questions(name: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(shipped.CHECKPOINT / "tokenizer.json"))


@pytest.mark.parametrize("name", ("next_line", "earlier_name"))
def test_only_the_right_choice_continues_the_document(name):
    documents = TEXTS.read_text(encoding="utf-8").split("\f")
    asked = questions(name)
    assert len({question["document"] for question in asked}) == len(documents) >= 20
    for question in asked:
        document, choices = documents[question["document"]], question["choices"]
        right = choices[question["answer"]]
        assert len(set(choices)) == 4 and question["context"] + right in document
        others = [choice for choice in choices if choice != right]
        assert not any(question["context"] + choice in document for choice in others)


def test_an_earlier_name_and_its_rivals_were_last_seen_long_ago(tokenizer):
    for question in questions("earlier_name"):
        ids = tokenizer.encode(question["context"], add_special_tokens=False).ids
        assert 595 <= len(ids) <= 605
        for choice in question["choices"]:
            (token,) = tokenizer.encode(choice, add_special_tokens=False).ids
            (together,) = tokenizer.encode(question["context"] + choice, add_special_tokens=False).ids[len(ids) :]
            assert together == token, "choices of a question differ in their last token alone"
            last_seen = max(place for place, id_ in enumerate(ids) if id_ == token)
            assert len(ids) - last_seen >= 195
