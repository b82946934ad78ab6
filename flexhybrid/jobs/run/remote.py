"""``flexhybrid run --engine ray``: answers requests with a pool of actors in Ray Data, each with its own executor.

    pending lines, longest first ──batches──▶ read (where the input is) ──▶ actors ──messages──▶ the job, which writes

An actor answers a batch of lines as one queue, and sends answers in messages while it runs. If an actor dies, its
replacement repeats the batch. The output stays the same: the job drops second answers to a line, and sends lines out
again that are still pending after all batches.
"""

import contextlib
import math
import queue
import shutil
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayError

from flexhybrid.arguments import LLMArguments
from flexhybrid.batch.openai import Refused, Request
from flexhybrid.batch.replies import answer_line, error_line
from flexhybrid.batch.request_index import RequestFile
from flexhybrid.batch.requests import LineReader, LineRules
from flexhybrid.core.errors import InputError
from flexhybrid.core.workload import Workload
from flexhybrid.jobs.progress import StopAsked
from flexhybrid.jobs.ray_cluster import ENVIRONMENT, MAX_RETRIES, Replicas
from flexhybrid.jobs.run.answering import Answered, PendingRequests, answer_pending, load_weights
from flexhybrid.jobs.run.forecast import Forecast
from flexhybrid.jobs.run.remote_read import BATCH, LINES, read_lines
from flexhybrid.llm import LLM
from flexhybrid.requests import RequestOutput
from flexhybrid.sampling_params import noted_bytes

BATCH_LINES = 8192  #: most lines of a batch, which an actor answers as one queue
HEARTBEAT_S = 1.0  #: predicted seconds between an actor's messages while no answer is complete
HEARTBEAT_ITERATIONS = 32  #: most iterations between such messages, and their number without a prediction

#: A message of an actor. ``numbers``, ``lines``, ``tokens``, ``refused``: line number, output line, token count and
#: error code of each complete answer. ``generated``, ``shared``: tokens generated and prompt tokens shared since the
#: message before. ``note``: text for the user. ``error``: reason why the actor cannot continue.
MESSAGE = pa.schema([
    *LINES, ("tokens", pa.list_(pa.int64())), ("refused", pa.list_(pa.string())), ("generated", pa.int64()),
    ("shared", pa.int64()), ("note", pa.string()), ("error", pa.string()),
])  # fmt: skip


@dataclass(frozen=True)
class ActorConfig:
    """The settings with which an actor answers like this process."""

    llm: LLMArguments
    layer_bytes: dict[str, int]  #: tier -> planned bytes of the layers' weights
    rules: LineRules
    created: int  #: Unix time of the job's start
    heartbeat: int  #: iterations between messages while no answer is complete


def actor_config(llm: LLM, source: RequestFile, forecast: Forecast, created: int) -> ActorConfig:
    """Return the settings with which actors answer ``source`` as ``llm`` would. ``created``: Unix time of the job."""
    arguments = llm.arguments
    heartbeat = HEARTBEAT_ITERATIONS
    if forecast.run:
        heartbeat = max(1, min(heartbeat, round(HEARTBEAT_S / float(forecast.run.seconds.mean()))))
    budgets: dict[str, str | float | None] = dict(llm.problem.budgets.items())
    if llm.device.type == "cuda":
        budgets["device"] = arguments.budgets.get("device")  # None: an actor takes the free memory of its own GPU
    resolved = replace(
        arguments,
        model=llm.checkpoint.path.resolve(),
        policy=llm.settled_policy,
        device=llm.device.type,
        dtype=llm.problem.dtype,
        attention=llm.problem.attention,
        hardware=llm.hardware,
        budgets=budgets,
        disk_dir=arguments.disk_dir and Path(arguments.disk_dir).resolve(),
    )
    return ActorConfig(resolved, forecast.layer_bytes, source.rules, created, heartbeat)


