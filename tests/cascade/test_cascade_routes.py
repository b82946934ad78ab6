"""Test cascades: strict and exact files, and routes of requests."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.walks import walk

from flexhybrid.cascade.routes import ANSWERED, Cascade, CascadeModel, Expected, Skip
from flexhybrid.core.errors import InputError


def model(name: str, energy_j: float = 1.0) -> CascadeModel:
    return CascadeModel(name, energy_j=energy_j)


def of_four(**changes) -> Cascade:
    settings = {
        "models": tuple(model(name, 2.0**place) for place, name in enumerate("abcd")),
        "thresholds": (0.9, 0.8, 0.7),
        "skips": ((Skip(0.2, 3), Skip(0.5, 2)), (), ()),
        "expected": Expected((0.5, 0.2, 0.2, 0.1), (1.0, 0.3, 0.3, 0.2), 0.9, 100),
    }
    return Cascade(**{**settings, **changes})


@given(st.data())
def test_many_requests_take_the_routes_that_each_takes_alone(data):
    num_models = data.draw(st.integers(1, 5))
    unit = st.floats(0, 1)
    thresholds = data.draw(st.lists(unit, min_size=num_models - 1, max_size=num_models - 1))
    skips = []
    for i, threshold in enumerate(thresholds):
        bounds = sorted({b * threshold for b in data.draw(st.lists(unit, max_size=3))} - {0.0})
        skips.append(tuple(Skip(b, data.draw(st.integers(i + 1, num_models - 1))) for b in bounds))
    cascade = Cascade(tuple(model(str(i)) for i in range(num_models)), tuple(thresholds), tuple(skips))
    rows = data.draw(st.lists(st.lists(unit, min_size=num_models, max_size=num_models), max_size=8))
    confidence = np.array(rows).reshape(-1, num_models).T
    answered, visited = cascade.walk(confidence)
    routes = walk(confidence, thresholds, skips)
    assert answered.tolist() == [route[-1] for route in routes]
    assert [np.flatnonzero(row).tolist() for row in visited.T] == routes


def test_no_confidence_goes_on_to_the_next_model():
    assert list(of_four().next_model(0, np.array([np.nan, 0.95, 0.9, 0.6, 0.3, 0.1]))) == [
        *(1, ANSWERED, ANSWERED),
        *(1, 2, 3),
    ]
    assert list(of_four().next_model(3, np.array([np.nan, 0.0]))) == [ANSWERED, ANSWERED]


def test_the_file_gives_back_what_was_written(tmp_path):
    cascade, path = of_four(), tmp_path / "cascade.json"
    cascade.save(path)
    assert Cascade.load(path) == cascade
    assert json.loads(path.read_text())["skips"][0] == [{"below": 0.2, "to": "d"}, {"below": 0.5, "to": "c"}]
    assert np.dot(cascade.expected.visited, cascade.costs) == pytest.approx(1 + 0.3 * 2 + 0.3 * 4 + 0.2 * 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"thresholds": (0.9, 1.2, 0.7)}, "threshold of b is 1.2"),
        ({"thresholds": (-0.1, 0.8, 0.7)}, "threshold of a"),
        ({"thresholds": (0.9, float("nan"), 0.7)}, "threshold of b must be a finite number"),
        ({"thresholds": (0.9, 0.8)}, "need 3 thresholds"),
        ({"models": (), "thresholds": ()}, "at least one model"),
        ({"models": tuple(model(name) for name in "abca")}, "called 'a'"),
        ({"skips": ((Skip(0.95, 2),), (), ())}, "at most its threshold 0.9"),
        ({"skips": ((Skip(0.5, 2), Skip(0.2, 3)), (), ())}, "must grow"),
        ({"skips": ((), (Skip(0.2, 1),), ())}, "not a larger model"),
        ({"cost": "carbon"}, "unknown cost 'carbon'"),
        ({"task": "translation"}, "unknown task"),
        ({"top_k": 1}, "top_k"),
        ({"x_dtype": "text"}, "x_dtype is 'text'"),
        ({"x_dtype": "str"}, "x_dtype is 'str'"),
        ({"expected": Expected((0.5, 0.2, 0.2, 0.2), (1, 1, 1, 1), 0.9)}, "sum to 1.1"),
    ],
)
def test_impossible_fields_are_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        of_four(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.update(speed=1), "unknown field of a cascade 'speed'"),
        (lambda record: record.pop("thresholds"), "'thresholds' is missing"),
        (lambda record: record.update(version=2), "version must be 1"),
        (lambda record: record["models"][0].update(temperature=0), "temperature of a"),
        (lambda record: record["models"][0].update(energy_j="2 J"), "energy_j of a"),
        (lambda record: record["skips"][0][0].update(to="z"), "unknown model"),
        (lambda record: record.update(thresholds=0.5), "thresholds must be a list"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_name(change, words, tmp_path):
    record, path = of_four().to_dict(), tmp_path / "cascade.json"
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=words) as error:
        Cascade.load(path)
    assert str(path) in str(error.value)
