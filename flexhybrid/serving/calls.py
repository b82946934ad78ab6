"""Requests of HTTP clients: read from a body, run in the batch, and written as a body or as server-sent events."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

from flexhybrid.batch.openai import CHAT, Bodies, Refused, Request, json_object, refusing, shown
from flexhybrid.batch.replies import answer_body, answer_head, choice_of, to_json, usage_of
from flexhybrid.requests import CompletionOutput, Generated, RequestCodec, RequestOutput
from flexhybrid.runner import Replies
from flexhybrid.runtime.engine import Failure
from flexhybrid.runtime.kernels.sampling import SamplingPlan
from flexhybrid.serving.live import LiveAnswer, LiveBatch, News
from flexhybrid.serving.metrics import Metrics
from flexhybrid.serving.streaming import AnswerPieces

DONE = b"data: [DONE]\n\n"
NUMBERS = count(time.time_ns() // 1_000_000)  #: numbers in the ids of answers, which no earlier server has given


class ApiError(Exception):
    """An error for the client, with OpenAI's fields."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal(refused: Refused) -> ApiError:
    """Return the error for a body that would be a refused line of a file."""
    message = "the body is not UTF-8" if refused.code == "invalid_utf8" else refused.message
    return ApiError(400, message.replace("the line", "the body"), refused.code, refused.param)


@dataclass(frozen=True)
class Parsed:
    """A request's body, as it can run."""

    request: Request
    answers: list[tuple[Generated, SamplingPlan]]
    max_tokens: int
    stream: bool = False
    include_usage: bool = False
    behind: bool = False  #: whether it is a line of a file, which waits behind requests of clients


def opened(codec: RequestCodec, request: Request, **how) -> Parsed:
    """Return a request whose answers can begin. ``how``: more fields of ``Parsed``."""
    room, params = codec.shape.max_context - len(request.token_ids), request.params
    answers = [codec.open(request.token_ids, params, place) for place in range(params.n)]
    return Parsed(request, answers, min(params.max_tokens or room, room), **how)


class Call:
    """A request in the batch, whose client waits. All methods are called in the loop's thread."""

    def __init__(self, parsed: Parsed, on_complete: Callable[[LiveAnswer], None], deadline: float | None):
        self.request, self.parsed, self.deadline = parsed.request, parsed, deadline
        self.number, self.created = next(NUMBERS), int(time.time())
        self.answers = [
            LiveAnswer(generated, plan, parsed.max_tokens, partial(self._on_news, place), parsed.stream, parsed.behind)
            for place, (generated, plan) in enumerate(parsed.answers)
        ]
        self.num_open = len(self.answers)
        self._on_complete = on_complete
        self._news: deque[tuple[int, News]] = deque()
        self._changed = asyncio.Event()

    def _on_news(self, place: int, news: News) -> None:
        self._news.append((place, news))
        if news.complete:
            self.num_open -= 1
            self._on_complete(self.answers[place])
        if self.parsed.stream or not self.num_open:
            self._changed.set()

    async def news(self) -> list[tuple[int, News]]:
        """Wait for news, of all answers' ends unless the request streams; return them with their answers' places."""
        await self._changed.wait()
        self._changed.clear()
        news = list(self._news)
        self._news.clear()
        return news


