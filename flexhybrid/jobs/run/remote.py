"""``flexhybrid run --engine ray``: Ray Data reads the input and holds a pool of actors with an executor each.

    the job's lines, longest first ──batches──▶ read (where the input is) ──▶ actors ──pieces──▶ the job's one writer

A batch is what one executor runs in one wave; its answers come back in pieces while it runs. A batch whose actor dies
is done again by the next actor in its place. Nothing hangs on that for correctness: what has an answer takes no second
one, and what is left when all batches are through is sent out again.
"""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa
import ray

from flexhybrid.batch.answers import PENDING
from flexhybrid.batch.openai import Request, answer_line
from flexhybrid.batch.requests import format_of, reader
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Hardware
from flexhybrid.core.policy import Policy
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.progress import Progress, StopAsked
from flexhybrid.jobs.ray_cluster import ENVIRONMENT, MAX_RETRIES, Crew
from flexhybrid.jobs.run.answering import answer_pending, load_weights
from flexhybrid.jobs.run.forecast import WINDOW, Forecast
from flexhybrid.llm import LLM, RequestOutput

if TYPE_CHECKING:
    from flexhybrid.jobs.run.job import Job

HEARTBEAT_S = 1.0  #: between pieces, by prediction, where no answer is complete
HEARTBEAT_ITERATIONS = 32  #: where nothing is predicted, and at most

#: A batch on its way to be read: line numbers, and where in the input each line starts and ends.
BATCH = pa.schema([(name, pa.list_(pa.int64())) for name in ("numbers", "starts", "ends")])
#: What has been read.
LINES = pa.schema([("numbers", pa.list_(pa.int64())), ("lines", pa.list_(pa.large_binary()))])
#: What an actor gives, several times a batch: complete answers with their tokens, and the tokens of all its requests
#: since the piece before; what people should know; why it cannot go on.
PIECE = pa.schema([
    ("numbers", pa.list_(pa.int64())), ("lines", pa.list_(pa.large_binary())), ("tokens", pa.list_(pa.int64())),
    ("generated", pa.int64()), ("note", pa.string()), ("error", pa.string()),
])  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What every actor must know to answer as this process would."""

    model: Path
    policy: Policy
    device: str
    dtype: str
    hardware: Hardware | None
    link_gb_per_s: float | None
    budgets: dict[str, int | None]
    disk_dir: Path | None
    disk_gb_per_s: float | None
    layer_bytes: dict[str, int]  #: tier -> bytes that the layers' weights were planned to take
    form: str
    url: str
    sampling: dict
    seed: int
    created: int
    heartbeat: int  #: iterations


def answer_pending_on(crew: Crew, job: Job, found: Forecast, progress: Progress, stop: StopAsked) -> None:
    """Answer until nothing is pending or a stop is asked for, on the actors of a cluster.

    Raises InputError for what an actor cannot do, and for a cluster that fails; what is written is kept.
    """
    setting = _setting(job, found)
    with _named(job.lines) as path:
        while len(pending := job.pending()) and not stop.asked:
            job.check_input_unchanged()
            try:
                with contextlib.closing(_pieces(crew, setting, path, _batches(job, pending, crew.size))) as pieces:
                    for piece in pieces:
                        _take(job, piece, progress)
                        job.check_input_unchanged()
                        if stop.asked:
                            break
            except ray.exceptions.RayError as error:
                reason = str(error).strip().splitlines()[-1]
                raise InputError(
                    f"the Ray cluster failed: {reason}; what is answered is kept, the same command goes on"
                ) from error
            if not stop.asked and len(job.pending()) == len(pending):
                raise InputError("the Ray cluster took all requests and answered none of them")


@contextlib.contextmanager
def _named(lines: BinaryIO) -> Iterator[Path]:
    """The lines as a file with a name, which another process can open: a column's values have none."""
    if isinstance(lines.name, str):
        yield Path(lines.name).resolve()
        return
    with tempfile.NamedTemporaryFile() as copy:
        lines.seek(0)
        shutil.copyfileobj(lines, copy)
        copy.flush()
        yield Path(copy.name)


def _setting(job: Job, found: Forecast) -> Setting:
    llm, options = job.llm, job.options
    heartbeat = HEARTBEAT_ITERATIONS
    if found.first_wave:
        iterations = int(job.census.max_tokens[job.pending()[0]])  # the longest come first
        heartbeat = max(1, min(heartbeat, round(HEARTBEAT_S * iterations / found.first_wave.seconds)))
    budgets = dict(llm.budgets)
    if llm.device.type == "cuda":
        budgets["device"] = options.budgets.get("device")  # what is free on a GPU its own actor sees
    return Setting(
        options.model.resolve(), llm.policy, llm.device.type, llm.dtype, llm.hardware, llm.link_gb_per_s, budgets,
        options.disk_dir and options.disk_dir.resolve(), options.disk_gb_per_s, found.layer_bytes,
        format_of(options.input, options.format), job.url, options.sampling, options.seed, job.created, heartbeat,
    )  # fmt: skip


def _batches(job: Job, pending: np.ndarray, actors: int) -> Iterator[pa.Table]:
    """The pending lines in the order of the work: waves, but small enough that every actor has its part."""
    most = min(WINDOW, math.ceil(len(pending) / actors))
    offsets, start = job.census.offsets, 0
    while start < len(pending):
        window = pending[start : start + most]
        count, _ = job.llm.first_wave(job.workload(window))
        places = window[:count]
        yield pa.table([[(places + 1).tolist()], [offsets[places].tolist()], [offsets[places + 1].tolist()]], BATCH)
        start += count


