"""Test how lanes use CUDA's streams and events, and the steps of `make gpu`, without a GPU."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.bench.harness import Table
from experiments.gpu import parts
from flexhybrid.core.task import Task, Work
from flexhybrid.jobs.compare.job import _keeping_rows
from flexhybrid.runtime import cuda
from flexhybrid.runtime.clock import Clock, Lane
from flexhybrid.runtime.cuda import CudaClock, Events, Recorded
from flexhybrid.runtime.issuing import Issuer, StreamLane
from flexhybrid.runtime.process_settings import NO_TF32

TESTS = Path(__file__).parents[1]


class BrokenStream:
    """A stream of a failed device: each call raises."""

    def __init__(self, joined: list[str], name: str):
        self.joined, self.name = joined, name

    def enter(self) -> None: ...

    def wait(self, event) -> None: ...

    def record(self, timed: bool = True):
        return SimpleNamespace(synchronize=lambda: None)

    def synchronize(self) -> None:
        self.joined.append(self.name)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_the_first_error_of_a_device_is_raised_and_every_lane_joined():
    """After an error every call of the device raises, including those that end the run."""
    drained: list[str] = []

    def perform(task: Task) -> None:
        raise ValueError(f"{task.verb} broke first")

    issuer = Issuer()
    made = [StreamLane(name, perform, BrokenStream(drained, name), issuer) for name in ("compute", "h2d", "d2h")]
    interval = sys.getswitchinterval()
    with pytest.raises(ValueError, match="embed broke first"):
        Clock(made).run([Task(0, 0, 0, "embed", "compute", Work(), (), ())])
    assert drained == ["compute", "h2d", "d2h"]
    assert not issuer.lanes and not any(lane.lanes for lane in made)
    assert sys.getswitchinterval() == interval


class IdleStream:
    """A stream whose device works only while the host waits for it; it counts enqueued calls."""

    def __init__(self):
        self.enqueued = self.done = self.most = 0

    def enter(self) -> None: ...

    def enqueue(self, calls: int) -> int:
        self.enqueued += calls
        self.most = max(self.most, self.enqueued - self.done)
        return self.enqueued

    def record(self, timed: bool = True):
        at = self.enqueue(1)
        return SimpleNamespace(synchronize=lambda: setattr(self, "done", max(self.done, at)))


def test_a_stream_is_not_given_more_calls_than_it_takes_without_blocking(monkeypatch):
    """A stream takes about 1,000 calls; a host lane's lookahead would give more."""
    for lookahead, is_within in ((StreamLane.lookahead, True), (Lane.lookahead, False)):
        monkeypatch.setattr(StreamLane, "lookahead", lookahead)
        stream = IdleStream()

        def perform(_task, stream=stream):
            stream.enqueue(5)  # kernels or copies

        tasks = (Task(i, 0, 0, "work", "compute", Work(), (), ()) for i in range(4 * Lane.lookahead))
        Clock([StreamLane("compute", perform, stream, Issuer())]).run(tasks, keep_trace=False)
        assert (stream.most < 1000) is is_within and stream.enqueued == 4 * Lane.lookahead * 6


class Countable:
    """An event that can be recorded; the class counts events."""

    made = 0

    def __init__(self, **_):
        Countable.made += 1
        self.recorded = 0

    def record(self, stream) -> None:
        self.recorded += 1


def test_events_are_recorded_again_once_nobody_holds_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Countable)
    monkeypatch.setattr(Countable, "made", 0)
    events, stream = Events(), object()
    kept, waited_for = Recorded(events, stream, False), Recorded(events, stream, False)
    held = waited_for  # by a thread that is about to wait
    del waited_for
    assert Recorded(events, stream, False).event not in (kept.event, held.event)
    before = held.event
    del held
    assert {Recorded(events, stream, False).event for _ in range(100)} <= {before, *events.free[False]}
    assert Countable.made == 3
    Recorded(events, stream, True)
    assert Countable.made == 4 and [len(free) for free in events.free.values()] == [2, 1]  # each kind by itself
    monkeypatch.setattr(Events, "MOST", 5)
    many = [Recorded(events, stream, True) for _ in range(20)]
    del many
    assert len(events.free[True]) == 5


class TimedEvent:
    """An event with CUDA's times: differences are float32 milliseconds."""

    def __init__(self, at_s: float):
        self.at_s = at_s

    def elapsed_time(self, other: TimedEvent) -> float:
        return float(np.float32((other.at_s - self.at_s) * 1e3))


def test_a_trace_of_hours_keeps_its_microseconds(monkeypatch):
    """The clocks of host and device drift by 20 us/s, at times more; marks are taken during the run."""
    now = SimpleNamespace(perf_counter=lambda: now.s, s=0.0)

    def device_s(host_s: float) -> float:
        return 1000.0 + host_s * (1 + 2e-5) + 1e-3 * np.sin(host_s / 1e3)

    monkeypatch.setattr(cuda, "time", now)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(CudaClock, "_mark", lambda self: cuda.Mark(TimedEvent(device_s(now.s)), now.s))
    clock, happened = CudaClock(torch.device("cuda")), []
    for now.s in np.arange(0, 3 * 3600, 7.3).tolist():
        clock.keep_up()
        happened.append((now.s, TimedEvent(device_s(now.s))))
    assert len(clock._marks) > 250
    assert max(abs(clock.seconds(event) - at_s) for at_s, event in happened) < 5e-6


def by_second_api() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize("ask", [lambda: torch.set_float32_matmul_precision("high"), by_second_api, lambda: None])
def test_the_rounding_of_products_is_restored_by_the_api_that_set_it(ask):
    def state():
        try:
            first = torch.get_float32_matmul_precision()
        except RuntimeError:
            first = "refused"
        return first, torch.backends.cuda.matmul.fp32_precision

    earlier = torch.backends.cuda.matmul.fp32_precision
    try:
        ask()
        before = state()
        with NO_TF32.held():
            assert state() == ("highest", "ieee")
        assert state() == before
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = earlier


# ---- make gpu


def test_every_test_that_needs_a_gpu_is_run_by_make_gpu():
    """Marks are read from the syntax tree."""
    marked, imports = {}, set()
    for file in TESTS.glob("**/*.py"):
        tree = ast.parse(text := file.read_text(encoding="utf-8"))
        if "mark.cuda" in text and file != Path(__file__):
            marked[file] = any(
                isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "pytest.mark"
                for node in ast.walk(tree)
            )
            if marked[file]:
                names = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
                imports |= {ast.unparse(node).split()[1].split(".")[0] for node in names}
    assert set(parts.cuda_test_files()) == {file for file, is_marked in marked.items() if is_marked}
    assert len(parts.cuda_test_files()) > 2 and "hypothesis" not in imports


def test_rows_are_in_their_files_as_soon_as_they_are_measured(tmp_path):
    table = Table("a machine", tmp_path / "bench.json")
    table.renew("gpu")
    for value in (1.0, 2.0):
        table.at_least(f"row {value}", value, 0, "x")
        again = Table()
        again.read(tmp_path / "bench.json", {"gpu"})
        assert again.rows == table.rows and len(again.rows) == value
    keep = _keeping_rows(tmp_path)
    for name in ("kv_only", "hybrid"):
        policy = SimpleNamespace(name=name, share=lambda representation: 0.5)
        keep(SimpleNamespace(policy=policy, median_tokens_per_s=3.0, decode_tokens_per_s=[3.0]))
        assert (tmp_path / "speed.csv").read_text().splitlines()[-1] == f"{name},0.5,3.0,[3.0]"
