"""Test the gate: which changes of rows it refuses, when the file is stale, and how it is renewed."""

from __future__ import annotations

import multiprocessing
import signal

import numpy as np
import pandas as pd
import pytest

from experiments import reference
from experiments.reproduce import gate, paper, registry
from experiments.reproduce.experiment import Experiment, table
from experiments.reproduce.paper import KVPR, compared, far_off, unexplained
from flexhybrid.core.errors import InputError


def experiment(ours, name: str = "kvpr-table2", **of_all) -> Experiment:
    """Return rows of FlexGen and KVPR in turn; the paper's value is 100."""
    rows = [
        {
            "what": f"{system}, batch {i}",
            "paper": 100.0,
            "ours": value,
            "role": "validate",
            "source": "Table 2",
            **of_all,
        }
        for i, value in enumerate(ours)
        for system in ("FlexGen", "KVPR")
    ]
    return Experiment(name=name, paper="KVPR", title="t", description="d", rows=table(rows))


def rows(ours, **of_all) -> pd.DataFrame:
    return compared([experiment(ours, **of_all)])


BEFORE = rows([110.0, 120.0, 70.0])  # errors of 10, 20 and 30 %, of either system


def test_a_row_is_of_the_system_it_names_first():
    systems = {what: KVPR.system_of(what) for what in ("speedup of KVPR over Accelerate", "FlexGen, batch 1")}
    assert list(systems.values()) == ["KVPR", "FlexGen"]
    assert KVPR.system_of("most gain over FlexGen, paper rule") == "KVPR"  # its own
    assert KVPR.system_of("cache traffic of FlexGen over hybrid_full") == "FlexGen"


@pytest.mark.parametrize(
    "ours, is_worse", [([110, 120.5, 70], False), ([110, 121.2, 70], True), ([150, 120, 70], True)]
)
def test_a_median_may_grow_by_a_twentieth(ours, is_worse):
    found = gate.worse(BEFORE, rows(np.array(ours, float)))
    assert bool(found) == is_worse
    if is_worse:
        assert len(found) == 2 and found[0].startswith("kvpr FlexGen: median |error| 20.0% -> ")
        assert "kvpr-table2, FlexGen, batch" in found[0] and "KVPR, batch" not in found[0]


def test_the_kept_rows_say_what_the_reference_says():
    """Rows that name a headline have its paper value, unit and role; all of KVPR's results are there."""
    kept = gate.kept()
    ids = kept["source"].str.extract(r"^(\w\w\d{3}) \(", expand=False)
    for name in ("kvpr", "capture", "infinigen"):
        known = reference.load(f"{name}_headlines").set_index("id")
        found = kept[ids.isin(known.index)]
        said = known.loc[ids[found.index], ["value", "unit", "role"]]
        assert len(found) > 5 and found[["paper", "unit", "role"]].to_numpy().tolist() == said.to_numpy().tolist()
    assert set(reference.rows("kvpr_headlines", kind="result")["id"]) <= set(ids)


def test_a_better_row_is_no_complaint_but_stale():
    after = rows([105.0, 110.0, 70.0])
    assert gate.worse(BEFORE, after) == []
    assert len(gate.stale(BEFORE, after)) == 4 and gate.stale(BEFORE, BEFORE) == []


@pytest.mark.parametrize("after", [rows([110.0, np.nan, 70.0]), rows([110.0, 120.0])])
def test_a_row_that_runs_no_more_is_named(after):
    found = gate.worse(BEFORE, after)
    assert any("no number any more: kvpr-table2, KVPR, batch" in text for text in found)


def test_rows_aside_are_not_judged_but_must_be_what_the_file_says():
    aside = rows([110.0, 120.0, 70.0], aside="arithmetic")
    assert gate.worse(aside, rows([150.0, 150.0, 150.0], aside="arithmetic")) == []
    some = BEFORE.assign(aside=["arithmetic"] * 4 + [""] * 2)
    assert "FlexGen, batch 0 (Table 2) +10.0% -> not judged" in gate.worse(BEFORE, some)[0]
    assert gate.stale(BEFORE, aside)[0].endswith("aside is arithmetic, in the file ")


def test_a_row_beyond_30_percent_has_its_explanation_and_no_other_row_has(monkeypatch):
    one = experiment([150.0, 120.0])
    assert unexplained([one]) == [
        f"beyond 30 % without an explanation: kvpr-table2, {system}, batch 0" for system in ("FlexGen", "KVPR")
    ]
    said = {"FlexGen, batch 0": "{error:+.0%} where KVPR has {row[KVPR, batch 1]:.0f}"}
    said |= dict.fromkeys(("KVPR, batch 0", "KVPR, batch 1"), "so")
    texts = {("kvpr-table2", what): why for what, why in said.items()}
    monkeypatch.setattr(paper, "explanations", lambda key: texts if key == "kvpr" else {})
    assert far_off([one])[0]["why"] == "+50% where KVPR has 120"
    assert unexplained([one]) == ["explained, but not beyond 30 %: kvpr-table2, KVPR, batch 1"]
    aside = experiment([150.0], aside="arithmetic")
    assert far_off([aside]) == []


def test_the_command_refuses_what_is_worse_until_it_is_accepted(monkeypatch, tmp_path, capsys):
    file = tmp_path / "summary.csv"
    monkeypatch.setattr(gate, "FILE", file)
    with pytest.raises(InputError, match=r"summary\.csv"):
        gate.kept()
    other = compared([experiment([99.0], name="capture-table3")])
    file.write_text(gate.as_csv(pd.concat([other, BEFORE])), encoding="utf-8")
    monkeypatch.setattr(gate.registry, "run_all", lambda names: [experiment([150.0, 150.0, 70.0])])
    text = file.read_text(encoding="utf-8")
    assert gate.main(["--only", "kvpr"]) == 2 and file.read_text(encoding="utf-8") == text
    said = capsys.readouterr().out
    assert "kvpr KVPR: median" in said and "beyond 30 % without an explanation: kvpr-table2, KVPR, batch 1" in said
    assert gate.main(["--only", "kvpr", "--accept"]) == 0
    assert gate.kept()["ours"].tolist()[2:] == [150.0, 150.0, 150.0, 150.0, 70.0, 70.0]
    assert gate.kept()["ours"].tolist()[0] == 99.0  # another paper's rows stay


def test_a_stop_ends_the_workers_instead_of_waiting_for_their_experiments(monkeypatch):
    workers = []

    def stop(_futures):
        workers.extend(multiprocessing.active_children())
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "as_completed", stop)
    with pytest.raises(KeyboardInterrupt):
        registry.run_all(["kvpr-table2", "capture-fig12"], workers=2, quiet=True)
    assert [worker.exitcode for worker in workers] == [-signal.SIGTERM] * 2