def _pieces(crew: Crew, setting: Setting, path: Path, batches: Iterator[pa.Table]) -> Iterator[dict]:
    """What the actors give, as it comes."""
    ray.data.DataContext.get_current().target_max_block_size = 1  # each piece at once, not 128 MiB of them together
    dataset = ray.data.from_arrow(list(batches))
    common = {"batch_size": 1, "batch_format": "pyarrow"}
    dataset = dataset.map_batches(
        _read, fn_args=(path,), num_cpus=0,  # the actors hold all CPUs
        label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()}, concurrency=1, **common,
    )  # fmt: skip
    with warnings.catch_warnings():  # for max_task_retries Ray has no other name yet; setup.py says which Ray that is
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = dataset.map_batches(
            Actor, fn_constructor_args=(setting,), num_cpus=crew.cpus, num_gpus=crew.gpus or None,
            compute=ray.data.ActorPoolStrategy(size=crew.size, max_tasks_in_flight_per_actor=1),
            runtime_env={"env_vars": ENVIRONMENT}, max_task_retries=MAX_RETRIES, **common,
        )  # fmt: skip
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from table.to_pylist()


def _read(batch: pa.Table, path: Path) -> pa.Table:
    """The lines of a batch, on the machine that holds the input."""
    (row,) = batch.to_pylist()
    with open(path, "rb") as file:
        lines = []
        for start, end in zip(row["starts"], row["ends"], strict=True):
            file.seek(start)
            lines.append(file.read(end - start))
    return pa.table([[row["numbers"]], [lines]], LINES)


def _take(job: Job, piece: dict, progress: Progress) -> None:
    """Write what is new in a piece: a batch that was done twice has answered some lines before."""
    if piece["error"]:
        raise InputError(piece["error"])
    if piece["note"]:
        progress.note(piece["note"])
    answered = zip(piece["numbers"], piece["lines"], piece["tokens"], strict=True)
    job.write([one for one in answered if job.states[one[0] - 1] == PENDING], progress)
    progress.advance(piece["generated"])


class Actor:
    """An executor with a model of its own, for batch after batch."""

    def __init__(self, setting: Setting):
        self.setting, self.trouble = setting, ""
        try:
            self.llm = LLM(
                setting.model, setting.policy, setting.device, setting.link_gb_per_s, setting.budgets["device"],
                setting.budgets["host"], setting.dtype, setting.hardware, setting.disk_dir, setting.disk_gb_per_s,
                setting.budgets["disk"],
            )  # fmt: skip
            load_weights(self.llm, setting.layer_bytes)
            self.read = reader(setting.form, setting.url, self.llm, setting.sampling, setting.seed)
        except InputError as error:  # told with the first batch: Ray starts an actor that raises again and again
            self.trouble = _told(error)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """The pieces of a batch [1 row, LINES]; the same ones when it is done again, as Ray asks of retried work."""
        if self.trouble:
            yield _piece(error=self.trouble)
            return
        (row,) = batch.to_pylist()
        pieces: queue.SimpleQueue[pa.Table | BaseException | None] = queue.SimpleQueue()
        part = Part(self.llm, self.read, self.setting, row, pieces.put)

        def answer() -> None:
            try:
                answer_pending(part, part, StopAsked())
                part.flush()
                pieces.put(None)
            except InputError as error:
                part.flush()
                pieces.put(_piece(error=_told(error)))
                pieces.put(None)
            except BaseException as error:  # handed on to the thread that Ray hears
                pieces.put(error)

        worker = threading.Thread(target=answer, name="answering")
        worker.start()
        while (piece := pieces.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        worker.join()


class Part:
    """A batch's lines as ``answering`` takes a job's, with its progress: what is answered is sent on in pieces."""

    def __init__(self, llm: LLM, read, setting: Setting, row: dict, send: Callable[[pa.Table], None]):
        self.llm, self.setting, self.send = llm, setting, send
        self._requests = {n: read(raw, n) for n, raw in zip(row["numbers"], row["lines"], strict=True)}
        self._answered: list[tuple[int, bytes, int]] = []
        self._iterations, self._generated = 0, 0

    def pending(self) -> np.ndarray:
        return np.array(list(self._requests), dtype=np.int64) - 1

    def workload(self, places: np.ndarray) -> Workload:
        most = self.llm.shape.max_context
        requests = [self._requests[n] for n in (places + 1).tolist()]
        prompts = np.array([len(one.token_ids) for one in requests])
        limits = np.array([one.params.max_tokens or most for one in requests])
        return Workload(prompts, np.minimum(limits, most - prompts))

    def request(self, number: int) -> Request:
        return self._requests[number]

    def line(self, number: int, request: Request, output: RequestOutput) -> bytes:
        return answer_line(number, request, output, self.setting.url, self.setting.created)

    def check_input_unchanged(self) -> None:
        """The job does."""

    def write(self, answered: list[tuple[int, bytes, int]], progress: Part) -> None:
        for number, _, _ in answered:
            del self._requests[number]
        self._answered += answered

    def advance(self, count: int) -> None:
        """An iteration is over."""
        self._iterations += 1
        self._generated += count
        if self._answered or self._iterations % self.setting.heartbeat == 0:
            self.flush()

    def note(self, text: str) -> None:
        self.send(_piece(note=text))

    def flush(self) -> None:
        self.send(_piece(self._answered, self._generated))
        self._answered, self._generated = [], 0


def _told(error: InputError) -> str:
    return f"on {socket.gethostname()}: {error}"


def _piece(answered: list = (), generated: int = 0, note: str = "", error: str = "") -> pa.Table:
    """A table [1 row, PIECE]."""
    numbers, lines, tokens = zip(*answered, strict=True) if answered else ((), (), ())
    return pa.table([[numbers], [lines], [tokens], [generated], [note], [error]], PIECE)
