"""Test the cascade paper's tables about confidence, and the numbers of our own cascades next to them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from experiments import reference
from experiments.reproduce import registry
from experiments.reproduce.cascade import confidence as cascade
from experiments.reproduce.experiment import Experiment
from experiments.studies import cascade_study
from experiments.studies.trials import OPTIONS, Trial
from flexhybrid.cascade.routes import CascadeModel
from flexhybrid.cascade.thresholds.curve import Answers
from flexhybrid.cascade.thresholds.fit import Fitted


@pytest.fixture(scope="module")
def done() -> dict[str, Experiment]:
    return {name: registry.run(name) for name in registry.names("cascade.confidence")}


def test_rows_say_what_the_reference_says(done):
    known = reference.load("cascade_headlines").set_index("id")
    for one in done.values():
        for row in one.rows.itertuples():
            if match := re.match(r"sh\d{3}", row.source):
                assert (row.paper, row.unit, row.role) == tuple(known.loc[match[0], ["value", "unit", "role"]])


def test_what_the_tables_say_of_themselves(done):
    rows = done["cascade-table3"].rows.set_index("what")
    assert rows.loc["ViT AP: energy saved at most, with free smaller models", "ours"] == pytest.approx(1 / 0.171)
    # T5 EO: 0.40 x 78.2 + 0.423 x 84.2 + 0.092 x 87.1 + 0.085 x 90.5
    assert rows.loc["T5 EO: accuracy if the confidences said nothing", "ours"] == pytest.approx(82.6, abs=0.05)
    read = rows.loc["T5 EO: parameters read a request, of the giant's, without skips", "ours"]
    assert read == pytest.approx((60 + 0.6 * 220 + 0.177 * 770 + 0.085 * 3000) / 3000)
    impossible = [text for text in done["cascade-table3"].mismatches if "routing alone" in text]
    assert [re.findall(r"[\d.]+ x\.", text) for text in impossible] == [["5.85 x."], ["2.13 x."], ["1.67 x."]]
    useless = next(text for text in done["cascade-table3"].mismatches if "Algorithm 2" in text)
    for name in ("T5-S", "GPT-XS", "GPT-S", "GPT-XL"):  # those that answer 0 % under AP
        assert name in useless
    reach = next(text for text in done["cascade-table1"].mismatches if "1-3 %" in text)
    assert "13, 3, 5, 7, 21 %" in reach


def test_our_own_numbers_are_the_study_s(done):
    rows = done["cascade-table1"].rows.set_index("what")
    for name in cascade.STUDIES:
        study = cascade.study(name)
        alone, first = np.array(study["alone"]), np.array(study["contribution"])
        assert alone.shape == first.shape == (study["num_seeds"], len(study["models"]))
        words = name.replace("_", " ")
        gain = rows.loc[f"{words}: joint accuracy less the best single model", "ours"]
        assert gain == pytest.approx(100 * np.mean(first.sum(axis=1) - alone.max(axis=1))) and gain >= 0
        for modes in study["modes"].values():
            for one in modes:
                assert sum(one["answered"]) == pytest.approx(1) and one["visited"][0] == 1
                places = [study["models"].index(model) for model in one["models"]]
                cost = np.dot(one["visited"], np.array(study["cost_j"])[places]) / study["cost_j"][-1]
                assert one["cost_of_largest"] == pytest.approx(cost)


def made_trial() -> Trial:
    """Return two halves of made-up answers of three models."""
    generator = np.random.default_rng(1)
    confidence = generator.random((3, 400)) * 0.99
    correct = generator.random((3, 400)) < np.array([[0.5], [0.7], [0.95]]) * (0.3 + 0.7 * confidence)
    models = tuple(CascadeModel(name, energy_j=cost) for name, cost in (("a", 1.0), ("b", 4.0), ("c", 20.0)))
    fitted = Fitted(models, "classification", None, correct[:, :200], confidence[:, :200], np.full((3, 2), 0.1))
    held_out = Answers(correct[:, 200:], confidence[:, 200:], np.array([1.0, 4.0, 20.0]))
    return Trial(fitted, held_out, np.full((3, 2), 0.1))


def test_a_study_is_plain_numbers_of_held_out_requests():
    one = made_trial()
    record = json.loads(json.dumps(cascade_study.study([one, one])))
    correct = one.held_out.correct
    assert record["alone"][0] == correct.mean(axis=1).tolist()
    by_hand = [correct[0].mean(), (correct[1] & ~correct[0]).mean(), (correct[2] & ~correct[0] & ~correct[1]).mean()]
    assert record["contribution"][1] == pytest.approx(by_hand)
    for name, options in OPTIONS.items():
        route = one.route(options)
        assert record["modes"][name][0]["accuracy"] == pytest.approx(route.correct.mean())
        assert record["modes"][name][0]["cost_of_largest"] == pytest.approx(route.cost / 20)


def test_digits_are_split_without_overlap_and_training_repeats(tmp_path):
    pytest.importorskip("sklearn")
    import torch

    from experiments.training import digits

    data = digits.splits(3)
    assert [len(part.x) for part in data.values()] == [800, 500, 497]
    rows = {part.x[i].numpy().tobytes() for part in data.values() for i in range(len(part.x))}
    assert len(rows) == 1797
    first, again = (digits.train("cnn-xs", data["training"], seed=5, epochs=1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    digits.export(first, tmp_path / "x.pt2")
    from flexhybrid.cascade.torch_models import TorchModel

    x = data["held out"].x[:7]
    found = TorchModel("x", str(tmp_path / "x.pt2")).predict(x.numpy())
    np.testing.assert_allclose(found.logits, digits.logits_of(first, x), rtol=1e-5, atol=1e-6)
    assert found.outputs == found.logits[:, 0].argmax(axis=1).tolist()


def test_multiply_adds_by_hand():
    """cnn-xs: 64 pixels x 9 x 2 channels, 16 x 9 x 2 x 4, 4 channels x 4 pixels x 10 classes."""
    from experiments.training import digits

    assert digits.multiply_adds("cnn-xs") == 64 * 9 * 2 + 16 * 9 * 2 * 4 + 16 * 10
