"""Test the study of accuracy as a whole on a tiny model, with its tables and figures."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from models import save_opt, save_tokenizer

from experiments.reproduce import registry
from experiments.reproduce.infinigen import accuracy as infinigen_accuracy
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.studies import accuracy_study
from flexhybrid.core.context.blocks import BLOCK_TOKENS

LENGTH, TEXTS = 48, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a random model with one token per character."""
    folder = tmp_path_factory.mktemp("tiny")
    save_opt(folder, heads=4, head_dim=16, vocab=130, layers=3, positions=LENGTH)
    save_tokenizer(folder, {chr(i): 2 + i for i in range(1, 128)})
    return folder


@pytest.fixture(scope="module")
def study(folder, tmp_path_factory):
    """Run the study on the first documents, without the pictures of its runs, which test_accuracy draws."""
    texts, documents = tmp_path_factory.mktemp("texts") / "texts.txt", accuracy_study.TEXTS.read_text(encoding="utf-8")
    texts.write_text("\f".join(document[:LENGTH] for document in documents.split("\f")[:TEXTS]), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy_study, "TEXTS", texts)
        patch.setattr("figures.accuracy.by_chunk", lambda *drawn: None)
        return accuracy_study.study(folder, TEXTS, tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def results(study, tmp_path_factory):
    path = tmp_path_factory.mktemp("results")
    (path / "tiny.json").write_text(json.dumps(study))
    infinigen_accuracy.studies.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infinigen_accuracy.studied, "RESULTS", path)
        made = {name: registry.run.__wrapped__(name) for name in registry.names("infinigen.accuracy")}
    infinigen_accuracy.studies.cache_clear()
    return made


def test_every_experiment_has_rows_figures_and_no_verdict(results):
    assert len(results) == 7
    for one in results.values():
        assert set(one.rows["role"]) == {"context"} and np.isfinite(one.rows["ours"]).all()
        assert one.figures and all(np.isfinite(figure.frame[figure.y]).all() for figure in one.figures)


def test_h2o_and_infinigen_are_compared_at_equal_bytes_in_equal_layers():
    """Layers 0 and 1 are whole, and stored and moved bytes are equal up to whole blocks."""
    studies = infinigen_accuracy.studies()
    assert set(studies) == {"opt-stdlib-4m", "opt-stdlib-deep"}
    for study in studies.values():
        rows = {row["policy"]: row for part in ("plain", "skewed") for row in study[part]["policies"]}
        assert study["plain"]["num_texts"] == sum(study["plain"]["texts_by_document"]) >= 20
        block = BLOCK_TOKENS / study["prompt_tokens"]
        for share in studied.SHARES:
            ranked, guessed = rows[studied.h2o(share)], rows[studied.infinigen(cap=share)]
            for row in (ranked, guessed):
                assert row["looked_at_by_layer"][:2] == pytest.approx([1, 1])
            assert ranked["looked_at_by_layer"][2:] == pytest.approx(guessed["looked_at_by_layer"][2:], abs=block)
            in_choosing = block * (study["num_layers"] - 2) / study["num_layers"]
            assert ranked["moved"] == pytest.approx(guessed["moved"], abs=in_choosing)


def test_every_figure_has_an_interval_that_holds_it(results):
    for one in results.values():
        rows = one.rows[one.rows["low"].notna()]
        assert len(rows) > 0.4 * len(one.rows) - 3 and (rows["low"] <= rows["ours"]).all()
        assert (rows["ours"] <= rows["high"]).all()


def test_no_difference_inside_its_interval_is_called_one(results):
    for name in ("table2", "fig13", "fig19"):
        rows = results[f"infinigen-accuracy-{name}"].rows.dropna(subset="shown")
        assert len(rows) >= 3
        for compared in rows.to_dict("records"):
            outside = compared["low"] > 1 or compared["high"] < 1
            assert (compared["shown"] == "no difference shown") == (not outside)
            assert (compared["shown"] == "worse") == (outside and compared["ours"] > 1)


def test_a_comparison_is_of_the_same_texts():
    """Policies differ by one factor on texts of very different difficulty: the interval has only this factor."""
    hard = np.array([-1.0, -3.0, -9.0, -2.0])
    part = {"texts_by_document": [1, 1, 1, 1]}
    ours, others = ({"logprob_by_document": (hard - less).tolist()} for less in (0.1, 0.0))
    compared, words = infinigen_accuracy.comparison("ours over others", part, ours, others)
    assert [compared[name] for name in ("low", "ours", "high")] == pytest.approx(3 * [math.exp(0.1)])
    assert compared["shown"] == "worse" and "1.105" in words
    same, _ = infinigen_accuracy.comparison("ours over itself", part, ours, ours)
    assert same["shown"] == "no difference shown"


def test_perplexity_is_measured_at_every_length(study):
    for of_length in study["by_length"].values():
        for method in ("h2o", "infinigen"):
            assert math.isfinite(of_length[method]["policies"][1]["perplexity"])
