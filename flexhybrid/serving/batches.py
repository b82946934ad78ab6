"""/v1/files and /v1/batches: the lines of a file run in the server's batch, behind the requests of HTTP clients.

One folder has it all. ``file-ID`` is a file and ``file-ID.json`` its description; ``batch-ID.json`` describes a batch.
As for ``flexhybrid run``, the output file alone records which lines are answered, and is written by the same code. A
server that starts with the folder continues the batches that are not complete.
"""

import asyncio
import contextlib
import copy
import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from flexhybrid.batch.answers import ANSWERED, BLANK, FAILED, PENDING, AnswerFile
from flexhybrid.batch.formats import open_lines
from flexhybrid.batch.openai import BLANK_LINE, URLS, Refused, Request, shown
from flexhybrid.batch.replies import answer_line, error_line
from flexhybrid.batch.request_index import RequestFile, file_state, index_requests
from flexhybrid.batch.requests import LineReader, LineRules
from flexhybrid.core.errors import DiskError, InputError
from flexhybrid.core.files import lock_file, new_file, write_by_rename
from flexhybrid.jobs.run.forecast import sorted_by_length
from flexhybrid.serving.app import Api
from flexhybrid.serving.calls import ApiError, Calls, opened

MOST_FILE_BYTES = 1 << 29  #: largest file that can be uploaded
LINES_AT_A_TIME = 256  #: most lines of a batch that wait or run
SEED = 0  #: seed of lines without their own, the default of ``flexhybrid run``
ENDED = ("completed", "failed", "cancelled")
TIMES = ("in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expires", "expired")
ID = re.compile(r"(file|batch)-[0-9a-f]{24}")


