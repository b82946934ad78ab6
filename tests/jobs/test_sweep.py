"""The sweep: every point once, whatever kills it in between, and a table that does not tell."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.errors import InputError
from flexhybrid.jobs.sweep import grid as grids
from flexhybrid.jobs.sweep import job as sweep
from flexhybrid.jobs.sweep import journal as journals

ROOT = Path(__file__).resolve().parents[2]


def positive_number(value) -> float:
    """A number > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError("must be a number > 0")
    return float(value)


def share(value) -> float:
    """A number in 0..1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError("must be a share, 0 to 1")
    return float(value) + 0.0  # -0.0 is no other point


def text(value) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise InputError("must be a text")
    return value


KEYS = {
    "system": grids.one_of("system", ("flexgen", "kvpr", "hybrid")),
    "model": text,
    "batch": grids.positive_integer,
    "prompt_len": grids.positive_integer,
    "act_share": share,
    "budget": positive_number,
}
GRID = {"model": ["a", "b"], "batch": [1, 2, 3, 4], "prompt_len": [8, 16, 32]}


def evaluate(points: list[dict]) -> list[dict]:
    """Vectorised; of one model at a time; leaves a line per point in the file SWEEP_LOG, where it is set."""
    assert len({point["model"] for point in points}) == 1
    if log := os.environ.get("SWEEP_LOG"):
        with open(log, "a", encoding="utf-8") as file:
            file.writelines(f"{point['model']} {point['batch']} {point['prompt_len']}\n" for point in points)
    batch = np.array([point["batch"] for point in points])
    tokens_per_s = batch * 10.0 / np.array([point["prompt_len"] for point in points])
    return [{"tokens_per_s": value, "num_tokens": int(n)} for value, n in zip(tokens_per_s, batch)]


def stalls(points: list[dict]) -> list[dict]:
    """Waits to be killed once the log holds six points, where SWEEP_STALL is set."""
    if os.environ.get("SWEEP_STALL"):
        log = Path(os.environ["SWEEP_LOG"])
        if log.exists() and log.read_text().count("\n") >= 6:
            time.sleep(60)
    return evaluate(points)


def dies_at_batch_3(points: list[dict]) -> list[dict]:
    if any(point["batch"] == 3 for point in points):
        os._exit(7)
    return evaluate(points)


def interrupted_once(calls: list, points: list[dict]) -> list[dict]:
    calls.append(points)
    if len(calls) == 4:
        raise KeyboardInterrupt
    return evaluate(points)


def picky(points: list[dict]) -> list[dict]:
    if any(point["batch"] == 3 for point in points):
        raise InputError("batch 3 does not fit")
    return evaluate(points)


def broken(points: list[dict]) -> list[dict]:
    if points[0]["model"] == "b":
        raise ZeroDivisionError("no luck")
    return evaluate(points)


def model_of(point: dict) -> str:
    return point["model"]


def written(path: Path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def table(path: Path) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def all_points(tmp_path: Path, **more) -> list[dict]:
    return grids.read_points(written(tmp_path / "grid.json", {**GRID, **more}), KEYS)


def swept(points: list[dict], out: Path, function=evaluate, **options):
    options = {"workers": 1, "quiet": True, **options}
    return sweep.run_sweep(points, out, function, model_of, sweep.SweepOptions(**options))


# --- grids


@given(
    axes=st.fixed_dictionaries(
        {},
        optional={
            "batch": st.lists(st.integers(1, 9), min_size=1, max_size=4),
            "prompt_len": st.integers(1, 9),
            "act_share": st.lists(st.floats(0, 1), min_size=1, max_size=4),
            "system": st.lists(st.sampled_from(["flexgen", "kvpr"]), min_size=1, max_size=3),
        },
    ).filter(bool)
)
def test_points_are_the_product_without_repeats(tmp_path_factory, axes):
    path = written(tmp_path_factory.getbasetemp() / "grid.json", axes)
    lists = [list(dict.fromkeys(v if isinstance(v, list) else [v])) for v in axes.values()]
    expected = [dict(zip(axes, values)) for values in itertools.product(*lists)]
    assert grids.read_points(path, KEYS) == expected


def test_toml_with_several_grids_and_shared_keys(tmp_path):
    content = (
        'model = "m"\nbatch = [1, 2]\n[[grids]]\nprompt_len = 8\n[[grids]]\nbatch = [2, 3]\nprompt_len = [8, 16]\n'
    )
    found = grids.read_points(written(tmp_path / "g.toml", content), KEYS)
    assert [(p["model"], p["batch"], p["prompt_len"]) for p in found] == [
        ("m", 1, 8), ("m", 2, 8), ("m", 2, 16), ("m", 3, 8), ("m", 3, 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("g.json", {"bach": 1}, ["g.json", "'bach'", "batch"]),
        ("g.json", {"system": "flexgn"}, ["system", "'flexgn'", "flexgen"]),
        ("g.json", {"batch": []}, ["batch", "[]"]),
        ("g.json", {"batch": [4, 0]}, ["batch = 0", ">= 1"]),
        ("g.json", {"batch": [4, -2]}, ["batch = -2"]),
        ("g.json", {"batch": True}, ["batch = True"]),
        ("g.json", {"batch": "8"}, ["batch = '8'"]),
        ("g.json", {"batch": [[1, 2]]}, ["batch = [1, 2]"]),
        ("g.json", {"batch": {"a": 1}}, ["batch = {'a': 1}"]),
        ("g.json", {"batch": None}, ["batch = None"]),
        ("g.json", {"act_share": 1.5}, ["act_share = 1.5", "0 to 1"]),
        ("g.json", '{"budget": 1e999}', ["budget = inf", "finite"]),
        ("g.json", '{"budget": NaN}', ["NaN"]),
        ("g.json", '{"budget": 1' + "0" * 400 + "}", ["budget", "float"]),
        ("g.json", '{"batch": 1, "batch": 2}', ["'batch'", "more than once"]),
        ("g.json", '{"batch": [1,\n  2,, 3]}', ["line 2", "column 5"]),
        ("g.json", "[1]", ["table", "[1]"]),
        ("g.json", "{}", ["no keys", "batch"]),
        ("g.json", {"grids": []}, ["grids"]),
        ("g.json", {"grids": [{"batch": 1}, {"bathc": 1}]}, ["grids[1]", "'bathc'"]),
        ("g.json", "[" * 100_000, ["g.json"]),
        ("g.toml", "batch = 1\nmodel = = 2\n", ["line 2", "column 9"]),
        ("g.toml", "batch = [1,", ["line 1", "column 12"]),
        ("g.toml", "model = 1979-05-27", ["model = datetime.date"]),
        ("g.yaml", "batch: 1", [".json", ".yaml"]),
    ],
)  # fmt: skip
def test_wrong_grids_are_refused_by_name(tmp_path, name, content, words):
    with pytest.raises(InputError) as refused:
        grids.read_points(written(tmp_path / name, content), KEYS)
    for word in words:
        assert word in str(refused.value)
    assert name in str(refused.value)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=path.name):
            grids.read_points(path, KEYS)
    (tmp_path / "latin.json").write_bytes(b'{"model": "\xe9"}')
    with pytest.raises(InputError, match="latin.json: .*utf-8.*position 11"):
        grids.read_points(tmp_path / "latin.json", KEYS)


def test_too_many_points_are_refused_before_they_are_made(tmp_path):
    huge = {"batch": list(range(1, 3001)), "prompt_len": list(range(1, 3001))}
    with pytest.raises(InputError, match="9,000,000 points"):
        grids.read_points(written(tmp_path / "g.json", huge), KEYS)


def test_required_keys(tmp_path):
    with pytest.raises(InputError, match="lacks 'model'"):
        grids.read_points(written(tmp_path / "g.json", {"batch": 1}), KEYS, required=("batch", "model"))


# --- the table


def test_table_has_the_points_keys_first_and_every_point_in_order(tmp_path):
    out = tmp_path / "deep" / "out.csv"
    summary = swept(all_points(tmp_path), out, workers=2)
    assert (summary.num_points, summary.num_resumed, summary.num_errors, summary.path) == (24, 0, 0, out)
    expected = [
        f"{model},{batch},{prompt},{batch * 10.0 / prompt},{batch},"
        for model, batch, prompt in itertools.product(*GRID.values())
    ]
    lines = out.read_text().splitlines()
    assert lines[0] == "model,batch,prompt_len,tokens_per_s,num_tokens,error"
    assert lines[1:] == expected
    assert os.listdir(out.parent) == ["out.csv"]


def test_the_table_is_the_same_whatever_workers_and_chunks(tmp_path):
    points = all_points(tmp_path)
    outs = [tmp_path / f"{i}.csv" for i in range(4)]
    swept(points, outs[0])
    swept(points, outs[1], chunk=1)
    swept(points, outs[2], workers=2, chunk=5)
    swept(points, outs[3], chunk=1000)
    assert len({out.read_bytes() for out in outs}) == 1


def test_columns_do_not_depend_on_which_rows_came_first(tmp_path):
    points = all_points(tmp_path)
    late = partial(_one_more_column, "b")
    swept(points, tmp_path / "a.csv", late)
    swept(points[12:], tmp_path / "b.csv", late)
    assert list(table(tmp_path / "a.csv")[0])[3:] == ["tokens_per_s", "num_tokens", "extra", "error"]
    assert list(table(tmp_path / "b.csv")[0])[3:] == ["extra", "tokens_per_s", "num_tokens", "error"]


def _one_more_column(model: str, points: list[dict]) -> list[dict]:
    return [
        {**({"extra": 1} if point["model"] == model else {}), **row} for point, row in zip(points, evaluate(points))
    ]


def test_ten_thousand_points(tmp_path):
    points = all_points(tmp_path, batch=list(range(1, 101)), prompt_len=list(range(1, 51)))
    assert len(points) == 10_000
    summary = swept(points, tmp_path / "out.csv", workers=2)
    rows = table(tmp_path / "out.csv")
    assert summary.num_points == len(rows) == 10_000
    assert all(float(row["tokens_per_s"]) == int(row["batch"]) * 10 / int(row["prompt_len"]) for row in rows)


def test_points_that_cannot_be_served_become_rows(tmp_path):
    summary = swept(all_points(tmp_path), tmp_path / "out.csv", picky, chunk=7)
    rows = table(tmp_path / "out.csv")
    assert summary.num_errors == sum(row["batch"] == "3" for row in rows) == 6
    for row in rows:
        bad = row["batch"] == "3"
        assert row["error"] == ("batch 3 does not fit" if bad else "")
        assert (row["tokens_per_s"] == "") == bad


def test_there_are_as_many_workers_as_cores_and_no_more_than_jobs(tmp_path, monkeypatch, num_cores):
    """And those of this process's share of the cores, where the system tells."""
    asked = []

    def outcomes(points, jobs, evaluate, num_workers, engine):
        asked.append((num_workers, len(jobs)))
        return (outcome for outcome in ())

    monkeypatch.setattr(sweep, "_outcomes", outcomes)
    monkeypatch.setattr(sweep, "_write_table", lambda *table: None)
    points = all_points(tmp_path)
    for chunk in (len(points), 1):
        swept(points, tmp_path / "out.csv", workers=None, chunk=chunk, fresh=True)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    swept(points, tmp_path / "out.csv", workers=None, chunk=1, fresh=True)
    monkeypatch.delattr(os, "sched_getaffinity")
    swept(points, tmp_path / "out.csv", workers=None, chunk=1, fresh=True)
    assert [used for used, _ in asked] == [min(used, jobs) for used, (_, jobs) in zip([num_cores] * 3 + [3], asked)]
    assert asked[0][1] < 16 < asked[1][1]