def answer_on_cluster(
    requests: PendingRequests, source: RequestFile, replicas: Replicas, config: ActorConfig, stop: StopAsked
) -> None:
    """Answer on the actors of a cluster until no request is pending or a stop is requested.

    Raise InputError if an actor reports an error or the cluster fails; answers written so far are kept.
    """
    with _named(source.lines) as path:
        while len(pending := requests.pending()) and not stop.asked:
            requests.check_input_unchanged()
            batches = _batches(pending, source.index.offsets, replicas.size)
            try:
                with contextlib.closing(_messages(replicas, config, path, batches)) as messages:
                    for message in messages:
                        _take(requests, message)
                        requests.check_input_unchanged()
                        if stop.asked:
                            break
            except RayError as error:
                reason = str(error).strip().splitlines()[-1]
                raise InputError(
                    f"the Ray cluster failed: {reason}; answers written so far are kept, the same command continues"
                ) from error
            if not stop.asked and len(requests.pending()) == len(pending):
                raise InputError("the Ray cluster processed all requests without answering any")


@contextlib.contextmanager
def _named(lines: BinaryIO) -> Iterator[Path]:
    """Yield a path at which another process can open the lines: a temporary copy if the file has no name."""
    if isinstance(lines.name, str):
        yield Path(lines.name).resolve()
        return
    with tempfile.NamedTemporaryFile() as copy:
        lines.seek(0)
        shutil.copyfileobj(lines, copy)
        copy.flush()
        yield Path(copy.name)


def _batches(pending: np.ndarray, offsets: np.ndarray, actors: int) -> Iterator[pa.Table]:
    """Yield the pending lines in running order, in at least one batch per actor if there are enough lines."""
    num_lines = min(BATCH_LINES, math.ceil(len(pending) / actors))
    for start in range(0, len(pending), num_lines):
        places = pending[start : start + num_lines]
        yield pa.table([[(places + 1).tolist()], [offsets[places].tolist()], [offsets[places + 1].tolist()]], BATCH)


def _messages(replicas: Replicas, config: ActorConfig, path: Path, batches: Iterator[pa.Table]) -> Generator[dict]:
    """Yield the actors' messages as they come."""
    ray.data.DataContext.get_current().target_max_block_size = 1  # pass each message on, instead of 128 MiB at once
    common = {"batch_size": 1, "batch_format": "pyarrow"}
    dataset = ray.data.from_arrow(list(batches)).map_batches(
        read_lines,  # pyright: ignore[reportArgumentType] (Ray's types leave out fn_args)
        fn_args=(path,),
        num_cpus=0,  # the actors hold all CPUs
        label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
        concurrency=1,
        **common,
    )
    with warnings.catch_warnings():  # max_task_retries is deprecated without a successor in the Ray of setup.py
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = dataset.map_batches(
            Actor,
            fn_constructor_args=(config,),
            num_cpus=replicas.cpus,
            num_gpus=replicas.gpus or None,
            compute=ray.data.ActorPoolStrategy(size=replicas.size, max_tasks_in_flight_per_actor=1),
            runtime_env={"env_vars": ENVIRONMENT},
            max_task_retries=MAX_RETRIES,
            **common,
        )
    for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
        yield from table.to_pylist()  # pyright: ignore[reportAttributeAccessIssue] (a pyarrow table, as asked)


def _take(requests: PendingRequests, message: dict) -> None:
    """Write a message's answers and count its tokens. Raise InputError for a message with an error."""
    if message["error"]:
        raise InputError(message["error"])
    if message["note"]:
        requests.note(message["note"])
    answered = zip(*(message[name] for name in ("numbers", "lines", "tokens", "refused")), strict=True)
    requests.write([Answered(*fields) for fields in answered])
    requests.advance(message["generated"])
    requests.llm.num_shared += message["shared"]


