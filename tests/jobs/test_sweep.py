"""Test `flexhybrid sweep`: every point is computed once, even if the sweep is stopped in between."""

from __future__ import annotations

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexhybrid.core.errors import InputError
from flexhybrid.jobs.sweep import grid as grids
from flexhybrid.jobs.sweep import table as sweep

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
    """Return the rows of points; append a line per point to the file SWEEP_LOG if that is set."""
    if log := os.environ.get("SWEEP_LOG"):
        with open(log, "a", encoding="utf-8") as file:
            file.writelines(f"{point['model']} {point['batch']} {point['prompt_len']}\n" for point in points)
    return [{"tokens_per_s": point["batch"] * 10.0 / point["prompt_len"]} for point in points]


def stalls(points: list[dict]) -> list[dict]:
    """Evaluate points, but wait to be killed after the first six if SWEEP_STALL is set."""
    if os.environ.get("SWEEP_STALL") and any(point["model"] == "b" or point["batch"] > 2 for point in points):
        time.sleep(600)
    return evaluate(points)


def dies_at_batch_3(points: list[dict]) -> list[dict]:
    if any(point["batch"] == 3 for point in points):
        os._exit(7)
    return evaluate(points)


def never(points: list[dict]) -> list[dict]:
    raise AssertionError("nothing is to be evaluated")


def picky(points: list[dict]) -> list[dict]:
    why = {"error": "batch 3 does not\nfit"}
    return [why if point["batch"] == 3 else row for point, row in zip(points, evaluate(points))]


def widening(points: list[dict]) -> list[dict]:
    """Return rows that have one more column from each batch size on."""
    rows = zip(points, evaluate(points))
    return [row | {f"from {batch}": 1.5 for batch in (2, 3) if batch <= point["batch"]} for point, row in rows]