class Calls:
    """Makes calls from bodies, and their answers, for one model.

    ``bodies``, which belong to a thread that reads bodies, need a tokenizer of their own; so does ``decoder``, which
    belongs to the loop's thread.
    """

    def __init__(self, live: LiveBatch, bodies: Bodies, decoder: RequestCodec, metrics: Metrics, names: list[str]):
        self.live, self.bodies, self.codec, self.metrics, self.names = live, bodies, decoder, metrics, names
        self.reader = ThreadPoolExecutor(1, "flexhybrid-reader")
        self.open: set[Call] = set()
        self.stopping = False  #: whether requests of clients get an error

    async def read(self, raw: bytes, url: str) -> Parsed:
        """Return the request of a body. Raise ApiError if it cannot be served."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.reader, self._parse, raw, url)
        except Refused as refused:
            raise refusal(refused) from None

    def _parse(self, raw: bytes, url: str) -> Parsed:
        body, codec = json_object(raw), self.bodies.codec
        if body.get("model") is None:
            body["model"] = self.names[0]
        model = body["model"]
        if isinstance(model, str) and model not in self.names:
            raise ApiError(
                404, f"the model {shown(model)} is not served; {self.names[0]} is", "model_not_found", "model"
            )
        stream, options = body.pop("stream", None) or False, body.pop("stream_options", None) or {}
        if not isinstance(stream, bool):
            raise Refused("invalid_value", f"stream is {shown(stream)}; it must be true or false", "stream")
        if not isinstance(options, dict):
            message = f"stream_options is {shown(options)}; it must be an object"
            raise Refused("invalid_value", message, "stream_options")
        if options and not stream:
            raise Refused("invalid_value", "stream_options needs stream to be true", "stream_options")
        with refusing():
            request = self.bodies.request(self.bodies.from_body("", body, url))
            return opened(codec, request, stream=stream, include_usage=bool(options.get("include_usage")))

    def begin(self, parsed: Parsed, deadline: float | None) -> Call:
        """Submit a request to the batch. ``deadline``: time of the loop at which the call ends with an error.
        Raise ApiError if the server is stopping."""
        self._check_stopping(parsed)
        call = Call(parsed, self._complete, deadline)
        self.live.submit(call.answers)
        self.open.add(call)
        return call

    def end(self, call: Call) -> None:
        """End a call, complete or not."""
        self.open.discard(call)
        if call.num_open:
            self.live.cancel(call.answers)

    def _complete(self, answer: LiveAnswer) -> None:
        stop = answer.generated.stop
        self.metrics.complete(answer, "error" if isinstance(stop, Failure) else "length" if stop is None else "stop")

    def fail(self) -> None:
        """Wake all calls after the engine has failed."""
        for call in self.open:
            call._changed.set()

    def of_clients(self) -> list[Call]:
        """Return the open calls of HTTP clients."""
        return [call for call in self.open if not call.parsed.behind]

    def stop(self) -> int:
        """End the calls of HTTP clients, and later ones, with an error; return their number."""
        self.stopping, ended = True, self.of_clients()
        for call in ended:
            call._changed.set()
        return len(ended)

    def _check_stopping(self, parsed: Parsed) -> None:
        if self.stopping and not parsed.behind:
            raise ApiError(503, "the server is stopping", "stopping")

    def _output(self, call: Call) -> RequestOutput:
        """Return the answers of a complete call. Raise ApiError if one of them failed."""
        replies, output = Replies(self.codec), None
        text = call.request.echo and call.request.echo.text
        for place in range(len(call.answers)):
            output = replies.add(0, self._checked(call, place), text, str(call.number))
        assert output
        return output

    async def output(self, call: Call) -> RequestOutput:
        """Return the answers of a call that does not stream, once they are complete. Raise ApiError if that fails."""
        await self._news(call)
        return self._output(call)

    async def body(self, call: Call) -> bytes:
        """Return ``output`` as a body."""
        return to_json(answer_body(call.number, call.request, await self.output(call), call.created))

    async def _news(self, call: Call) -> list[tuple[int, News]]:
        try:
            async with asyncio.timeout_at(call.deadline):
                news = await call.news()
        except TimeoutError:
            raise ApiError(504, "the request took longer than --request-timeout allows", "timeout") from None
        self._check_stopping(call.parsed)
        if self.live.error:
            raise ApiError(500, "the engine has failed; see the server's log", "engine_failed")
        return news

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        """Yield the answer's server-sent events."""
        request, chat = call.request, call.request.url == CHAT
        head = answer_head(call.number, request, call.created) | ({"object": "chat.completion.chunk"} if chat else {})
        head |= {"usage": None} if call.parsed.include_usage else {}
        # Tool calls, and what belongs before the answer, are known at the end.
        at_once = bool(request.tool_form or request.echo or request.params.prompt_logprobs is not None)
        pieces = [AnswerPieces(self.codec, answer.generated) for answer in call.answers]
        nothing = RequestOutput(None, request.token_ids, [])
        try:
            for place in range(len(pieces) if chat else 0):
                delta = {"role": "assistant", "content": ""}
                yield _event(head, {"index": place, "delta": delta, "logprobs": None, "finish_reason": None})
            while call.num_open or call._news:
                for place, news in await self._news(call):
                    if news.complete and not at_once:
                        whole = self.codec.completion(self._checked(call, place))
                        yield _event(head, self._choice(call, nothing, pieces[place].last(whole)))
                    elif not at_once and (piece := pieces[place].add(news)):
                        yield _event(head, self._choice(call, nothing, piece))
            output = self._output(call)
            for one in output.outputs if at_once else ():
                yield _event(head, self._choice(call, output, one))
            if call.parsed.include_usage:
                yield b"data: " + to_json(head | {"choices": []} | usage_of(request, output)) + b"\n\n"
            yield DONE
        except ApiError as error:
            yield b"data: " + to_json(error.body) + b"\n\n"

    def _checked(self, call: Call, place: int) -> Generated:
        """Return a complete answer. Raise ApiError if it failed."""
        generated = call.answers[place].generated
        if isinstance(generated.stop, Failure):
            raise ApiError(500, generated.stop, "generation_failed")
        return generated

    def _choice(self, call: Call, output: RequestOutput, piece: CompletionOutput) -> dict:
        """Return a piece as the choice of an event."""
        choice = choice_of(call.request, output, piece, call.number)
        choice["finish_reason"] = choice["finish_reason"] or None
        if message := choice.pop("message", None):
            del message["role"]
            for place, tool_call in enumerate(message.get("tool_calls", ())):
                tool_call["index"] = place
            choice["delta"] = message
        return choice


def _event(head: dict, choice: dict) -> bytes:
    return b"data: " + to_json(head | {"choices": [choice]}) + b"\n\n"
