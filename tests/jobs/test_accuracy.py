"""Test `flexhybrid accuracy`: exact policies lose nothing; figures of other policies equal a plain recount."""

import json
import math
import os

import numpy as np
import pytest
import torch
from models import save_llama, save_opt, save_tokenizer

from flexhybrid.cli import main
from flexhybrid.core.errors import InputError
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.policy import Bits, Placement, Policy, Selection
from flexhybrid.core.problem import Problem
from flexhybrid.jobs.accuracy import bootstrap
from flexhybrid.jobs.accuracy.job import AccuracyOptions, _show, accuracy, read_texts
from flexhybrid.jobs.compare.report import Report
from flexhybrid.llm import LLM
from policy_search.systems import Setting, system
from sim import catalogue

LENGTH, PROMPT = 52, 40


@pytest.fixture(scope="module", params=[save_opt, save_llama], ids=["opt", "llama"])
def checkpoint(request, tmp_path_factory):
    """(folder with a tokenizer of one token a character, transformers' model)."""
    folder = tmp_path_factory.mktemp("model")
    model = request.param(folder, heads=4, head_dim=32, vocab=64, layers=3)
    save_tokenizer(folder, begins=True)
    return folder, model


#: For what does not depend on the model.
one_model = pytest.mark.parametrize("checkpoint", [save_llama], indirect=True, ids=["llama"])


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """Documents of 200, 30 and 90 tokens."""
    generator = np.random.default_rng(0)
    documents = ["".join(chr(ord("0") + i) for i in generator.integers(0, 61, n)) for n in (200, 30, 90)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\f".join(documents))
    return path


POLICIES = {
    "eight.json": Policy("eight", Placement(device=1.0), bits=Bits(kv=8)),
    "act4.json": Policy("act4", cache={"act@host": 0.5, "kv@device": 0.5}, bits=Bits(act=4)),
    "h2o_mix.json": Policy(
        "h2o_mix", cache={"kv@host": 0.5, "kv@device": 0.5}, selection=Selection("heavy_hitter", budget=0.5)
    ),
}


ALL_CHOSEN = "infinigen(alpha=inf,cap=1.0)"
EXACT = ["kv_only", "hybrid(0.5)", "kvpr_row", "token_recompute(0.3)", ALL_CHOSEN]


@pytest.fixture(scope="module")
def measured(checkpoint, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("accuracy")
    names = [*EXACT, "fastdecode", "h2o(0.8,whole_layers=1)"]
    for name, policy in POLICIES.items():
        (folder / name).write_text(policy.to_json())
        names.append(str(folder / name))
    options = AccuracyOptions(
        checkpoint[0], text_file, tuple(names), LENGTH, PROMPT, num_texts=4, device="cpu",
        hardware="rtx4090", out=folder / "out",
    )  # fmt: skip
    return accuracy(options, quiet=True), folder / "out"


def by_name(result):
    return {row["policy"]: row for row in result["policies"]}


def test_full_cache_s_perplexity_is_transformers_own_loss(checkpoint, text_file, measured):
    result, _ = measured
    with LLM(checkpoint[0], "resident", device="cpu") as llm:
        ids = torch.tensor(read_texts(llm, text_file, LENGTH, 4).ids)
    assert ids.shape == (4, LENGTH) and (ids[:, 0] == 2).all()
    labels = ids.clone()
    labels[:, :PROMPT] = -100  # the prompt's tokens are given
    with torch.inference_mode():
        loss = float(checkpoint[1](ids, labels=labels).loss)
    assert by_name(result)["full_cache"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_policy_loses_nothing_and_attends_to_all_tokens(measured, name):
    row = by_name(measured[0])[name]
    assert row["over_full"] == pytest.approx(1, abs=1e-5) and row["agreement"] == 1
    assert row["cosine"] == pytest.approx(1, abs=1e-5)
    assert row["looked_at"] == pytest.approx(1, abs=1e-6)
    assert row["looked_at_by_layer"] == pytest.approx([1, 1, 1], abs=1e-6)


def test_bytes_moved_are_whole_blocks_of_what_is_stored(checkpoint, measured):
    rows = by_name(measured[0])
    contexts = np.arange(PROMPT, LENGTH - 1)
    padded = (-(-contexts // 16) * 16).sum() / contexts.sum()
    assert rows["kv_only"]["moved"] == pytest.approx(padded)
    assert rows["full_cache"]["moved"] == 0
    # A selection loads its first two layers' blocks whole, of the third the chosen tokens alone.
    assert rows[ALL_CHOSEN]["moved"] == pytest.approx((2 * padded + 1) / 3)
    if checkpoint[1].config.model_type == "llama":  # two query heads a group: ACT takes as many bytes as KV
        assert rows["hybrid(0.5)"]["moved"] == pytest.approx(padded)
    else:  # half the bytes, of two of 3 blocks and of two of 4
        assert 2 / 3 * padded < rows["hybrid(0.5)"]["moved"] < 3 / 4 * padded


@one_model
def test_host_attention_is_scored_but_its_weights_are_not_seen(measured):
    row = by_name(measured[0])["fastdecode"]
    assert row["over_full"] == pytest.approx(1, abs=1e-4)
    assert row["cosine"] is None and row["looked_at"] is None


@one_model
def test_fewer_bits_lose_a_little_more(measured):
    rows = by_name(measured[0])
    assert rows["act4"]["cosine"] < 0.99 < rows["eight"]["cosine"] < 1 - 1e-5
    assert rows["eight"]["looked_at"] == rows["act4"]["looked_at"] == pytest.approx(1)
    assert abs(math.log(rows["eight"]["over_full"])) < 0.02


@pytest.mark.parametrize(("name", "whole"), [("h2o(0.8,whole_layers=1)", 1), ("h2o_mix", 0)])
def test_heavy_hitters_attend_to_their_budget_and_the_new_token(measured, name, whole):
    """Budgets of 0.8 and 0.5 of 40 prompt tokens are 32 tokens in whole blocks. A whole layer attends to all."""
    row = by_name(measured[0])[name]
    contexts = np.arange(PROMPT, LENGTH - 1)
    of_layers = row["looked_at_by_layer"]
    assert of_layers[:whole] == row["cosine_by_layer"][:whole] == pytest.approx([1.0] * whole)
    assert of_layers[whole:] == pytest.approx([np.mean((32 + 1) / (contexts + 1))] * len(of_layers[whole:]), rel=1e-5)
    assert 0.3 < np.mean(row["cosine_by_layer"][whole:]) < 0.999


def test_a_selection_s_cosine_is_that_of_the_tokens_it_keeps(checkpoint, text_file, tmp_path):
    """In layer 0, queries and keys are those of the full cache. The kept tokens are those with the most attention in
    transformers, and the newest token. They alone determine the cosine of H2O's first decode step."""
    folder, model = checkpoint
    options = AccuracyOptions(
        folder, text_file, ("h2o(0.8,whole_layers=0)",), PROMPT + 2, PROMPT, 1, device="cpu", out=tmp_path
    )
    found = by_name(accuracy(options, quiet=True))["h2o(0.8,whole_layers=0)"]["cosine_by_layer"][0]
    with LLM(folder, "resident", device="cpu") as llm:
        ids = torch.tensor(read_texts(llm, text_file, PROMPT + 2, 1).ids)[:, :-1]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        (weights,) = model(ids, output_attentions=True).attentions[0]  # [H, T, T]
    heads = len(weights)
    groups = heads if model.config.model_type == "opt" else model.config.num_key_value_heads
    sums = weights[:, :PROMPT, :PROMPT].sum(1).view(groups, -1, PROMPT).sum(1)
    sums[:, PROMPT - 16 :] = math.inf  # the newest half of the budget
    kept = torch.zeros(groups, PROMPT + 1, dtype=torch.bool).scatter_(1, sums.topk(32).indices, True)
    kept[:, -1] = True
    full = weights[:, PROMPT].view(groups, heads // groups, -1)
    seen = full * kept[:, None]
    cosine = (full * seen).sum(-1) / (full.norm(dim=-1) * seen.norm(dim=-1))
    assert found == pytest.approx(float(cosine.mean()), rel=1e-4)


@one_model
def test_tables_figure_and_json_say_the_same(measured, capsys):
    result, out = measured
    _show(Report(quiet=False), result)
    said = " ".join(capsys.readouterr().out.split())
    prompt = result["prompt_tokens"]
    kept = 16 * math.ceil(prompt / 2 / 16)  # whole blocks
    assert f"h2o(0.5) keeps {kept} of {prompt} tokens here, {kept / result['length']:.1%} of a text" in said
    assert json.loads((out / "accuracy.json").read_text()) == result
    lines = (out / "accuracy.csv").read_text().splitlines()
    measures = ("over_full", "agreement", "cosine", "looked_at")
    columns = [f"{measure}{end}" for measure in measures for end in ("", "_low", "_high")]
    assert lines[0] == ",".join(["policy", "perplexity", *columns, "moved"])
    assert len(lines) == 1 + len(result["policies"])
    assert all(row["over_full_low"] <= row["over_full"] <= row["over_full_high"] for row in result["policies"])
    assert (out / "accuracy.png").stat().st_size > 1000


@one_model
def test_intervals_are_of_documents_and_of_pairs(measured):
    """Three texts of the first document count as one draw. The loss of the full cache cancels in each pair."""
    result, _ = measured
    rows, weights = by_name(result), result["texts_by_document"]
    assert weights == [3, 1]
    row, full = rows["h2o(0.8,whole_layers=1)"], rows["full_cache"]
    found = bootstrap.perplexity_ratio(row["logprob_by_document"], full["logprob_by_document"], weights)
    assert [row["over_full"], row["over_full_low"], row["over_full_high"]] == pytest.approx(list(found))
    ratios = np.exp(np.array(full["logprob_by_document"]) - row["logprob_by_document"])
    assert math.log(found.value) == pytest.approx(np.log(ratios) @ weights / 4) and row["over_full"] == pytest.approx(
        row["perplexity"] / full["perplexity"], rel=1e-5
    )
    assert row["agreement"] == pytest.approx(np.average(row["agreement_by_document"], weights=weights))


@one_model
def test_one_document_has_no_interval(checkpoint, text_file, tmp_path):
    options = AccuracyOptions(checkpoint[0], text_file, ("h2o(0.5)",), LENGTH, PROMPT, 1, device="cpu", out=tmp_path)
    row = by_name(accuracy(options))["h2o(0.5)"]
    assert row["over_full"] > 0 and row["over_full_low"] is row["over_full_high"] is row["cosine_low"] is None


@one_model
def test_predictions_use_the_share_that_infinigen_fetched(checkpoint, text_file, tmp_path):
    """accuracy.json holds the fetched share by alpha, for the layers that select. `simulate` reads it for a policy by
    name."""
    names = ("infinigen(alpha=0.01,cap=1.0)", "infinigen(alpha=0.1,cap=1.0)", ALL_CHOSEN)
    result = accuracy(AccuracyOptions(checkpoint[0], text_file, names, LENGTH, PROMPT, 2, device="cpu", out=tmp_path))
    few, many, every = (by_name(result)[name] for name in names)
    assert few["fetched"] == pytest.approx(few["looked_at_by_layer"][2]) and few["fetched"] < many["fetched"] < 1
    assert "alpha" not in every  # no threshold: cap says how many
    setting = Setting(Problem(shape=shape_by_name("opt-1.3b"), hardware=catalogue.load("t4")), 4, 512, 8)
    made = system(f"infinigen(alpha=0.1, expected={tmp_path / 'accuracy.json'})", setting)
    assert made.policy.selection.expected_fraction == pytest.approx(many["fetched"])


@one_model
def test_chunks_are_256_positions_and_average_to_the_whole(checkpoint, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("flexhybrid.jobs.accuracy.job.CHUNK_TOKENS", 16)
    options = AccuracyOptions(checkpoint[0], text_file, ("kv_only",), LENGTH, PROMPT, 2, device="cpu", out=tmp_path)
    result = accuracy(options, quiet=True)
    rows = [row for row in result["chunks"] if row["policy"] == "kv_only"]
    assert [(row["first"], row["end"]) for row in rows] == [(PROMPT, 48), (48, LENGTH)]
    whole = sum(math.log(row["perplexity"]) * (row["end"] - row["first"]) for row in rows) / (LENGTH - PROMPT)
    assert by_name(result)["kv_only"]["perplexity"] == pytest.approx(math.exp(whole), rel=1e-6)


@one_model
def test_texts_are_cut_within_documents_and_taken_evenly(checkpoint, text_file):
    with LLM(checkpoint[0], "resident", device="cpu") as llm:
        every, documents = read_texts(llm, text_file, 50, 99)
        assert documents.tolist() == [0, 0, 0, 0, 2]  # 200 // 49 and 90 // 49; the middle one is too short
        two = read_texts(llm, text_file, 50, 2)
        assert two.ids == [every[0], every[2]] and two.documents.tolist() == [0, 0]
        with pytest.raises(InputError, match="longest document has 200 tokens, a text 299"):
            read_texts(llm, text_file, 300, 1)


@one_model
def test_the_command_line_prints_one_json_object(checkpoint, text_file, tmp_path, capsys):
    arguments = ["accuracy", "--model", checkpoint[0], "--text", text_file, "--length", LENGTH, "--policies", "kv_only",
                 "--num-texts", 1, "--out", tmp_path, "--json"]  # fmt: skip
    assert main([str(argument) for argument in arguments]) == 0
    out, errors = capsys.readouterr()
    assert [row["policy"] for row in json.loads(out)["policies"]] == ["full_cache", "kv_only"] and not errors


@one_model
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--length", "97"], "may have 96 tokens"),
        (["--length", "50", "--prompt-tokens", "50"], "prompt of 50"),
        (["--policies", "kv_only", "kv_only"], "called 'kv_only'"),
        (["--policies", "uvm"], "cannot be run"),
        (["--text", "/nowhere"], "cannot read text file /nowhere"),
        (["--text", os.devnull], f"{os.devnull} is empty"),
        (["--policies", "nothing"], "unknown system"),
        (["--policies", "kvpr_row"], "flexhybrid profile"),
    ],
)
def test_wrong_options_are_refused_before_the_first_run(
    checkpoint, text_file, tmp_path, capsys, monkeypatch, changes, words
):
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path))  # where no profile is
    text = [] if "--text" in changes else ["--text", str(text_file)]
    assert main(["accuracy", "--model", str(checkpoint[0]), *text, "--out", str(tmp_path / "out"), *changes]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