class Folder:
    """The folder with files and batches. Raise InputError if another server uses it."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open(path / "lock", "wb")  # noqa: SIM115 (locked until ``close``)
        lock_file(self._lock.fileno(), f"another server uses {path}: give another --files-dir")

    def close(self) -> None:
        """Release the folder."""
        self._lock.close()

    def new_id(self, kind: str) -> str:
        return f"{kind}-{secrets.token_hex(12)}"

    def place(self, name: str, kind: str) -> Path:
        """Return the path of a file or batch. Raise ApiError if there is none."""
        match = ID.fullmatch(name)
        if not match or match[1] != kind or not (self.path / f"{name}.json").exists():
            raise ApiError(404, f"there is no {kind} {shown(name)}", "not_found")
        return self.path / name

    def description(self, name: str, kind: str) -> dict:
        """Return the description of a file or batch. Raise ApiError if there is none."""
        return json.loads(self.place(name, kind).with_suffix(".json").read_bytes())

    def descriptions(self, kind: str) -> list[dict]:
        """Return all descriptions, the latest first."""
        found = [json.loads(path.read_bytes()) for path in self.path.glob(f"{kind}-*.json")]
        return sorted(found, key=lambda one: one["created_at"], reverse=True)

    def describe(self, description: dict) -> None:
        """Write a description."""
        write_by_rename(self.path / f"{description['id']}.json", json.dumps(description), durable=True)

    def describe_file(self, name: str, filename: str, purpose: str) -> dict:
        """Write and return the description of a file that is complete."""
        size, now = (self.path / name).stat().st_size, int(time.time())
        described = {"id": name, "object": "file", "bytes": size, "created_at": now, "filename": filename}
        described |= {"purpose": purpose, "status": "processed"}
        self.describe(described)
        return described

    def add(self, content: BinaryIO, filename: str, purpose: str) -> dict:
        """Add a file; return its description."""
        name = self.new_id("file")
        with new_file(self.path / name) as file:
            shutil.copyfileobj(content, file)
        return self.describe_file(name, filename, purpose)

    def delete(self, name: str) -> None:
        path = self.place(name, "file")
        path.with_suffix(".json").unlink()
        path.unlink(missing_ok=True)


@dataclass
class BatchLines:
    """The open input and output of a batch."""

    source: RequestFile
    answers: AnswerFile
    errors: AnswerFile
    states: np.ndarray  #: [lines], as in ``flexhybrid run``

    def pending(self) -> list[int]:
        """Return the numbers of unanswered lines, in the order in which ``run`` answers them."""
        places, index = np.flatnonzero(self.states == PENDING), self.source.index
        return (places[sorted_by_length(index.prompt_tokens[places], index.max_tokens[places])] + 1).tolist()

    def write(self, number: int, line: bytes, state: int) -> None:
        """Append the line that answers line ``number``, unless that is blank."""
        if state != BLANK:
            (self.errors if state == FAILED else self.answers).append([line])
        self.states[number - 1] = state


class Batches:
    """Runs batches in the loop's thread. ``identity``: what decides the results, as JSON."""

    def __init__(self, folder: Folder, calls: Calls, identity: dict):
        self.folder, self.calls = folder, calls
        self.identity = json.loads(json.dumps(identity))
        codec = calls.bodies.codec
        self._codec = replace(codec, tokenizer=copy.deepcopy(codec.tokenizer))
        self._worker = ThreadPoolExecutor(1, "flexhybrid-files")  # reads and writes files, and owns the codec
        self.current: dict[str, dict] = {}  #: the batches that run
        self._tasks: dict[str, asyncio.Task] = {}

    def resume(self) -> None:
        """Start all batches that are not complete."""
        for batch in reversed(self.folder.descriptions("batch")):
            if batch["status"] not in ENDED:
                self._start(batch)

    async def close(self) -> None:
        """Stop all batches; the next server continues them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._worker.shutdown()

    def create(self, body: dict) -> dict:
        """Start a batch; return its description. Raise ApiError for wrong fields."""
        path = self.folder.place(str(body.get("input_file_id")), "file")
        if body.get("endpoint") not in URLS:
            raise ApiError(400, f"endpoint must be {' or '.join(URLS)}", "invalid_value", "endpoint")
        now = int(time.time())
        batch = {"id": self.folder.new_id("batch"), "object": "batch", "endpoint": body["endpoint"], "errors": None}
        batch |= {"input_file_id": path.name, "completion_window": body.get("completion_window") or "24h"}
        batch |= {"status": "validating", "output_file_id": None, "error_file_id": None, "created_at": now}
        batch |= dict.fromkeys(f"{name}_at" for name in TIMES)
        batch |= {"request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": body.get("metadata")}
        batch["journals"] = {name: self.folder.new_id("file") for name in ("output", "error")}
        batch["identity"] = self.identity
        self.folder.describe(batch)
        self._start(batch)
        return batch

    def described(self, name: str) -> dict:
        """Return a batch. Raise ApiError if there is none."""
        return self.current.get(name) or self.folder.description(name, "batch")

    def cancel(self, name: str) -> dict:
        """Stop a batch after the lines that run; return it. Raise ApiError if all of its lines are complete."""
        batch = self.described(name)
        if batch["status"] in ("validating", "in_progress"):
            self._turn(batch, "cancelling")
        elif batch["status"] != "cancelling":
            raise ApiError(409, f"the batch is {batch['status']}: it cannot be cancelled", "batch_ended")
        return batch

    def _start(self, batch: dict) -> None:
        self.current[batch["id"]] = batch
        self._tasks[batch["id"]] = asyncio.create_task(self._run(batch))

    def _turn(self, batch: dict, status: str) -> None:
        """Change the status of a batch."""
        batch |= {"status": status, f"{status}_at": int(time.time())}
        self.folder.describe(batch)

    async def _run(self, batch: dict) -> None:
        """Run a batch to its end; write an error into its description."""
        try:
            if batch["identity"] != self.identity:
                raise InputError("the batch began with another model or other settings: start the server with these")
            stack = contextlib.ExitStack()
            try:
                await self._answer(batch, stack)
            finally:
                await self._in_worker(stack.close)
        except* (InputError, OSError, DiskError) as group:
            message = str(next(iter(_leaves(group))))
            batch["errors"] = {"object": "list", "data": [{"code": "failed", "message": message}]}
            if not self.calls.live.error:  # otherwise the next server continues
                self._turn(batch, "failed")
        del self.current[batch["id"]], self._tasks[batch["id"]]

    async def _in_worker(self, function, *arguments):
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    async def _answer(self, batch: dict, stack: contextlib.ExitStack) -> None:
        lines = await self._in_worker(self._opened, batch, stack)
        counts, states = batch["request_counts"], lines.states
        counts |= {"total": len(states), "completed": 0, "failed": int((states == FAILED).sum())}
        counts["completed"] = int((states != PENDING).sum()) - counts["failed"]
        if batch["status"] == "validating":
            self._turn(batch, "in_progress")
        slots = asyncio.Semaphore(LINES_AT_A_TIME)
        async with asyncio.TaskGroup() as group:
            for number in lines.pending():
                await slots.acquire()
                if batch["status"] != "in_progress":
                    break
                task = group.create_task(self._answer_line(batch, lines, number))
                task.add_done_callback(lambda _: slots.release())
        cancelled = batch["status"] == "cancelling"
        if not cancelled:
            self._turn(batch, "finalizing")
        await self._in_worker(lines.answers.finish)
        await self._in_worker(lines.errors.finish)
        for kind, name in batch["journals"].items():
            if (self.folder.path / name).stat().st_size:
                self.folder.describe_file(name, f"{batch['id']}_{kind}.jsonl", "batch_output")
                batch[f"{kind}_file_id"] = name
        if not cancelled and not (states == ANSWERED).any():
            raise InputError(
                "no line of the file was answered; the error file says why"
                if counts["failed"]
                else "the file has no requests"
            )
        self._turn(batch, "cancelled" if cancelled else "completed")

    def _opened(self, batch: dict, stack: contextlib.ExitStack) -> BatchLines:
        """Return the lines of a batch, with those done that its output files have. Runs in the worker."""
        path = self.folder.place(batch["input_file_id"], "file")
        rules = LineRules("jsonl", self.calls.bodies.sampling, SEED, self.calls.bodies.chat)
        read = LineReader(rules, self._codec)
        lines = stack.enter_context(contextlib.closing(open_lines(path, "jsonl")))
        index = index_requests(lines, read, self._codec.shape.max_context)
        source = RequestFile(path, file_state(path), lines, index, rules, read)
        states = np.full(index.num_lines, PENDING, np.uint8)
        files = [AnswerFile(self.folder.path / batch["journals"][kind]) for kind in ("output", "error")]
        for file in files:
            stack.callback(file.close)
            file.check(states)
            file.repair()
        return BatchLines(source, files[0], files[1], states)

    async def _answer_line(self, batch: dict, lines: BatchLines, number: int) -> None:
        """Answer a line, or write why it is refused."""
        state, custom_id = FAILED, None
        try:
            request = await self._in_worker(lines.source.request, number)
            custom_id = request.custom_id
            if request.url != batch["endpoint"]:
                message = f"url is {request.url}; the endpoint of the batch is {batch['endpoint']}"
                raise Refused("invalid_value", message, "url", custom_id)
            line, state = await self._line(request, number, batch["created_at"]), ANSWERED
        except Refused as refused:
            line = error_line(number, refused)
            state = BLANK if refused.code == BLANK_LINE else FAILED
        except ApiError as error:
            if self.calls.live.error:
                raise InputError(error.message) from None
            line = error_line(number, Refused("invalid_value", error.message, None, custom_id))
        await self._in_worker(lines.write, number, line, state)
        batch["request_counts"]["failed" if state == FAILED else "completed"] += 1

    async def _line(self, request: Request, number: int, created: int) -> bytes:
        parsed = await self._in_worker(lambda: opened(self._codec, request, behind=True))
        call = self.calls.begin(parsed, None)
        try:
            return answer_line(number, request, await self.calls.output(call), created)
        finally:
            self.calls.end(call)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors of a group."""
    for one in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _leaves(one)
    if not isinstance(error, BaseExceptionGroup):
        yield error


