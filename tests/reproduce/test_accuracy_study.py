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
from experiments.studies import accuracy_study
from flexhybrid.core.context.blocks import BLOCK_TOKENS
from flexhybrid.runtime.storage.loader import Checkpoint

LENGTH = 48


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
    return accuracy_study.study(folder, 1, tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="module")
def results(study, tmp_path_factory):
    path = tmp_path_factory.mktemp("results")
    (path / "tiny.json").write_text(json.dumps(study))
    infinigen_accuracy.studies.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infinigen_accuracy.studied, "RESULTS", path)
        yield {name: registry.run.__wrapped__(name) for name in registry.names("infinigen.accuracy")}
    infinigen_accuracy.studies.cache_clear()


def test_every_experiment_has_rows_figures_and_no_verdict(results):
    assert len(results) == 10
    for one in results.values():
        assert set(one.rows["role"]) == {"context"} and np.isfinite(one.rows["ours"]).all()
        assert one.figures and all(np.isfinite(figure.frame[figure.y]).all() for figure in one.figures)


def test_h2o_and_infinigen_are_compared_at_equal_bytes_in_equal_layers():
    """In what is stored: layers 0 and 1 whole, and as many bytes moved, but for whole blocks."""
    for study in infinigen_accuracy.studies().values():
        rows = {row["policy"]: row for part in ("plain", "skewed") for row in study[part]["policies"]}
        block = BLOCK_TOKENS / study["prompt_tokens"]
        for share in studied.SHARES:
            ranked, guessed = rows[studied.h2o(share)], rows[studied.infinigen(cap=share)]
            for row in (ranked, guessed):
                assert row["looked_at_by_layer"][:2] == pytest.approx([1, 1])
            assert ranked["looked_at_by_layer"][2:] == pytest.approx(guessed["looked_at_by_layer"][2:], abs=block)
            assert ranked["moved"] == pytest.approx(guessed["moved"], abs=block / 2)


def test_skewing_alone_changes_nothing_and_all_tokens_are_exact(study):
    assert study["skewing_alone"] < 1e-4
    every = next(row for row in study["skewed"]["policies"] if row["policy"] == "infinigen(alpha=inf,cap=1.0)")
    assert every["over_full"] == pytest.approx(1, abs=1e-5) and every["agreement"] == 1


def test_attention_is_transformers_own(folder, study):
    """Key tokens for 0.9 of the weight, from the weights that transformers gives."""
    from transformers import AutoModelForCausalLM

    from experiments.studies.accuracy_study import attention_needs

    text = np.random.default_rng(0).integers(3, 120, LENGTH).tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.inference_mode():
        weights = model(torch.tensor([text]), output_attentions=True).attentions
    found = attention_needs(Checkpoint(folder), text)
    for layer, of in enumerate(found["layers"]):
        needed = []
        for row in weights[layer][0].flatten(0, 1).tolist():  # of one head and query
            total, count = 0.0, 0
            for weight in sorted(row, reverse=True):
                total, count = total + weight, count + 1
                if total >= found["weight"]:
                    break
            needed.append(count)
        assert of["needed_by_chunk"][0] == pytest.approx(np.mean(needed), rel=0.01)
        assert sum(of["histogram"]) == len(needed)


def test_skewing_gathers_squares_in_few_columns(study):
    for layer in study["columns"]:
        assert layer["skewed query"] > layer["plain query"] - 0.02 and layer["skewed query"] <= 1 + 1e-6
    assert all(-1 <= value <= 1 for values in study["inputs"].values() for value in values)
    assert math.isfinite(study["by_length"][LENGTH]["h2o"][1]["perplexity"])


def test_revival_finds_the_key_that_was_planted():
    """Even weights but for one key of head 1: nothing, then at one query nearly all; and one that is always loud."""
    heads, length = 2, 4096
    weights = torch.ones(heads, length, length).tril()
    weights[1, :, 77] = 0
    weights[1, 3900, 77] = 4 * length
    weights[0, 3000:, 5] = length
    found = accuracy_study.revival(weights / weights.sum(-1, keepdim=True))
    assert (found["head"], found["key"]) == (1, 77) and found["of_loud"] == 0.5
    assert len(found["weights"]) == length // 4 and np.argmax(found["weights"]) == 3900 - 3 * length // 4
    assert max(found["weights"]) > 0.7 and sorted(found["weights"])[-2] == 0