@pytest.mark.parametrize("workers", [1, 2])
def test_another_exception_stops_with_its_words_and_its_point(tmp_path, workers):
    with pytest.raises(InputError, match="ZeroDivisionError: no luck.*'model': 'b'") as stopped:
        swept(all_points(tmp_path), tmp_path / "out.csv", broken, workers=workers, chunk=4)
    assert "out.csv.partial" in str(stopped.value)
    assert "Traceback" in "".join(stopped.value.__notes__)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    "rows, words",
    [
        (lambda points: [{"x": 1}], "1 rows for"),
        (lambda points: [{"x": [1]} for _ in points], "'x' = \\[1\\]"),
        (lambda points: [{"model": "other"} for _ in points], "model = 'other'"),
    ],
)
def test_rows_that_are_no_table_are_refused(tmp_path, rows, words):
    with pytest.raises(InputError, match=words):
        swept(all_points(tmp_path), tmp_path / "out.csv", rows)


def test_parquet_round_trip(tmp_path):
    pytest.importorskip("pyarrow")
    import pandas as pd

    points = all_points(tmp_path)
    swept(points, tmp_path / "out.csv", picky)
    swept(points, tmp_path / "out.parquet", picky)
    frame = pd.read_parquet(tmp_path / "out.parquet")
    assert list(frame["num_tokens"].dropna()) == [
        int(row["num_tokens"]) for row in table(tmp_path / "out.csv") if row["num_tokens"]
    ]
    pd.testing.assert_frame_equal(frame, pd.read_csv(tmp_path / "out.csv"), check_dtype=False)


