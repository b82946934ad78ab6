"""Test the runner of ``make gpu`` with parts that need no GPU: order, limits, and when results are written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.bench.harness import Table
from experiments.gpu import parts, runner
from experiments.gpu.runner import Chosen, Part, choose
from flexhybrid.core.errors import InputError

PROGRAM = """
import sys, time
from experiments.gpu import runner
from experiments.gpu.runner import Part, main

def works(table):
    table.tell("first row", 1, "x", **table.beside())
    print("said by works")

def fails(table):
    table.tell("before", 1, "x")
    raise RuntimeError("a part's own\\nerror")

def refuses(table, option, seconds):
    from flexhybrid.core.errors import InputError
    raise InputError(f"refused {option}")

def hangs(table):
    import signal, subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    table.tell("kept", child.pid, "x")
    print("said by hangs")
    time.sleep(1000)

def smoke(table):
    sys.exit(3)

def tells(table):
    import os
    table.tell("without graphs", runner.WITHOUT_GRAPHS in os.environ, "")

PARTS = {name: Part(f"__main__.{name}", {"": 1.0}) for name in ("works", "fails", "hangs", "smoke", "tells")}
PARTS["refuses"] = Part("__main__.refuses", {"a": 1.0, "b": 900.0})
runner.gpu_name = lambda: "A GPU"
runner.MARGIN_S, runner.END_S, runner.PATIENCE = 1.0, 0.2, float(sys.argv[1])
if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], PARTS, [sys.executable, *sys.argv[:2]]))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run the program with parts in its own file; return the ended process, its outcomes, and rows by file."""
    program, out = tmp_path / "parts.py", tmp_path / "out"
    program.write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(runner.ROOT), os.environ.get("PYTHONPATH")])))

    def run(*arguments: str, patience: str = "30"):
        command = [sys.executable, str(program), patience, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=runner.ROOT)
        read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in out.glob("*.json")}
        rows = {name: held["rows"] for name, held in read.items() if name != "run"}
        return done, read.get("run", []), rows

    return run


def test_parts_run_in_order_and_what_does_not_fit_is_named(start):
    """A part that raises or refuses leaves a row, and the others go on."""
    done, outcomes, rows = start("--time-limit", "100", "refuses:b,a", "fails", "works")
    assert [outcome["part"] for outcome in outcomes] == ["refuses:b", "refuses:a", "fails", "works"]
    skipped, refused, failed, worked = outcomes
    assert skipped["skipped"].startswith("takes about 900 s") and "refuses:b: skipped" in done.stdout
    assert (refused["exit_code"], failed["exit_code"], worked["exit_code"]) == (1, 1, 0) and done.returncode == 1
    assert rows["refuses-a"]["refuses:a"]["error"] == "refused a" and "refuses-b" not in rows
    assert (
        list(rows["fails"]) == ["before", "fails"] and rows["fails"]["fails"]["error"] == "RuntimeError: a part's own"
    )
    assert rows["works"]["first row"]["gpu"] == "NVML is not there"
    assert "said by works" in done.stdout and "Traceback" in done.stdout


def test_a_part_that_hangs_is_killed_with_its_processes_and_keeps_its_rows(start):
    began = time.monotonic()
    done, outcomes, rows = start("--time-limit", "600", "hangs", "works", patience="2")
    assert "said by hangs" in done.stdout
    assert time.monotonic() - began < 100  # not the limit
    assert outcomes[0]["timed_out"] and outcomes[1]["exit_code"] == 0
    state = runner.Path("/proc", str(int(rows["hangs"]["kept"]["value"])), "stat")
    while state.exists() and state.read_text().split()[2] != "Z":  # until it is gone, or a zombie
        pass


def test_parts_behind_a_smoke_that_fails_have_no_graphs(start):
    for before, without in (("fails", 0), ("smoke", 1)):
        _, outcomes, rows = start("--time-limit", "100", before, "tells")
        assert outcomes[0]["exit_code"] and rows["tells"]["without graphs"]["value"] == without


def test_input_that_is_refused(start, capsys):
    for arguments, said in (
        (("nothing",), "nothing"),
        (("refuses:c",), "'c'"),
        (("--time-limit", "1"), "--time-limit"),
    ):
        done, outcomes, _ = start(*arguments)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr and not outcomes


class Clock:
    """Time that only the parts advance."""

    def __init__(self, monkeypatch, takes):
        self.now, self.limits, self.takes = 1000.0, [], iter(takes)
        monkeypatch.setattr(runner.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(runner, "run_limited", self.run)

    def run(self, command, log, seconds):
        self.limits.append(seconds)
        self.now += min(next(self.takes), seconds)
        return 0


def test_the_program_ends_before_its_limit_whatever_a_part_takes(tmp_path, monkeypatch):
    """By hand: 100 - 15 s are available. A part of 30 s may take twice that; of the last 25 s, 5 s are for ending."""
    clock = Clock(monkeypatch, [1e9, 1e9])
    chosen = [Chosen("a", "", 30.0), Chosen("b", "", 26.0), Chosen("c", "", 20.0), Chosen("d", "", 5.1)]
    assert runner.run_parts(chosen, tmp_path, [], 100.0) == 0
    assert clock.limits == [60.0, 20.0] and clock.now == 1000 + 80 <= 1000 + 100 - runner.MARGIN_S
    outcomes = json.loads((tmp_path / "run.json").read_text())
    assert ["skipped" in outcome for outcome in outcomes] == [False, True, False, True]
    clock = Clock(monkeypatch, [1.0] * 4)
    runner.run_parts(chosen, tmp_path, [], None)
    assert clock.limits == [300.0, 260.0, 200.0, 51.0]  # without a limit, ten times as long


#: The three calls that 15 minutes on a GPU have room for, and the seconds of each.
CALLS = {
    300: "--time-limit 280 smoke attend mix:long,at-once",
    330: "--time-limit 310 mix:streamed peers:m3,m2,m1,18",
    210: "--time-limit 195 resident overlap:48 partition:48",
}


def test_the_three_calls_fit_into_their_limits_and_are_in_the_docs():
    documented = (runner.ROOT / "docs" / "on-a-gpu.md").read_text(encoding="utf-8")
    for text in CALLS.values():
        _, limit, *names = text.split()
        chosen = choose(names, parts.PARTS)
        assert sum(part.estimate_s for part in chosen) <= float(limit) - runner.MARGIN_S, text
        assert f"python3 -m experiments.gpu {text}" in documented
    every = choose([], parts.PARTS)
    assert len(every) == sum(len(part.estimates) for part in parts.PARTS.values())
    assert all(f"| {part.name}" in documented for part in every)


def test_names_and_options():
    known = {"a": Part("", {"": 1.0}), "b": Part("", {"x": 2.0, "y": 3.0})}
    assert [part.full_name for part in choose(["b", "a", "b:y"], known)] == ["b:x", "b:y", "a", "b:y"]
    for wrong in ("c", "b:z", "a:x", "b:"):
        with pytest.raises(InputError):
            choose([wrong], known)


def test_results_go_to_the_gpus_folder_without_out(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "gpu_name", lambda: "NVIDIA H200, 141 GB")
    for name in ("OUT", "FLEXHYBRID_CACHE", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # what the program sets is taken back
        monkeypatch.delenv(name)
    asked = []
    monkeypatch.setattr(runner, "run_parts", lambda chosen, folder, command, limit_s: asked.append(folder) or 0)
    assert runner.main([], {"a": Part("", {"": 1.0})}, []) == 0
    assert asked == [tmp_path / "experiments" / "results" / "nvidia-h200-141-gb"] and asked[0].is_dir()


def test_rows_are_in_their_file_as_soon_as_they_are_measured(tmp_path):
    """This includes figures without a bar and failures; each has the values measured with it."""
    table = Table("a machine", tmp_path / "part.json", lambda: {"gpu": len(table.rows)})
    for index, add in enumerate((lambda: table.tell("a", 1, "x"), lambda: table.failed("b", "why", batch=3))):
        add()
        rows = json.loads((tmp_path / "part.json").read_text())["rows"]
        assert len(rows) == index + 1 and [row["gpu"] for row in rows.values()] == list(range(index + 1))
    assert rows["a"]["ok"] and rows["a"]["bar"] is None
    assert not rows["b"]["ok"] and rows["b"]["error"] == "why" and rows["b"]["batch"] == 3


def test_a_part_begins_without_rows_and_sigterm_ends_it_by_way_of_every_finally(tmp_path, monkeypatch):
    handlers = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append((number, handler)))
    monkeypatch.setattr(sys.modules[__name__], "noop", lambda table: None, raising=False)
    monkeypatch.setattr(runner, "gpu_name", lambda: "A GPU")
    part = Part(f"{__name__}.noop", {"": 1.0})
    (tmp_path / "noop.json").write_text("rows of an earlier run")
    assert runner.run_inside(Chosen("noop", "", 1.0), {"noop": part}, tmp_path, 1.0) == 0
    assert json.loads((tmp_path / "noop.json").read_text())["rows"] == {}
    ((number, handler),) = handlers
    with pytest.raises(SystemExit) as ended:
        handler(number, None)
    assert number == signal.SIGTERM and ended.value.code == runner.TIMED_OUT
