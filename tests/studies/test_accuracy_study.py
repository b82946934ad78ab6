"""The study of accuracy, whole, on a tiny model; and the tables and figures that are made of it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from models import save_opt

from experiments.reproduce import registry
from experiments.reproduce.infinigen import accuracy as infinigen_accuracy
from experiments.reproduce.infinigen import accuracy_policies as studied
from experiments.reproduce.infinigen import accuracy_rows
from experiments.studies import accuracy_study, attention_study
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.storage.loader import Checkpoint

LENGTH, TEXTS = 48, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with a token for each character."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    save_opt(folder, heads=4, head_dim=16, vocab=130, layers=3, positions=LENGTH)
    characters = {"<s>": 0, "<pad>": 1, "</s>": 2} | {chr(i): 2 + i for i in range(1, 128)}
    tokenizer = Tokenizer(models.BPE(characters, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def study(folder, tmp_path_factory):
    """Of the first documents alone, and without the pictures of its runs, which test_accuracy draws."""
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
    assert len(results) == 10
    for one in results.values():
        assert set(one.rows["role"]) == {"context"} and np.isfinite(one.rows["ours"]).all()
        assert one.figures and all(np.isfinite(figure.frame[figure.y]).all() for figure in one.figures)


def test_h2o_and_infinigen_are_compared_at_equal_bytes_in_equal_layers():
    """In what is stored: layers 0 and 1 whole, and as many bytes moved, but for whole blocks."""
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
    """Policies that differ by the same factor on texts of very different difficulty: the factor, without a spread."""
    hard = np.array([-1.0, -3.0, -9.0, -2.0])
    part = {"texts_by_document": [1, 1, 1, 1]}
    ours, others = ({"logprob_by_document": (hard - less).tolist()} for less in (0.1, 0.0))
    compared, words = accuracy_rows.comparison("ours over others", part, ours, others)
    assert [compared[name] for name in ("low", "ours", "high")] == pytest.approx(3 * [math.exp(0.1)])
    assert compared["shown"] == "worse" and "1.105" in words
    same, _ = accuracy_rows.comparison("ours over itself", part, ours, ours)
    assert same["shown"] == "no difference shown"


def test_skewing_alone_changes_nothing(study):
    assert study["skewing_alone"] < 1e-4


def test_attention_is_transformers_own(folder, study):
    """Key tokens for 0.9 of the weight, from the weights that transformers gives."""
    from transformers import AutoModelForCausalLM

    text = np.random.default_rng(0).integers(3, 120, LENGTH).tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        weights = model(torch.tensor([text]), output_attentions=True).attentions
    found = attention_study.attention_needs(Checkpoint(folder), [text, text], every=1)
    for layer, of in enumerate(found["layers"]):
        needed = []
        for row in weights[layer][0].flatten(0, 1).tolist():  # of one head and query
            total, count = 0.0, 0
            for weight in sorted(row, reverse=True):
                total, count = total + weight, count + 1
                if total >= found["weight"]:
                    break
            needed.append(count)
        assert of["needed_by_chunk"][0] == pytest.approx(2 * [np.mean(needed)], rel=0.01)
        assert sum(of["histogram"]) == 2 * len(needed)


def test_skewing_gathers_squares_in_few_columns(study):
    for layer in study["columns"]:
        plain, skewed = (layer[f"{name} query, {studied.PARTIAL:g}"] for name in ("plain", "skewed"))
        assert len(plain) == TEXTS and np.mean(skewed) > np.mean(plain) - 0.02 and max(skewed) <= 1 + 1e-6
    assert all(len(of) == TEXTS and min(of) >= -1 for layers in study["inputs"].values() for of in layers)
    assert math.isfinite(study["by_length"][LENGTH]["h2o"]["policies"][1]["perplexity"])


def test_revival_finds_the_key_that_was_planted():
    """Even weights but for one key of head 1: nothing, then at one query nearly all; and one that is always loud."""
    heads, length = 2, 4096
    weights = torch.ones(heads, length, length).tril()
    weights[1, :, 77] = 0
    weights[1, 3900, 77] = 4 * length
    weights[0, 3000:, 5] = length
    found = attention_study.revival((weights / weights.sum(-1, keepdim=True))[:, -length // 4 :])
    assert (found["head"], found["key"]) == (1, 77) and found["of_loud"] == 0.5
    assert len(found["weights"]) == length // 4 and np.argmax(found["weights"]) == 3900 - 3 * length // 4
    assert max(found["weights"]) > 0.7 and sorted(found["weights"])[-2] == 0
