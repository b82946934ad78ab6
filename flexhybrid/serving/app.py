"""The routes of a server."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from flexhybrid.batch.openai import CHAT, COMPLETIONS, Refused, json_object
from flexhybrid.core.errors import InputError
from flexhybrid.serving.calls import ApiError, Calls, refusal
from flexhybrid.serving.options import ServerOptions

#: A body of up to this many times the limit is read and dropped, so that the client gets its error.
READ_AND_DROPPED = 8
GONE = 499  #: status of a response that no client waits for
Handler = Callable[[HttpRequest], Awaitable[Response]]


class EventStream(StreamingResponse):
    """A stream of events that calls ``on_end`` in the end, also if the client leaves or does not read."""

    def __init__(self, events: AsyncIterator[bytes], deadline: float, on_end: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self.deadline, self.on_end = deadline, on_end

    async def __call__(self, scope, receive, send) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self.deadline):
                    await super().__call__(scope, receive, send)
        finally:
            self.on_end()


async def read_body(http: HttpRequest, most: int) -> bytes:
    """Return a request's body. Raise ApiError if it has more than ``most`` bytes."""
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        elif size > READ_AND_DROPPED * most:
            break
    if size > most:
        raise ApiError(413, f"the body has more than {most:,} bytes (--max-body-size)", "body_too_large")
    return b"".join(parts)


class Api:
    """The handlers of a server's routes."""

    def __init__(self, calls: Calls, options: ServerOptions):
        self.calls, self.options, self.started = calls, options, int(time.time())
        self.live = calls.live

    def routes(self) -> list[Route]:
        """Return the routes; those below /v1 need the API key, if there is one."""
        return [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self.guarded(self._models)),
            Route("/v1/models/{name:path}", self.guarded(self._model)),
            Route(COMPLETIONS, self.guarded(self._answer), methods=["POST"]),
            Route(CHAT, self.guarded(self._answer), methods=["POST"]),
        ]

    def without_files(self) -> list[Route]:
        """Return the routes of files and batches for a server without --files-dir."""

        async def refused(_http: HttpRequest) -> Response:
            raise ApiError(404, "files and batches need a server with --files-dir", "not_found")

        paths = ("/v1/files{rest:path}", "/v1/batches{rest:path}")
        return [Route(path, self.guarded(refused), methods=["GET", "POST", "DELETE"]) for path in paths]

    def guarded(self, handler: Handler) -> Handler:
        """Return the handler behind the API key."""
        key = self.options.api_key

        async def checked(http: HttpRequest) -> Response:
            given = http.headers.get("authorization", "")
            if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")
            return await handler(http)

        return checked

    async def _health(self, _http: HttpRequest) -> Response:
        return Response(status_code=503 if self.live.error else 200)

    async def _metrics(self, _http: HttpRequest) -> Response:
        return PlainTextResponse(self.calls.metrics.text(self.live), media_type="text/plain; version=0.0.4")

    def _described(self, name: str) -> dict:
        described = {"id": name, "object": "model", "created": self.started, "owned_by": "flexhybrid"}
        return described | {"max_model_len": self.live.llm.shape.max_context}

    async def _models(self, _http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self.calls.names]})

    async def _model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name not in self.calls.names:
            raise ApiError(404, f"the model {name} is not served; {self.calls.names[0]} is", "model_not_found", "model")
        return JSONResponse(self._described(name))

    async def json_body(self, http: HttpRequest) -> dict:
        """Return the JSON object of a body. Raise ApiError if it has none."""
        try:
            return json_object(await read_body(http, self.options.body_bytes))
        except Refused as refused:
            raise refusal(refused) from None

    async def _answer(self, http: HttpRequest) -> Response:
        """Answer /v1/completions and /v1/chat/completions."""
        deadline = asyncio.get_running_loop().time() + self.options.request_timeout
        self._check_room(1)
        try:
            async with asyncio.timeout_at(deadline):
                parsed = await self.calls.read(await read_body(http, self.options.body_bytes), http.url.path)
        except TimeoutError:
            raise ApiError(408, "the body took longer than --request-timeout allows", "timeout") from None
        self._check_room(len(parsed.answers))
        call = self.calls.begin(parsed, deadline)
        if parsed.stream:
            return EventStream(self.calls.events(call), deadline + 1, lambda: self.calls.end(call))
        body, left = asyncio.ensure_future(self.calls.body(call)), asyncio.ensure_future(until_left(http))
        try:
            await asyncio.wait((body, left), return_when=asyncio.FIRST_COMPLETED)
            return Response(await body, media_type="application/json") if body.done() else Response(status_code=GONE)
        finally:
            body.cancel()
            left.cancel()
            self.calls.end(call)

    def _check_room(self, num_answers: int) -> None:
        """Raise ApiError if the queue has no room for the answers of a request."""
        most = self.options.max_queue_len
        if num_answers > most:
            raise ApiError(
                400, f"n is {num_answers}; the queue has {most} places (--max-queue-len)", "invalid_value", "n"
            )
        if self.live.num_waiting[0] + num_answers > most:
            raise ApiError(429, "too many requests wait (--max-queue-len): try again later", "queue_full")


async def until_left(http: HttpRequest) -> None:
    """Wait until the client closes the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _error(_http: HttpRequest, error: Exception) -> Response:
    """Return any error in OpenAI's form."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{error.detail}", None)
    elif isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    elif isinstance(error, InputError):
        error = ApiError(400, str(error), "invalid_value")
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"the server failed: {type(error).__name__}", "internal_error")
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(error.body, error.status, headers)


def make_app(api: Api, lifespan: Callable, more: list[Route]) -> Starlette:
    """Return the application. ``more``: routes of files and batches."""
    handlers = dict.fromkeys((ApiError, HTTPException, ClientDisconnect, InputError, Exception), _error)
    return Starlette(routes=[*api.routes(), *more], lifespan=lifespan, exception_handlers=handlers)
