"""Test what a job reports while it runs, and how it stops on a signal."""

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import warnings
from functools import partial

import pytest
from runs import line, run
from tqdm import tqdm

from flexhybrid import LLM, SamplingParams
from flexhybrid.batch import answers as answers_module
from flexhybrid.batch.answers import AnswerFile
from flexhybrid.batch.openai import Refused
from flexhybrid.batch.replies import error_line
from flexhybrid.core.errors import InputError
from flexhybrid.core.policy import Policy
from flexhybrid.core.workload import Workload
from flexhybrid.jobs import progress as progress_module
from flexhybrid.jobs.progress import BAR_OF_ANSWERS, Progress, lasting_streams
from flexhybrid.runtime.engine import RunControl
from flexhybrid.runtime.executor import Executor


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Return the time in seconds; tests set it."""
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_the_prediction_s_before_the_first_token(clock):
    progress = Progress(1000, "tokens", "tok", quiet=True, predicted_s=100.0, answers=10)
    assert progress.seconds_left() == 100.0
    clock[0] = 30.0
    assert progress.seconds_left() == 70.0 and "prefill" in progress.state() and "01:10 left" in progress.state()
    clock[0] = 200.0
    assert progress.seconds_left() is None and "left" not in progress.state()  # it was wrong


def test_unequal_steps_have_no_predicted_end(clock):
    progress = Progress(53, "reproduce", "experiment", quiet=True)
    progress.advance(49)
    clock[0] = 30.0
    assert "left" in progress.state()
    progress.steps_alike = False
    assert progress.seconds_left() is None and progress.state() == "1.6/s"


@pytest.mark.parametrize("answers, state", [(5, ", reading the prompts (prefill)"), (None, "")])
def test_progress_is_printed_even_without_tokens(answers, state, monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "FIRST_S", 1e-3)
    monkeypatch.setattr(progress_module, "PLAIN_S", 2e-3)
    told = threading.Event()

    def shown(text, **_to) -> None:
        lines.append(text)
        if len(lines) == 2:
            told.set()

    monkeypatch.setattr(progress_module, "print", shown, raising=False)
    lines: list[str] = []
    with Progress(100, "tokens", "tok", quiet=False, answers=answers):
        assert told.wait(30)
    assert set(lines) == {f"tokens: 0 of 100{state}"}


def test_an_answer_that_ends_early_lowers_the_total(clock):
    """10 answers may have 1,000 tokens each; 9 ended after 100 tokens each, in 9 s."""
    progress = Progress(10_000, "tokens", "tok", quiet=True, answers=10)
    for clock[0] in range(1, 10):
        progress.advance(100)
        progress.finished(900)
    assert (progress.total, progress.done) == (1900, 9) and progress.seconds_left() == pytest.approx(10.0)


@pytest.mark.parametrize("start_s, later", [(0.0, 1.0), (30.0, 1.0), (0.0, 0.25), (0.0, 3.0)])
def test_the_time_left_corrects_itself(clock, start_s, later):
    """The rate is 100 tokens/s, and ``later`` times that after a fifth of the tokens."""
    progress, clock[0], told = Progress(10_000, "tokens", "tok", quiet=True), start_s, []
    while progress.count < 10_000:
        clock[0] += 0.5
        progress.advance(min(50 if progress.count < 2000 else int(50 * later), 10_000 - progress.count))
        told.append((clock[0], progress.seconds_left()))
    settled = start_s + 10 if later == 1.0 else 42  # 20 s before the change, and as long after it
    for when, left in told:
        if when > settled and clock[0] - when > 1:
            assert 1 / 1.5 < left / (clock[0] - when) < 1.5


def test_a_bar_of_answers_fits_80_columns(clock, monkeypatch):
    """The line has the time left, the rate, and the answers done and refused; the bar itself has ten columns."""
    progress = Progress(170_000, "tokens", "tok", quiet=True, predicted_s=29.0, failed=36, answers=1883)
    clock[0], progress.terminal = 14.0, True
    progress.advance(47_000)
    progress.finished(0)
    clock[0] = 20.0
    shown = {"n": 47_000, "total": 170_000, "elapsed": 20, "ncols": 80, "prefix": "tokens", "unit": "tok"}
    line = tqdm.format_meter(**shown, bar_format=BAR_OF_ANSWERS, postfix=progress.state())
    assert line.endswith("2350.0/s, 1/1,883 done, 36 refused") and len(line) == 80 and len(line.split("|")[1]) > 9
    progress.terminal, progress.predicted_rate = False, 5862.1
    assert re.match(r"00:\d\d left, 2350.0/s \(predicted 5862.1\), 1/1,883 done", progress.state())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="terminals of this system are others")
def test_a_terminal_that_has_no_size_shows_the_bar(monkeypatch):
    """A terminal that a script opened has 0 lines of 0 columns."""
    controller, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with Progress(10, "steps", "step", quiet=False) as progress:
            progress.advance(4)
            progress.bar.refresh()
    shown = b""
    with contextlib.suppress(OSError):  # Linux's end of a terminal whose other side is closed
        while piece := os.read(controller, 4096):  # a read gives what was written at a time
            shown += piece
    os.close(controller)
    assert b"steps:  40%" in shown


@pytest.mark.parametrize(
    "num_answers, words",
    [
        (1, ["1 answered, 0 refused, 1 left of 2 lines", "give the same command again to continue"]),
        (0, ["no answer could be there yet", "smaller --max-num-seqs"]),
    ],
)
def test_a_stop_does_not_wait_for_an_endless_iteration(tiny, tmp_path, capsys, monkeypatch, num_answers, words):
    """Finished answers are kept and summed up as after a stop between two iterations; without any the reason is
    given."""
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(progress_module, "STOP_S", 0.05)

    def answer(self, workload, open_request, completed, callbacks, on_trace=None):
        for place in range(num_answers):
            generated, _ = open_request(place)
            generated.token_ids = [5]
            completed(place, generated)
            callbacks.on_tokens(2)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
        raise AssertionError("it was not interrupted")

    monkeypatch.setattr(LLM, "answer", answer)
    (tmp_path / "in.jsonl").write_text("\n".join(line(f"r{i}", prompt=[5], max_tokens=3) for i in range(2)))
    assert run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", tiny) == 130
    told, warned = capsys.readouterr()
    assert all(of in told for of in words) and "stopping after this iteration, or in" in warned
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("schedule", ["column", "row"])
def test_the_computed_share_of_prompts_is_shown(tiny, monkeypatch, schedule):
    """Two layers of three mini-batches: the share grows by 1/6 with each finished mini-batch of a layer."""
    progress, shares, perform = Progress(100, "tokens", "tok", True, answers=3), [], Executor.perform

    def looks(self, task):
        if task.verb == "finish" and task.iteration == 0:
            shares.append(progress.first_share and progress.first_share())
        perform(self, task)

    monkeypatch.setattr(Executor, "perform", looks)
    policy = Policy("small", schedule=schedule, max_mini_batch_tokens=32)
    with LLM(tiny, policy, device="cpu", dtype="float32") as llm:
        llm.answer(
            Workload.uniform(3, 20, 2),
            lambda _request: llm.codec.open([5] * 20, SamplingParams(max_tokens=2, ignore_eos=True), 0),
            lambda *_: None,
            RunControl(on_start=lambda share: setattr(progress, "first_share", share)),
        )
    assert shares == [done / 6 for done in range(6)]
    assert "reading the prompts (prefill), 100%" in progress.state()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_that_meets_a_finalizer_is_not_lost(capfd, monkeypatch, times, fails):
    """Python ignores exceptions in finalizers and in callbacks of C code. Their caller may fail because of that."""
    monkeypatch.setattr(progress_module, "STOP_S", 0.05 if times == 1 else 60.0)
    hook, entered = sys.unraisablehook, threading.Event()

    class Finalized:
        def __del__(self):
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            entered.wait(0.2)

    ends = pytest.raises(KeyboardInterrupt) if times == 2 else contextlib.nullcontext()
    with ends, progress_module.stop_on_signal() as stop:
        waits = Finalized()
        del waits
        if fails:
            raise RuntimeError("what has called it")
        entered.wait(60)
        raise AssertionError("it was not interrupted")
    assert stop.asked and stop.overdue == (times == 1) and sys.unraisablehook is hook
    assert "ignored" not in capfd.readouterr().err


@pytest.mark.parametrize("at_once", [1, 7, 10**6])
def test_a_full_disk_keeps_every_line_that_fitted(tmp_path, monkeypatch, at_once):
    """This holds for any free room, and any sizes of the pieces that the system writes."""
    lines = [error_line(number, Refused("c", "text " * number)) for number in range(1, 5)]
    write, data = os.write, b"".join(lines)
    for room in range(0, len(data) + 1, 13):
        path, left = tmp_path / f"{room}", [room]

        def full(descriptor, piece, left=left):
            if not left[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = write(descriptor, piece[: min(left[0], at_once)])
            left[0] -= taken
            return taken

        file = AnswerFile(path)
        file.clear()
        with monkeypatch.context() as patch:
            patch.setattr(answers_module.os, "write", full)
            file.append(lines)
        assert path.read_bytes() == data[: data.rfind(b"\n", 0, room) + 1]
        file.finish()  # there is room again
        file.close()
        assert path.read_bytes() == data


def interrupted_at(line: int, function) -> bool:
    """Raise KeyboardInterrupt before the n-th line of the output file's code; return True if it has n lines."""
    left = [line]

    def trace(frame, event, _argument):
        if frame.f_code.co_filename != answers_module.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(earlier)
    return False