class Actor:
    """A Ray actor with its own model and executor, which answers one batch after another."""

    def __init__(self, config: ActorConfig):
        self.config, self.error = config, ""
        try:
            self.llm = LLM.from_arguments(config.llm)
            load_weights(self.llm, config.layer_bytes)
            self.read = LineReader(config.rules, self.llm.codec)
        except InputError as error:  # sent with the first batch: Ray would restart an actor that raises, without end
            self.error = _located(error)

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Yield the messages of a batch [1 row, LINES]; a repeated batch gives the same ones, as Ray requires."""
        if self.error:
            yield _message(error=self.error)
            return
        (row,) = batch.to_pylist()
        messages: queue.SimpleQueue[pa.Table | BaseException | None] = queue.SimpleQueue()
        requests = RemoteBatch(self.llm, self.read, self.config, row, messages.put)

        def answer() -> None:
            try:
                answer_pending(requests, StopAsked())
                requests.flush()
                messages.put(None)
            except InputError as error:
                requests.flush()
                messages.put(_message(error=_located(error)))
                messages.put(None)
            except BaseException as error:  # raised again in Ray's thread
                messages.put(error)

        worker = threading.Thread(target=answer, name="answering")
        worker.start()
        while (message := messages.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            yield message
        worker.join()


class RemoteBatch(PendingRequests):
    """The lines of an actor's batch, which sends answers and progress in messages.
    The job itself checks the input, estimates the time left and changes the policy."""

    def __init__(self, llm: LLM, read: LineReader, config: ActorConfig, row: dict, send: Callable[[pa.Table], None]):
        self.llm, self.config, self.send = llm, config, send
        self._requests: dict[int, Request] = {}
        self._answered: list[Answered] = []
        for number, raw in zip(row["numbers"], row["lines"], strict=True):
            try:
                self._requests[number] = read(raw, number)
            except Refused as refused:
                self._answered.append(Answered(number, error_line(number, refused), 0, refused.code))
        self._iterations, self._generated, self._shared = 0, 0, llm.num_shared

    def pending(self) -> np.ndarray:
        return np.array(list(self._requests), dtype=np.int64) - 1

    def workload(self, places: np.ndarray) -> Workload:
        max_context = self.llm.shape.max_context
        requests = [self._requests[number] for number in (places + 1).tolist()]
        prompts = np.array([len(request.token_ids) for request in requests])
        limits = np.array([request.params.max_tokens or max_context for request in requests])
        limits = np.minimum(limits, max_context - prompts)
        each = np.repeat(np.arange(len(requests)), self.num_answers(places))
        sizes = zip(prompts.tolist(), limits.tolist(), strict=True)
        noted = [noted_bytes(request.params, *of) for request, of in zip(requests, sizes, strict=True)]
        token, line = (max(of) for of in zip(*noted, strict=True))
        return Workload(prompts[each], limits[each], noted=(token, line))

    def num_answers(self, places: np.ndarray) -> np.ndarray:
        return np.array([self._requests[number].params.n for number in (places + 1).tolist()])

    def request(self, number: int) -> Request:
        return self._requests[number]

    def line(self, number: int, request: Request, output: RequestOutput) -> bytes:
        return answer_line(number, request, output, self.config.created)

    def write(self, answered: list[Answered]) -> None:
        for answer in answered:
            del self._requests[answer.number]
        self._answered += answered

    def advance(self, num_tokens: int) -> None:
        self._iterations += 1
        self._generated += num_tokens
        if self._answered or self._iterations % self.config.heartbeat == 0:
            self.flush()

    def note(self, text: str) -> None:
        self.send(_message(note=text))

    def flush(self) -> None:
        """Send answers and progress since the last message."""
        shared = self.llm.num_shared
        self.send(_message(self._answered, self._generated, shared - self._shared))
        self._answered, self._generated, self._shared = [], 0, shared


def _located(error: InputError) -> str:
    """Return the error's text with the name of this machine."""
    return f"on {socket.gethostname()}: {error}"


def _message(
    answered: Sequence[Answered] = (), generated: int = 0, shared: int = 0, note: str = "", error: str = ""
) -> pa.Table:
    """Return a message as a table of one row with the columns of MESSAGE."""
    columns = zip(*answered, strict=True) if answered else [()] * len(Answered._fields)
    return pa.table([*([column] for column in columns), [generated], [shared], [note], [error]], MESSAGE)