class FilesApi:
    """The handlers of /v1/files and /v1/batches."""

    def __init__(self, api: Api, batches: Batches):
        self.api, self.batches, self.folder = api, batches, batches.folder

    def routes(self) -> list[Route]:
        """Return the routes."""
        routes = (
            ("/v1/files", self._upload, "POST"),
            ("/v1/files", self._files, "GET"),
            ("/v1/files/{name}", self._file, "GET"),
            ("/v1/files/{name}", self._delete, "DELETE"),
            ("/v1/files/{name}/content", self._content, "GET"),
            ("/v1/batches", self._create, "POST"),
            ("/v1/batches", self._all_batches, "GET"),
            ("/v1/batches/{name}", self._batch, "GET"),
            ("/v1/batches/{name}/cancel", self._cancel, "POST"),
        )
        return [Route(path, self.api.guarded(handler), methods=[method]) for path, handler, method in routes]

    async def _upload(self, http: HttpRequest) -> Response:
        size = http.headers.get("content-length", "")
        if not size.isdigit() or int(size) > MOST_FILE_BYTES:
            status = 413 if size.isdigit() else 411
            raise ApiError(
                status, f"an upload needs a content-length of at most {MOST_FILE_BYTES:,} bytes", "file_size"
            )
        async with http.form(max_files=1, max_fields=8) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if isinstance(file, str | None) or not isinstance(purpose, str):
                raise ApiError(400, "an upload has the fields file and purpose", "invalid_value", "file")
            if purpose != "batch":
                raise ApiError(400, f"purpose is {shown(purpose)}; it must be batch", "invalid_value", "purpose")
            name = (file.filename or "file")[:255]
            return JSONResponse(await asyncio.to_thread(self.folder.add, file.file, name, purpose))

    async def _files(self, http: HttpRequest) -> Response:
        purpose = http.query_params.get("purpose")
        files = self.folder.descriptions("file")
        return JSONResponse(_listed([file for file in files if purpose in (None, file["purpose"])]))

    async def _file(self, http: HttpRequest) -> Response:
        return JSONResponse(self.folder.description(http.path_params["name"], "file"))

    async def _delete(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if any(name == batch["input_file_id"] for batch in self.batches.current.values()):
            raise ApiError(409, "a batch that runs reads this file", "file_in_use")
        self.folder.delete(name)
        return JSONResponse({"id": name, "object": "file", "deleted": True})

    async def _content(self, http: HttpRequest) -> Response:
        return FileResponse(self.folder.place(http.path_params["name"], "file"), media_type="application/octet-stream")

    async def _create(self, http: HttpRequest) -> Response:
        body = await self.api.json_body(http)
        return JSONResponse(_public(self.batches.create(body)))

    async def _all_batches(self, _http: HttpRequest) -> Response:
        found = self.folder.descriptions("batch")
        return JSONResponse(_listed([_public(self.batches.current.get(one["id"], one)) for one in found]))

    async def _batch(self, http: HttpRequest) -> Response:
        return JSONResponse(_public(self.batches.described(http.path_params["name"])))

    async def _cancel(self, http: HttpRequest) -> Response:
        return JSONResponse(_public(self.batches.cancel(http.path_params["name"])))


def _public(batch: dict) -> dict:
    """Return a batch without the fields that only the server needs."""
    return {name: value for name, value in batch.items() if name not in ("journals", "identity")}


def _listed(data: list[dict]) -> dict:
    """Return OpenAI's list of these objects, which is complete."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": False, **ends}
