"""HTTP side of the server: OpenAI's endpoints, their checks, and answers whole or as server-sent events.

A request becomes an `Exchange`, whose rows go to the dispatcher. Updates of rows come to the event loop by `deliver`;
the handler of the request wakes up, or, for a stream, sends all text that has come since the last time: a client that
reads slowly gets fewer, larger events, and what is kept for it is no more than its answer.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from zinfer.core.request import Failure, Update, nth_seed
from zinfer.job import openai
from zinfer.job.openai import Asked, Refused, ServerLimits
from zinfer.job.serve.dispatcher import Answer, Dispatcher, Metrics, queue_full
from zinfer.job.structure import Form
from zinfer.system.documents import Bounds, DocumentError, parse_json

BODY_S = 60.0  # seconds in which the body of a request must have come
QUIET_S = 15.0  # seconds without text after which a stream gets a comment, so that nobody takes it for dead
GONE = 499  # status of a request whose client went away, which nobody reads
HELD = 64  # largest bodies whose bytes all requests under way may hold together
LARGE, PARSERS = 1 << 16, 2  # bytes from which on bodies are parsed in threads, and the number of these
# Values of a body, parsed in 2 s at most, of which other threads wait for a tenth.
BODY = Bounds(values=1 << 21, composed=1 << 17)
PATHS = frozenset({openai.COMPLETIONS, openai.CHAT, "/v1/models", "/health", "/metrics"})

EXCHANGE = "zinfer.exchange"  # of a request, in its scope


def _error(failure: Failure, headers: Mapping[str, str] | None = None) -> Response:
    return _json(openai.error_object(failure), failure.status, headers)


def _refusal(refused: Refused) -> Response:
    headers = {} if refused.retry_s is None else {"retry-after": str(refused.retry_s)}
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _error(refused.failure, headers)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")


class Exchange:
    """One request and its answer."""

    def __init__(self, asked: Asked, model: str, size: int, client: str = "") -> None:
        self.model, self.size = model, size  # bytes of its body
        self.asked = asked._replace(prompts=())  # the rows have them, as long as they need them
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        seed, self.changed = asked.seed or secrets.token_hex(8), asyncio.Event()
        self.answers = [
            Answer(
                **vars(self.asked.request([], 1, nth_seed(seed, number), key=-1)), prompt=prompt, asked=self.asked,
                client=client, changed=self.changed,
            )
            for prompt in asked.prompts
            for number in range(asked.n)
        ]  # fmt: skip

    @property
    def over(self) -> bool:
        return all(answer.over for answer in self.answers)

    @property
    def failure(self) -> Failure | None:
        return next(filter(None, (answer.failure for answer in self.answers)), None)

    @property
    def tokens(self) -> tuple[int, int]:
        """Token counts of prompts, each counted once, and of delivered answers."""
        lengths = [
            (len(answer.prompt_ids), answer.tokens) if self.asked.stream or answer.over else (0, 0)
            for answer in self.answers
        ]
        return sum(prompt for prompt, _ in lengths[:: self.asked.n]), sum(tokens for _, tokens in lengths)

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens so far, and of reused ones."""
        return openai.usage_object(self.tokens, sum(answer.cached for answer in self.answers[:: self.asked.n]))

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [
            openai.choice_object(
                index, self.asked.chat,
                self.asked.parser(answer.prompt_ids).add(self._echo(answer) + answer.text, ended=True),
                answer.finish_reason or "", self._logprobs(answer),
            )
            for index, answer in enumerate(self.answers)
        ]  # fmt: skip
        return self._object(choices, usage=self.usage())

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return openai.completion_object(self.id, self.created, self.model, self.asked.chat, choices, **more)

    def _echo(self, answer: Answer) -> str:
        if not self.asked.echo or answer.echoed is None:
            return ""
        return answer.prompt if isinstance(answer.prompt, str) else answer.echoed.text

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        top = self.asked.logprobs
        if top is None:
            return None
        if self.asked.chat:
            return openai.chat_logprobs(answer.scores)
        prompt = answer.echoed if self.asked.echo else None
        logprobs = openai.text_logprobs(answer.scores, top, prompt, answer.offset)
        answer.offset += sum(map(openai.characters, logprobs["tokens"]))
        return logprobs

    def chunks(self) -> list[dict[str, Any]]:
        """Return the unsent text as choices of a stream, and discard it."""
        chunks = []
        for index, answer in enumerate(self.answers):
            update = answer.text or answer.scores or answer.finish_reason or not answer.begun
            if answer.sent or not update or (answer.failure is not None and not answer.text):
                continue
            finish_reason: str | None = answer.finish_reason
            if self.asked.chat:
                parser = answer.parser = answer.parser or self.asked.parser(answer.prompt_ids)
                delta = openai.delta_object(parser.add(answer.text, ended=answer.over), parser.calls)
                finish_reason = finish_reason and openai.finish_of(finish_reason, parser.calls)
                part: dict[str, Any] = {"delta": ({} if answer.begun else {"role": "assistant", "content": ""}) | delta}
            else:
                part = {"text": self._echo(answer) + answer.text}
            logprobs = self._logprobs(answer) if answer.scores or answer.echoed is not None else None
            choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish_reason}
            if finish_reason and "tool_calls" in part.get("delta", ()):  # clients take calls for whole at a later chunk
                chunks.append(choice | {"finish_reason": None})
                choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}
            if not answer.begun or finish_reason or logprobs or part.get("delta", True):
                chunks.append(choice)
            answer.text, answer.scores, answer.echoed, answer.begun = "", [], None, True
            answer.sent = answer.over
        return chunks

    def chunk(self, choices: list[dict[str, Any]], usage: bool = False) -> dict[str, Any]:
        """Return one event of a stream; `usage` asks for the numbers of tokens so far."""
        more = {"object": "chat.completion.chunk"} if self.asked.chat else {}
        if usage or self.asked.usages:
            return self._object(choices, **more, usage=self.usage())
        return self._object(choices, **more, **({"usage": None} if self.asked.usage else {}))


