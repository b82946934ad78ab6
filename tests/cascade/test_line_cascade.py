"""Test the cascade on lines of code: its requests, their cost, and bounds for any router."""

import itertools
import json

import numpy as np
import pytest

from experiments import token_ids
from experiments.studies import line_cascade
from flexhybrid import shipped
from flexhybrid.cascade.models import ModelOutputs
from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.curve import Answers
from flexhybrid.cascade.thresholds.search import SearchOptions
from flexhybrid.core.model.shape import shape_of_checkpoint


def test_the_stored_requests_are_those_of_their_names():
    requests = line_cascade.read_requests()
    of_file = {file: len(list(group)) for file, group in itertools.groupby(requests, lambda request: request.file)}
    assert list(of_file) == sorted(of_file) and len(of_file) >= 15  # each file once, its requests together
    assert all(20 <= count <= 120 for count in of_file.values())
    for request in requests:
        assert "\n" not in request.answer and request.prompt.split("\n")[-1].strip()
    for request in requests[::40]:
        assert len(token_ids(request.answer)) == 1 + line_cascade.ANSWER_TOKENS  # behind </s>
        assert len(token_ids(request.prompt)) <= 64


def test_a_prompt_costs_the_multiply_adds_of_the_checkpoint_s_matrices():
    config = json.loads((shipped.QWEN3 / "config.json").read_text())
    hidden, ffn, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (config["head_dim"] * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    matrices = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * ffn
    pairs = 7 * 8 / 2  # of 7 tokens: each with itself and those before
    expected = config["num_hidden_layers"] * (7 * matrices + 2 * pairs * queries) + hidden * vocab
    assert line_cascade.multiply_adds(shape_of_checkpoint(shipped.QWEN3), 7) == pytest.approx(expected, rel=1e-6)


def drawn(num: int, seed: int) -> Answers:
    generator = np.random.default_rng(seed)
    return Answers(
        generator.random((3, num)) < [[0.3], [0.5], [0.7]], generator.random((3, num)), np.array([1, 4, 9.0])
    )


def test_the_bounds_are_those_of_brute_force():
    """Each request is answered by the first model, or by it and one other."""
    for seed in range(20):
        answers = drawn(5, seed)
        num_largest = int(answers.correct[-1].sum())
        costs = np.array([1.0, 5.0, 10.0])
        ways = [
            (answers.correct[list(way), range(5)].sum(), costs[list(way)].sum())
            for way in itertools.product(range(3), repeat=5)
        ]
        most = max(right for right, _ in ways)
        everything = line_cascade.all_knowing(answers)
        assert everything.correct.sum() == most
        assert everything.cost.sum() == min(cost for right, cost in ways if right == most)
        enough = line_cascade.all_knowing(answers, as_the_largest=True)
        assert most >= enough.correct.sum() >= num_largest
        assert enough.cost.sum() == min(cost for right, cost in ways if right >= num_largest)
        perfect = line_cascade.knowing_the_smaller(answers)
        assert perfect.correct.sum() == most
        assert perfect.cost.sum() == everything.cost.sum() + 9 * (~answers.correct.any(axis=0)).sum()


def made_answers(num_files: int = 12, each: int = 30) -> line_cascade.AnsweredLines:
    """Return three models that are surer when they are right, on files of two types of lines."""
    generator, num = np.random.default_rng(2), num_files * each
    hard, labels = generator.random(num), generator.integers(0, 2, size=(num, 1))
    predictions = []
    for skill in (0.4, 0.6, 0.8):
        right = generator.random(num) < np.clip(1.4 * skill - hard * 0.6, 0, 1)
        chosen = np.where(right, labels[:, 0], 1 - labels[:, 0])
        logits = np.zeros((num, 1, 2))
        logits[np.arange(num), 0, chosen] = 3 * (1 - hard) + generator.random(num)
        predictions.append(ModelOutputs(chosen.tolist(), logits, np.ones((num, 1), dtype=bool)))
    models = [CascadeModel(name, energy_j=cost) for name, cost in (("a", 1.0), ("b", 4.0), ("c", 20.0))]
    files = np.repeat(np.arange(num_files), each)
    return line_cascade.AnsweredLines(models, predictions, labels, files, np.where(hard < 0.5, "easy", "hard"))


def test_each_file_is_judged_once_by_thresholds_of_others():
    answers = made_answers()
    folds = answers.folds()
    assert (np.sum(folds, axis=0) == 1).all()
    for fold in folds:
        assert not set(answers.files[fold]) & set(answers.files[~fold])
        trial = answers.trial(fold)
        assert trial.fitted.correct.shape[1] + trial.held_out.num_requests == len(fold)
    judged, kept = line_cascade.by_cascade([answers.trial(fold) for fold in folds], folds, SearchOptions())
    fold, trial = folds[1], answers.trial(folds[1])
    route = trial.route(SearchOptions())
    assert (judged.correct[fold] == route.correct).all() and judged.cost[fold].mean() == pytest.approx(route.cost)
    assert len(kept) == line_cascade.NUM_FOLDS and all(names[-1] == "c" for names in kept)


def test_a_study_of_lines_is_plain_numbers_with_intervals_over_files():
    answers = made_answers()
    study = json.loads(json.dumps(line_cascade.line_study(answers)))
    ways = study["ways"]
    assert ways["c alone"]["gained_points"] == [0, 0, 0] and ways["c alone"]["cost_of_largest"] == [1, 1, 1]
    for way in ways.values():
        for figure in ("gained_points", "cost_of_largest"):
            value, low, high = way[figure]
            assert low <= value <= high
        assert way["gained_points"][0] == pytest.approx(100 * (way["accuracy"] - ways["c alone"]["accuracy"]))
    assert ways["all-knowing"]["accuracy"] >= max(way["accuracy"] for way in ways.values())
    enough = ways["all-knowing, as accurate as the largest"]["cost_of_largest"][0]
    assert enough <= ways["all-knowing"]["cost_of_largest"][0] <= ways["perfect confidence"]["cost_of_largest"][0]
    surest = np.array(list(study["surest"].values()))
    assert surest.shape == (5, 3) and (surest[0, 0] > ways["a alone"]["accuracy"])
    assert sum(row["requests"] for row in study["types"].values()) == study["num_requests"] == 360
