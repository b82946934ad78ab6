"""The tasks of lm-evaluation-harness that are made here: what their questions are, and a run of the study."""

from __future__ import annotations

import json

import pytest
from lazily import Lazily
from tokenizers import Tokenizer

from experiments.reproduce.infinigen.accuracy_policies import TASKS_OF_HARNESS, task_policies
from experiments.studies import task_study
from experiments.studies.accuracy_study import TEXTS
from flexhybrid import shipped

harness = Lazily("lm_eval")


def questions(name: str) -> list[dict]:
    return [json.loads(line) for line in (task_study.FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(shipped.CHECKPOINT / "tokenizer.json"))


@pytest.mark.parametrize("name", TASKS_OF_HARNESS)
def test_the_right_choice_alone_goes_on_as_the_document_does(name):
    documents = TEXTS.read_text(encoding="utf-8").split("\f")
    asked = questions(name)
    assert len({question["document"] for question in asked}) == len(documents) >= 20
    for question in asked:
        document, choices = documents[question["document"]], question["choices"]
        right = choices[question["answer"]]
        assert len(set(choices)) == 4 and question["context"] + right in document
        others = [choice for choice in choices if choice != right]
        assert not any(question["context"] + choice in document for choice in others)


def test_an_earlier_name_was_last_seen_long_ago_as_its_rivals_were(tokenizer):
    for question in questions("earlier_name"):
        ids = tokenizer.encode(question["context"], add_special_tokens=False).ids
        assert 595 <= len(ids) <= 605
        for choice in question["choices"]:
            (token,) = tokenizer.encode(choice, add_special_tokens=False).ids
            (together,) = tokenizer.encode(question["context"] + choice, add_special_tokens=False).ids[len(ids) :]
            assert together == token, "choices of a question differ in their last token alone"
            last_seen = max(place for place, id_ in enumerate(ids) if id_ == token)
            assert len(ids) - last_seen >= 195


def test_right_answers_are_counted_by_document():
    samples = [
        {"doc": {"document": number}, "acc": right} for number, right in ((3, 1.0), (1, 0.0), (3, 0.0), (3, 0.0))
    ]
    assert task_study.by_document(samples) == {"documents": [1, 3], "questions": [1, 3], "right": [0.0, 1 / 3]}


def test_the_study_asks_every_question_under_every_policy(tmp_path, monkeypatch):
    """Short questions with visible answers: the full cache knows them, and an exact policy agrees in decode."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name in TASKS_OF_HARNESS:
        (folder / f"{name}.yaml").write_text(
            (task_study.FOLDER / f"{name}.yaml").read_text().replace("experiments/studies/tasks", str(folder))
        )
        rows = [
            {
                "document": i,
                "context": "import os\n" * 8 + "import",
                "choices": [" os", " zz", "qqq", " 7"],
                "answer": i,
            }
            for i in (0, 1)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(task_study, "FOLDER", folder)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: "")
    monkeypatch.setattr(
        task_study,
        "task_policies",
        lambda: {"full cache": (False, "kv_only"), "all": (True, "infinigen(alpha=inf,cap=1.0)")},
    )
    assert next(iter(task_policies())) == "full cache"
    (tmp_path / "run").mkdir()
    found = task_study.study(shipped.CHECKPOINT, tmp_path / "run")
    for policies in found["tasks"].values():
        full, exact = policies["full cache"], policies["all"]
        assert full["documents"] == [0, 1] and full["right"] == [1.0, 0.0]
        assert {name: exact[name] for name in ("documents", "questions", "right")} == {
            name: full[name] for name in ("documents", "questions", "right")
        }
