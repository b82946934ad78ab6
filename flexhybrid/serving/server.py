"""The job of ``flexhybrid serve``: opens the model, and serves it until a signal."""

import asyncio
import contextlib
import copy
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from types import FrameType

import numpy as np
import uvicorn

from flexhybrid.batch.manifest import model_record
from flexhybrid.batch.openai import Bodies, check_template
from flexhybrid.core.errors import InputError
from flexhybrid.jobs.machine import return_freed_memory
from flexhybrid.jobs.run.forecast import describe
from flexhybrid.jobs.run.opening import model_arguments, needs_no_search
from flexhybrid.jobs.run.resuming import numbers_of
from flexhybrid.llm import LLM
from flexhybrid.runtime.storage.loader import Checkpoint
from flexhybrid.sampling_params import MOST_LOGPROBS, SamplingParams, noted_bytes
from flexhybrid.serving.app import Api, make_app
from flexhybrid.serving.batches import Batches, FilesApi, Folder
from flexhybrid.serving.calls import Calls
from flexhybrid.serving.live import LiveBatch, sizes_of
from flexhybrid.serving.metrics import Metrics
from flexhybrid.serving.options import LOCAL, ServerOptions, listener_at

MOST_CONTEXT = 8192  #: default of --max-model-len: room for the longest request is always reserved
EXPECTED_RUNNING = 256  #: answers at a time for which policy auto is searched, unless --max-num-seqs is lower
READ_ERROR_S = 1.0  #: seconds in which a client can read the error of a request that the second signal ended
DRAIN_S = 5.0  #: seconds that a stop waits beyond --request-timeout


def serve(options: ServerOptions, say: Callable[[str], None] = print) -> dict:
    """Serve until SIGTERM or SIGINT, then finish the requests that run; return {"exit_status"}.
    Raise InputError if the address is in use, or the model cannot run."""
    return_freed_memory()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listener_at(options.host, options.port))
        llm = stack.enter_context(_opened(options))
        rules = options.chat_rules()
        if rules.template:
            check_template(rules.template, f"--chat-template {options.chat_template}")
        metrics = Metrics(options.name)
        noted = noted_bytes(SamplingParams(logprobs=MOST_LOGPROBS), 0, llm.shape.max_context)
        sizes = sizes_of(llm.shape.max_context, options.input_len, options.output_len, noted)
        live = LiveBatch(llm, sizes, metrics.generated)
        llm.load()
        decoder = replace(llm.codec, tokenizer=copy.deepcopy(llm.codec.tokenizer))
        calls = Calls(live, Bodies(llm.codec, options.sampling, rules), decoder, metrics, [options.name])

        api, batches = Api(calls, options), None
        if options.files_dir:
            folder = stack.enter_context(contextlib.closing(Folder(options.files_dir)))
            identity = {"model": model_record(llm.checkpoint.path, False), "numbers": numbers_of(llm)}
            batches = Batches(folder, calls, identity | {"sampling": options.sampling, "chat": asdict(rules)})
            routes = FilesApi(api, batches).routes()
        else:
            routes = api.without_files()

        @contextlib.asynccontextmanager
        async def lifespan(_app) -> AsyncIterator[None]:
            def failed() -> None:
                calls.fail()
                server.should_exit = True

            live.start(failed)
            if batches:
                batches.resume()
            try:
                yield
            finally:
                if batches:
                    await batches.close()
                await asyncio.to_thread(live.close)

        wait_s = int(options.request_timeout + DRAIN_S)
        server = _Server(
            uvicorn.Config(
                make_app(api, lifespan, routes),
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=wait_s,
            ),
            calls,
            say,
        )
        host, port = listener.getsockname()[:2]
        policy = describe(llm.settled_policy, llm.problem)
        say(f"policy     {policy}; up to {live.places.count:,} answers of {llm.shape.max_context:,} tokens at a time")
        if options.host not in LOCAL and not options.api_key:
            say("warning    other machines reach this server, and it has no --api-key")
        server.ready = lambda: say(f"serving    {options.name} at http://{host}:{port}/v1")
        with _signals_returned():
            server.run([listener])
        if live.error:
            raise InputError(f"the engine has failed: {live.error}") from live.error
        say("stopped    " + _end(server.num_ended, len(batches.current) if batches else 0))
    return {"exit_status": 0}


class _Server(uvicorn.Server):
    """Says on the first signal what still runs, and on the second one answers it with an error."""

    ready: Callable[[], None]

    def __init__(self, config: uvicorn.Config, calls: Calls, say: Callable[[str], None]):
        super().__init__(config)
        self.calls, self.say = calls, say
        self.num_ended = 0  #: requests that the second signal ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the stop. uvicorn's own second step would cancel handlers, and with them the answers to clients."""
        loop = asyncio.get_running_loop()
        if self.should_exit:
            loop.call_soon_threadsafe(self._end_requests)
        else:
            super().handle_exit(sig, frame)
            loop.call_soon_threadsafe(self._say_running)

    def _say_running(self) -> None:
        if count := len(self.calls.of_clients()):
            are, them = ("request is", "it") if count == 1 else ("requests are", "them")
            self.say(f"stopping   {count} {are} still running; a second Ctrl-C ends {them}")

    def _end_requests(self) -> None:
        """Answer all requests with an error, and close the connections that do not read it."""
        if not self.calls.stopping:
            self.num_ended = self.calls.stop()
            asyncio.get_running_loop().call_later(READ_ERROR_S, self._close_connections)

    def _close_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _end(num_ended: int, num_batches: int) -> str:
    """Describe what a stop left undone."""
    requests = f"{num_ended} {'request was' if num_ended == 1 else 'requests were'} ended before the answer"
    ends = [requests if num_ended else "all requests are complete"]
    if num_batches:
        ends.append("a batch continues when the server starts with the same --files-dir")
    return "; ".join(ends)


@contextlib.contextmanager
def _signals_returned():
    """Ignore the signals that end the server, which it sends to itself once it has ended."""
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _opened(options: ServerOptions) -> LLM:
    """Return the model under a policy for the expected requests."""
    arguments, measure = model_arguments(options, {}, None)
    if arguments.max_model_len is None:
        context = min(Checkpoint(arguments.model).shape.max_context, MOST_CONTEXT)
        arguments = replace(arguments, max_model_len=context)
    llm = LLM.from_arguments(arguments)
    count = min(options.max_num_seqs or EXPECTED_RUNNING, EXPECTED_RUNNING)
    sizes = sizes_of(llm.shape.max_context, options.input_len, options.output_len)
    begins = sizes.select(np.r_[:count, -2:0])
    if measure and (options.reprofile or not needs_no_search(llm, begins)):
        llm.know(measure())
    policy = llm.settle(begins)
    if options.max_num_seqs:
        llm.use(replace(policy, max_batch=min(options.max_num_seqs, policy.max_batch or options.max_num_seqs)))
    return llm