@pytest.mark.parametrize("call", ["append", "finish"])
def test_an_interrupt_at_any_line_writes_no_answer_twice(tmp_path, monkeypatch, call):
    """A written answer that was not counted yet was once written again at the end."""
    lines = [error_line(number, Refused("c", "text")) for number in range(1, 6)]
    monkeypatch.setattr(answers_module, "RETRY_S", 0.0)
    write, met = os.write, set()

    def in_two_pieces(descriptor, piece):
        return write(descriptor, piece[:100])

    for place in range(1, 200):
        file = AnswerFile(tmp_path / f"{place}")
        file.clear()
        file.append(lines[:2])
        with monkeypatch.context() as patch:
            if call == "finish":
                patch.setattr(answers_module.os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "")))
                file.append(lines[2:])
            patch.setattr(answers_module.os, "write", in_two_pieces)
            came = interrupted_at(place, partial(file.append, lines[2:]) if call == "append" else file.finish)
        file.finish()
        file.close()
        written = file.path.read_bytes()
        assert written in (b"".join(lines), b"".join(lines[:2]))
        met.add(written)
        if not came:
            break
    assert place > 10 and len(met) == (2 if call == "append" else 1)


def test_an_output_that_something_else_changes_is_not_written(tmp_path):
    file = AnswerFile(tmp_path / "out.jsonl")
    file.clear()
    file.append([b'{"id": 1}\n'])
    with open(file.path, "ab") as other:
        other.write(b"of another program\n")
    with pytest.raises(InputError, match="another process has changed the file"):
        file.append([b'{"id": 2}\n'])
    file.close()


def test_a_warning_of_a_command_is_one_line_without_source():
    usual = warnings.formatwarning
    with lasting_streams():
        assert (
            warnings.formatwarning("the index is ignored", UserWarning, "x.py", 3)
            == "flexhybrid: the index is ignored\n"
        )
    assert warnings.formatwarning is usual