class Desk:
    """Requests under way, between the event loop and the dispatcher."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.limits = ServerLimits(dispatcher.plan.model.vocab_size, dispatcher.settings.max_waiting)
        self.form = dispatcher.settings.form
        self.held = 0  # bytes of the bodies of all requests under way
        self.parsers = ThreadPoolExecutor(PARSERS, "parser")

    def close(self, exchange: Exchange) -> None:
        """End a request; drop its unanswered rest."""
        self.held -= exchange.size
        if not exchange.over:
            self.dispatcher.drop(answer for answer in exchange.answers if not answer.over)


def deliver(updates: Iterable[tuple[Answer, Update]]) -> None:
    """Take updates of answers; in the event loop."""
    for answer, update in updates:
        answer.take(update)
        if answer.stream or update.ended:
            answer.changed.set()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """Answer as server-sent events. `close` is called at its end, whatever that is."""

    def __init__(self, exchange: Exchange, close: Callable[[], object]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_events(exchange), headers=headers, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(exchange: Exchange) -> AsyncIterator[str]:
    """Yield new text as server-sent events, or a comment without any."""
    while True:
        failure = exchange.failure
        lines = [exchange.chunk([choice]) for choice in exchange.chunks()]
        over = exchange.over or failure is not None
        if over and exchange.asked.usage and failure is None:
            lines.append(exchange.chunk([], usage=True))
        if failure is not None:
            lines.append(openai.error_object(replace(failure, param=None)))
        text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
        if over and failure is None:
            text += "data: [DONE]\n\n"
        yield text or ": waiting\n\n"
        if over:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(exchange.changed.wait(), QUIET_S)
        exchange.changed.clear()


async def _changed(exchange: Exchange, gone: "asyncio.Future[None]", patience_s: float | None) -> None:
    """Wait for an update, the client's end, or `patience_s`."""
    waiter = asyncio.ensure_future(exchange.changed.wait())
    try:
        both: set[asyncio.Future[Any]] = {waiter, gone}
        await asyncio.wait(both, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        exchange.changed.clear()
    finally:
        waiter.cancel()


class Gate:
    """Outermost layer of the application: the key, the count of requests, and a line about each."""

    def __init__(self, app: Any, key: str | None, metrics: Metrics, log: Callable[[str], None]) -> None:
        self._app, self._metrics, self._log = app, metrics, log
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 0, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope["path"] = scope["path"].rstrip("/") or "/"
        path = scope["path"] if scope["path"] in PATHS else "other"
        try:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            kind, _, key = given.partition(b" ")
            fine = self._key is None or (hmac.compare_digest(key.strip(), self._key) and kind.lower() == b"bearer")
            if scope["path"] != "/health" and not fine:
                why = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                await _refusal(Refused("invalid_api_key", why, status=401))(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
            exchange, seconds = scope.get(EXCHANGE), time.monotonic() - began
            tokens = "" if exchange is None else "{}+{} tokens ".format(*exchange.tokens)
            name = scope["raw_path"].decode("latin-1")[:100]
            self._log(f"{scope['method']} {name} {status or 'gone'} {tokens}{seconds:.2f} s")


def make_app(desk: Desk, log: Callable[[str], None]) -> Any:
    """Return the ASGI application; `log` gets a line about each request."""
    settings = desk.dispatcher.settings
    model, names = settings.model, (settings.model, *settings.aliases)
    metrics = desk.dispatcher.metrics
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    began = int(time.time())
    about = {name: {"id": name, "object": "model", "created": began, "owned_by": "zinfer"} for name in names}

    @app.exception_handler(Refused)
    async def refused(_request: Request, error: Refused) -> Response:
        return _refusal(error)

    @app.exception_handler(Exception)
    async def failed(_request: Request, _exception: Exception) -> Response:
        return _error(Failure(code="internal_error", message="the server failed"))

    @app.exception_handler(HTTPException)
    async def not_there(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "")
        message = f"{request.method[:20]} {request.url.path[:60]}: {error.detail}; there are {', '.join(sorted(PATHS))}"
        return _error(Failure(code=code, message=message, status=error.status_code), error.headers)

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> Response:
        return _json({"object": "list", "data": [*about.values()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name not in about:
            raise _no_model(name, names)
        return _json(about[name])

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        it = desk.dispatcher
        if it.state != "ready":
            return _json({"status": it.state}, 503)
        reuse = "on" if it.cannot_reuse is None else f"off: {it.cannot_reuse}"
        return _json({"status": "ok", "worker": "running" if it.unfinished else "idle", "prefix_reuse": reuse})

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type=metrics.content_type)

    async def answered(request: Request, chat: bool) -> Response:
        body = await _body(request, settings.max_bytes, desk)
        try:
            read = partial(_read, body, chat, desk.limits, desk.form)
            large = len(body) >= LARGE
            asked = await asyncio.get_running_loop().run_in_executor(desk.parsers, read) if large else read()
            if asked.model is not None and asked.model not in about:
                raise _no_model(asked.model, names)
            client = request.client.host if request.client else ""
            exchange = request.scope[EXCHANGE] = Exchange(asked, model, len(body), client)
            desk.dispatcher.submit(exchange.answers)
        except BaseException:
            desk.held -= len(body)
            raise
        del body, asked
        stream = exchange.asked.stream
        gone = asyncio.ensure_future(_until_gone(request.receive))
        with ExitStack() as at_end:
            at_end.callback(desk.close, exchange)
            at_end.callback(gone.cancel)
            while not exchange.over and exchange.failure is None:
                await _changed(exchange, gone, QUIET_S if stream else None)
                if gone.done():
                    return Response(status_code=GONE)
                if stream:
                    break
            failure = exchange.failure
            if failure is not None and not (stream and any(answer.text for answer in exchange.answers)):
                return _error(failure)
            return Events(exchange, at_end.pop_all().close) if stream else _json(exchange.body())

    app.add_route(openai.COMPLETIONS, partial(answered, chat=False), ["POST"])
    app.add_route(openai.CHAT, partial(answered, chat=True), ["POST"])
    return Gate(app, settings.key, metrics, log)


def _no_model(name: str, names: Iterable[str]) -> Refused:
    there = ", ".join(map(repr, names))
    return Refused("model_not_found", f"there is no model {name[:60]!r} here; there is {there}", "model", 404)


def _read(body: bytes, chat: bool, limits: ServerLimits, form: Form) -> Asked:
    try:
        fields = parse_json(body, "the body", bounds=BODY)
    except DocumentError as error:
        raise Refused("invalid_json", str(error)[:300]) from None
    if not isinstance(fields, dict):
        raise Refused("invalid_json", "the body is not a JSON object")
    return openai.read_body(fields, chat, limits, form)


async def _body(request: Request, max_bytes: int, desk: Desk) -> bytes:
    """Return a request's body, whose bytes `desk` counts. Raises Refused if it is large, slow, or not JSON."""
    # A page in a browser could send a body of another type unasked.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused("unsupported_media_type", "send the body as `Content-Type: application/json`", status=415)
    too_large = Refused("request_too_large", f"the body may have {max_bytes:,} bytes at most", status=413)
    with suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > max_bytes:
            raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                desk.held += len(part)
                if size > max_bytes:
                    raise too_large
                if desk.held > HELD * max_bytes:
                    raise queue_full()
                parts.append(part)
        return b"".join(parts)
    except BaseException as error:
        desk.held -= size
        if isinstance(error, ClientDisconnect):
            raise Refused("client_gone", "the client went away", status=GONE) from None
        if isinstance(error, TimeoutError):
            raise Refused("timeout", f"the body did not come within {BODY_S:g} s", status=408) from None
        raise