def test_parquet_without_pyarrow_is_refused_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        swept(all_points(tmp_path), tmp_path / "out.parquet", partial(interrupted_once, [1, 2, 3]))


def test_outputs_that_cannot_be_written_are_refused_before_work(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.csv.partial").mkdir()
    for name in ("out.txt", "out", "folder.csv", "file/out.csv", "taken.csv"):
        with pytest.raises(InputError, match=name.split("/")[0]):
            swept(all_points(tmp_path), tmp_path / name, partial(interrupted_once, [1, 2, 3]))
    for workers in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="workers"):
            swept(all_points(tmp_path), tmp_path / "out.csv", workers=workers)


# Of stopped and continued sweeps


def evaluated_once(log: Path, num_points: int) -> bool:
    lines = log.read_text().splitlines()
    return len(lines) == len(set(lines)) == num_points


def test_ctrl_c_keeps_what_is_done_and_the_next_run_does_the_rest(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SWEEP_LOG", str(tmp_path / "log"))
    points = all_points(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        swept(points, tmp_path / "out.csv", partial(interrupted_once, []), chunk=3)
    assert "9 of 24 points are kept" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
    summary = swept(points, tmp_path / "out.csv", partial(interrupted_once, [0] * 9), chunk=5)
    assert summary.num_resumed == 9
    assert evaluated_once(tmp_path / "log", 24)
    monkeypatch.delenv("SWEEP_LOG")
    swept(points, tmp_path / "whole.csv")
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not (tmp_path / "out.csv.partial").exists()


def test_a_worker_that_dies_stops_the_sweep_and_costs_only_its_job(tmp_path):
    points = all_points(tmp_path)
    with pytest.raises(InputError, match=r"worker process died \(exit code 7\)"):
        swept(points, tmp_path / "out.csv", dies_at_batch_3, workers=2, chunk=1)
    kept = (tmp_path / "out.csv.partial").read_text().splitlines()
    assert 1 <= len(kept) < 25


KILLED = """
import sys
sys.path[:0] = {paths!r}
import test_sweep
from pathlib import Path
if __name__ == "__main__":
    folder = Path({folder!r})
    test_sweep.swept(
        test_sweep.all_points(folder), folder / "out.csv", test_sweep.stalls, workers={workers}, chunk=1
    )
"""


@pytest.mark.parametrize("workers, how", [(1, signal.SIGKILL), (2, signal.SIGINT)])
def test_a_killed_process_continues(tmp_path, monkeypatch, workers, how):
    out, log = tmp_path / "out.csv", tmp_path / "log"
    script = written(
        tmp_path / "killed.py",
        KILLED.format(paths=[str(ROOT), str(Path(__file__).parent)], folder=str(tmp_path), workers=workers),
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "SWEEP_LOG": str(log), "SWEEP_STALL": "1"},
    )
    partial_file = tmp_path / "out.csv.partial"
    while process.poll() is None and not (partial_file.exists() and partial_file.read_bytes().count(b"\n") > 5):
        time.sleep(0.005)
    os.killpg(process.pid, how)  # as Ctrl-C does: the whole group
    said = process.communicate(timeout=60)[1]
    if how == signal.SIGINT:
        assert "points are kept in" in said and said.count("Traceback") == said.count("KeyboardInterrupt") == 1
    kept = {json.loads(line)["point"] for line in partial_file.read_bytes().split(b"\n")[1:-1]}
    assert 3 <= len(kept) <= 7  # two workers may both have passed the sixth
    log.write_text("")
    points = all_points(tmp_path)
    monkeypatch.setenv("SWEEP_LOG", str(log))
    summary = swept(points, out, stalls)
    assert summary.num_resumed == len(kept)
    assert evaluated_once(log, 24 - len(kept))
    swept(points, tmp_path / "whole.csv")
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.fixture
def stopped(tmp_path):
    """A sweep's points, output and journal after 9 of 24."""
    points = all_points(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        swept(points, tmp_path / "out.csv", partial(interrupted_once, []), chunk=3)
    return points, tmp_path / "out.csv", tmp_path / "out.csv.partial"


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_line_is_done_again(stopped, tmp_path, cut):
    points, out, journal = stopped
    journal.write_bytes(journal.read_bytes()[:-cut])
    summary = swept(points, out, partial(interrupted_once, [0] * 9))
    assert summary.num_resumed == 8
    swept(points, tmp_path / "whole.csv")
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_after_a_torn_line_the_journal_can_be_resumed_again(stopped):
    points, out, journal = stopped
    journal.write_bytes(journal.read_bytes()[:-5])
    with pytest.raises(KeyboardInterrupt):
        swept(points, out, partial(interrupted_once, []), chunk=2)
    assert swept(points, out, partial(interrupted_once, [0] * 9)).num_resumed == 8 + 3 * 2


def test_a_torn_first_line_is_a_new_start(stopped):
    points, out, journal = stopped
    content = journal.read_bytes()
    for length in (0, 7, 60):
        journal.write_bytes(content[:length])
        assert swept(points, out).num_resumed == 0


def test_a_journal_of_another_grid_or_version_is_refused_unless_fresh(stopped, monkeypatch):
    points, out, journal = stopped
    before = journal.read_bytes()
    with pytest.raises(InputError, match="another grid.*--fresh"):
        swept(points[1:], out)
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "version_hash", lambda function: "newer")
        with pytest.raises(InputError, match="another version.*--fresh"):
            swept(points, out)
    with pytest.raises(InputError, match="another version.*--fresh"):
        swept(points, out, picky)  # another function
    assert journal.read_bytes() == before
    assert swept(points[1:], out, fresh=True).num_resumed == 0
    assert len(table(out)) == 23


def test_a_file_that_is_no_journal_is_left_alone(tmp_path):
    mine = written(tmp_path / "out.csv.partial", "my notes\n")
    with pytest.raises(InputError, match="not a sweep's journal"):
        swept(all_points(tmp_path), tmp_path / "out.csv")
    assert mine.read_text() == "my notes\n"


def test_a_changed_file_that_a_point_names_makes_another_grid(tmp_path):
    named = written(tmp_path / "hardware.json", {"rate": 1})
    points = [{"model": str(named), "batch": 1}]
    ids = [grids.point_id(point) for point in points]
    before = journals.grid_hash(points, ids)
    assert journals.grid_hash(points, ids) == before
    written(named, {"rate": 2})
    assert journals.grid_hash(points, ids) != before


def test_two_sweeps_of_one_output_do_not_mix(stopped):
    pytest.importorskip("fcntl")
    points, out, _ = stopped
    seen = []

    def second(points: list[dict]) -> list[dict]:
        with pytest.raises(InputError, match="another sweep is writing"):
            swept(points, out)
        seen.append(1)
        return evaluate(points)

    swept(points, out, second, fresh=True)
    assert seen and len(table(out)) == 24