def written(path: Path, content) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def table(path: Path) -> list[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def all_points(tmp_path: Path, **more) -> list[dict]:
    return grids.read_points(written(tmp_path / "grid.json", {**GRID, **more}), KEYS)


def swept(points: list[dict], out: Path, function=evaluate, part=None, **options):
    """Run a sweep in this process, ``part`` points at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "MAX_PART", part or sweep.MAX_PART)
        return sweep.run_sweep(points, out, function, **{"workers": 1, "quiet": True, **options})


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
        ("g.json", {"batch": {"a": 1}}, ["'batch.a'"]),
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
)
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
    points = itertools.product(*GRID.values())
    expected = [f"{model},{batch},{prompt},{batch * 10.0 / prompt}," for model, batch, prompt in points]
    lines = out.read_text().splitlines()
    assert lines == ["model,batch,prompt_len,tokens_per_s,error", *expected]
    assert os.listdir(out.parent) == ["out.csv"]


def test_the_table_does_not_depend_on_workers_and_parts(tmp_path):
    """Some columns appear only in later rows."""
    points = all_points(tmp_path)
    outs = [tmp_path / f"{i}.csv" for i in range(3)]
    swept(points, outs[0], widening)
    swept(points, outs[1], widening, part=1)
    swept(points, outs[2], widening, workers=2, part=2)
    assert len({out.read_bytes() for out in outs}) == 1
    assert list(table(outs[0])[0])[3:] == ["tokens_per_s", "from 2", "from 3", "error"]
    assert [row["from 3"] for row in table(outs[0])] == 2 * (6 * [""] + 6 * ["1.5"])


def test_points_that_cannot_be_served_become_rows(tmp_path):
    summary = swept(all_points(tmp_path), tmp_path / "out.csv", picky, part=7)
    rows = table(tmp_path / "out.csv")
    assert summary.num_errors == sum(row["batch"] == "3" for row in rows) == 6
    for row in rows:
        bad = row["batch"] == "3"
        assert row["error"] == ("batch 3 does not fit" if bad else "")
        assert (row["tokens_per_s"] == "") == bad
    assert swept(all_points(tmp_path), tmp_path / "out.csv", never).num_errors == 6


def test_the_number_of_workers_is_bounded_by_cores_and_parts(tmp_path, monkeypatch, num_cores):
    asked = []

    def pool(num_workers, context, prepare):
        asked.append(num_workers)
        return SimpleNamespace(map=map, shutdown=lambda cancel_futures: None)

    monkeypatch.setattr(sweep, "ProcessPoolExecutor", pool)
    points = all_points(tmp_path)
    for part in (12, 1):
        swept(points, tmp_path / "out.csv", workers=None, part=part, fresh=True)
    parts = 24 if num_cores == 16 else 8 * num_cores  # of the part of size 12: at least as many as for 8 a worker
    assert asked == [min(num_cores, parts)] * 2 * (num_cores > 1)


def test_outputs_that_cannot_be_written_are_refused_before_work(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").write_text("")
    for name in ("out.parquet", "out", "folder.csv", "file/out.csv"):
        with pytest.raises(InputError, match=name.split("/")[0]):
            swept(all_points(tmp_path), tmp_path / name, never)
    for workers in (0, 1.5, True):
        with pytest.raises(InputError, match="workers"):
            swept(all_points(tmp_path), tmp_path / "out.csv", workers=workers)


# --- stopped and continued sweeps


def test_a_table_cut_at_any_byte_continues(tmp_path):
    """A kill may leave such a file."""
    points, out = all_points(tmp_path, model=["ä,", 'q"\n'], prompt_len=[8, 16]), tmp_path / "out.csv"
    swept(points, out, picky)
    whole = out.read_bytes()
    start = whole.index(b"\n") + 1
    for size in (0, *range(start, len(whole))):
        out.write_bytes(whole[:size])
        assert swept(points, out, picky).num_resumed == max(0, whole[:size].count(b"\n") - 1)
        assert out.read_bytes() == whole


def test_existing_points_are_skipped_in_any_order(tmp_path, monkeypatch):
    points, out, log = all_points(tmp_path), tmp_path / "out.csv", tmp_path / "log"
    swept(points[3:20:2], out)
    monkeypatch.setenv("SWEEP_LOG", str(log))
    assert swept(points, out, widening).num_resumed == 9
    assert len(log.read_text().splitlines()) == 15
    rows = table(out)
    assert len(rows) == 24 and {(row["model"], row["batch"], row["prompt_len"]) for row in rows} == {
        (point["model"], str(point["batch"]), str(point["prompt_len"])) for point in points
    }
    assert all(float(row["tokens_per_s"]) == int(row["batch"]) * 10.0 / int(row["prompt_len"]) for row in rows)
    assert swept(points[:4], out, never).num_resumed == 4 and len(table(out)) == 24


def test_a_worker_that_dies_stops_the_sweep(tmp_path):
    points = all_points(tmp_path)
    with pytest.raises(InputError, match="worker process died.*same command continues .*out.csv"):
        swept(points, tmp_path / "out.csv", dies_at_batch_3, workers=2, part=1)
    assert swept(points, tmp_path / "out.csv").num_resumed <= 6
    assert len(table(tmp_path / "out.csv")) == 24


KILLED = """
import sys
sys.path[:0] = {paths!r}
import test_sweep
from pathlib import Path
if __name__ == "__main__":
    folder = Path({folder!r})
    points = test_sweep.all_points(folder)
    test_sweep.swept(points, folder / "out.csv", test_sweep.stalls, workers={workers}, part=1)
"""


def living(group: int) -> list[int]:
    """Return the processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # gone
            continue
        found += [int(stat.parent.name)] if int(own) == group and state != "Z" else []
    return found


@pytest.mark.parametrize("workers, how", [(2, signal.SIGINT), (2, signal.SIGKILL)])
def test_a_killed_process_continues(tmp_path, workers, how):
    out = tmp_path / "out.csv"
    script = written(
        tmp_path / "killed.py",
        KILLED.format(paths=[str(ROOT), str(Path(__file__).parent)], folder=str(tmp_path), workers=workers),
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "SWEEP_STALL": "1"},
    )
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") > 6):
        time.sleep(0.005)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as Ctrl-C does: the whole group
    else:
        process.kill()  # alone: the workers end by themselves
    said = process.communicate(timeout=60)[1]
    while Path("/proc").exists() and living(process.pid):
        time.sleep(0.005)
    if how == signal.SIGINT:
        assert said.count("Traceback") == said.count("KeyboardInterrupt") == 1
    points = all_points(tmp_path)
    assert swept(points, out, stalls).num_resumed == 6
    swept(points, tmp_path / "whole.csv")
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_other_files_are_refused_unless_fresh(tmp_path):
    points, out = all_points(tmp_path), tmp_path / "out.csv"
    swept(points, out)
    before = out.read_bytes()
    others = [{"act_share": 1, **point} for point in points]
    cells = (before.replace(b",error\n", b"\n"), before.replace(b",5.0,\n", b",5.0\n"), before[:-30] + b'x"\ry,\n')
    for asked, content in [
        (others, before),
        *((points, c) for c in (b"my notes\n", b"my notes", b"\xff\0\r\n", *cells)),
    ]:
        out.write_bytes(content)
        with pytest.raises(InputError, match=r"out.csv is not a table of this grid's keys \(.*--overwrite"):
            swept(asked, out, never)
        assert out.read_bytes() == content
    assert swept(others, out, fresh=True).num_resumed == 0
    assert len(table(out)) == 24


def test_two_sweeps_of_one_output_do_not_mix(tmp_path):
    pytest.importorskip("fcntl")
    points, out, seen = all_points(tmp_path), tmp_path / "out.csv", []

    def second(points: list[dict]) -> list[dict]:
        with pytest.raises(InputError, match="another sweep is writing"):
            swept(points, out)
        seen.append(1)
        return widening(points)

    swept(points, out, second, part=3)
    assert len(seen) == 8 and len(table(out)) == 24
