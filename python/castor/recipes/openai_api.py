"""OpenAI's HTTP interface to one model: models, chat completions and completions."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from castor.errors import Error, OutOfMemoryError, UsageError
from castor.recipes.generation import (
    Answer,
    Sampling,
    check_length,
    encode_chat,
    encode_text,
    generate,
)
from castor.recipes.models import InferenceModel
from castor.recipes.serve import Limits, is_loopback
from castor.recipes.turns import QueueFullError, Turn, Turns

_COMPLETION_TOKENS = 16
"""Tokens of a completion that says no number, as in OpenAI's interface."""
_UNBOUNDED_TOKENS = 1024
"""Tokens of an answer where neither the request, the server nor the model has a limit."""
_MOST_ANSWERS = 16
_BODY_SECONDS = 60.0
"""Seconds in which a client must have sent its request."""


class ApiError(Exception):
    """A refusal, in OpenAI's format.

    Args:
        status: HTTP status.
        message: The sentence that people read.
        param: Name of the argument that is refused.
        code: OpenAI's word for the reason.
        headers: HTTP headers besides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """Returns the HTTP response that says it."""
        return JSONResponse(self.body, self.status, headers=self.headers)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class _Asked(BaseModel):
    """Arguments that both kinds of completions have."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=_MOST_ANSWERS)
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    user: str | None = None


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None

    def turn(self) -> dict[str, str]:
        """Returns the message as chat templates take it; a developer's is the system's there."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class _ChatAsked(_Asked):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


class _CompletionAsked(_Asked):
    prompt: str | list[int] | list[str] | list[list[int]]


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "store": (None, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
}
"""Arguments of OpenAI's that castor serve lacks, and their values that ask for nothing."""

AnyAsked = TypeVar("AnyAsked", bound=_Asked)


def _parsed(kind: type[AnyAsked], body: bytes) -> AnyAsked:
    """Reads a request.

    Raises:
        ApiError: It is no JSON, an argument is unknown or not supported, or a value is wrong.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ApiError(400, f"the request is a {type(given).__name__}; give arguments by name")
    for name in _NEUTRAL.keys() & given.keys():
        value = json.dumps(given.pop(name))  # 0 is not False there
        if value not in map(json.dumps, _NEUTRAL[name]):
            raise ApiError(
                400,
                f"castor serve does not support {name!r}; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            said = "there is no such argument; leave it out"
        param = str(first["loc"][0]) if first["loc"] else None
        raise ApiError(400, f"{where}: {said}", param=param) from error


@dataclass(kw_only=True, eq=False)
class _Work:
    """A request while it waits and is computed."""

    prompt: list[int]
    sampling: Sampling
    emit: Callable[[Any], None]
    """Receives (answer, text) pairs, then the list of answers or an exception, from any thread."""


@dataclass(kw_only=True)
class _Form:
    """Names that tell chat completions from completions in what is sent back."""

    kind: str
    chunk_kind: str
    id: str
    model: str
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def choice(self, i: int, answer: Answer) -> dict[str, Any]:
        """Returns a finished answer."""
        common = {"index": i, "logprobs": None, "finish_reason": answer.finish}
        if not self.chat:
            return {**common, "text": answer.text}
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {**common, "message": message}

    def piece(
        self, i: int, text: str, finish: str | None = None, *, first: bool = False
    ) -> dict[str, Any]:
        """Returns text by which an answer goes on, or its end."""
        common = {"index": i, "logprobs": None, "finish_reason": finish}
        if not self.chat:
            return {**common, "text": text}
        role = {"role": "assistant"} if first else {}
        content = {} if finish is not None else {"content": text}
        return {**common, "delta": role | content}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """Returns the body of a response that is not streamed."""
        return {**self._head(self.kind), "choices": choices, "usage": usage}

    def event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """Returns a server-sent event."""
        return (
            f"data: {json.dumps({**self._head(self.chunk_kind), 'choices': choices, **more})}\n\n"
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Api:
    """The application: `Api(...).app` is what uvicorn serves.

    Args:
        model: The model that answers.
        name: Name by which clients ask for it.
        keys: Keys of which clients must show one; none: anybody on this machine may ask.
        limits: The most that a request may ask for.
    """

    def __init__(
        self, model: InferenceModel, *, name: str, keys: Sequence[str], limits: Limits
    ) -> None:
        self._model, self._name, self._limits = model, name, limits
        self._keys = [key.encode() for key in keys]
        self._started = int(time.time())
        self.turns: Turns[_Work] = Turns(self._compute, max_waiting=limits.max_waiting)
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan)
        self.app.add_api_route("/v1/models", self._models, methods=["GET"])
        self.app.add_api_route("/v1/models/{name}", self._one_model, methods=["GET"])
        self.app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        self.app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        self.app.add_exception_handler(ApiError, _refused)
        self.app.add_exception_handler(HTTPException, _not_here)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.turns.close)

    async def _models(self, request: Request) -> Response:
        self._client(request)
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _one_model(self, request: Request, name: str) -> Response:
        self._client(request)
        self._check_name(name)
        return JSONResponse(self._about())

    async def _chat(self, request: Request) -> Response:
        client = self._client(request)
        asked = _parsed(_ChatAsked, await self._body(request))
        self._check_name(asked.model)
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens are the same: give one",
                           param="max_tokens")  # fmt: skip
        messages = [one.turn() for one in asked.messages]
        with _as_bad_request("messages"):
            prompt = await asyncio.to_thread(encode_chat, self._model, messages)
        most = asked.max_completion_tokens or asked.max_tokens
        form = _Form(
            kind="chat.completion", chunk_kind="chat.completion.chunk", chat=True,
            id=f"chatcmpl-{uuid.uuid4().hex}", model=self._name,
        )  # fmt: skip
        return await self._answer(request, client, asked, prompt, most, form)

    async def _complete(self, request: Request) -> Response:
        client = self._client(request)
        asked = _parsed(_CompletionAsked, await self._body(request))
        self._check_name(asked.model)
        with _as_bad_request("prompt"):
            prompt = await asyncio.to_thread(self._encoded, asked.prompt)
        form = _Form(
            kind="text_completion", chunk_kind="text_completion", chat=False,
            id=f"cmpl-{uuid.uuid4().hex}", model=self._name,
        )  # fmt: skip
        return await self._answer(request, client, asked, prompt, asked.max_tokens, form)

    def _encoded(self, prompt: str | list[int] | list[str] | list[list[int]]) -> list[int]:
        """Returns the token ids of a prompt in any of its forms."""
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise UsageError(
                    f"{len(prompt)} prompts are given, and castor serve takes one: send a request "
                    "for each"
                )
            prompt = prompt[0]
        if isinstance(prompt, str):
            return encode_text(self._model, prompt)
        ids: list[int] = prompt  # type: ignore[assignment]
        rows = self._model.model.get_input_embeddings().weight.shape[0]
        wrong = next((one for one in ids if not 0 <= one < rows), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is not one of the model's {rows:,}")
        if not ids:
            raise UsageError("the prompt has no tokens; give some")
        return ids

    async def _answer(
        self,
        request: Request,
        client: str,
        asked: _Asked,
        prompt: list[int],
        max_new_tokens: int | None,
        form: _Form,
    ) -> Response:
        """Queues a request, and sends its answers as they come or at the end."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()

        def emit(event: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(events.put_nowait, event)

        with _as_bad_request(None):
            default = None if form.chat else _COMPLETION_TOKENS
            sampling = self._sampling(asked, len(prompt), max_new_tokens, default)
        work = _Work(prompt=prompt, sampling=sampling, emit=emit)
        turn = Turn(client=client, user=asked.user or "", work=work)
        try:
            self.turns.enter(turn)
        except QueueFullError as error:
            raise ApiError(
                429,
                f"{error}; try again in {error.retry_seconds} s",
                code="queue_full",
                headers={"Retry-After": str(error.retry_seconds)},
            ) from error
        watch = asyncio.create_task(self._watch(request, turn))
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            stream = self._streamed(turn, watch, events, form, usage=usage)
            return StreamingResponse(stream, media_type="text/event-stream",
                                     headers={"Cache-Control": "no-cache"})  # fmt: skip
        try:
            while not isinstance(event := await events.get(), list):
                if isinstance(event, ApiError):
                    raise event
            choices = [form.choice(i, answer) for i, answer in enumerate(event)]
            return JSONResponse(form.whole(choices, _usage(prompt, event)))
        finally:
            self.turns.leave(turn)
            watch.cancel()

    async def _streamed(
        self,
        turn: Turn[_Work],
        watch: asyncio.Task[None],
        events: asyncio.Queue[Any],
        form: _Form,
        *,
        usage: bool,
    ) -> AsyncIterator[str]:
        """Yields server-sent events until the answers are there."""
        more: dict[str, Any] = {"usage": None} if usage else {}
        try:
            if form.chat:
                for i in range(turn.work.sampling.answers):
                    yield form.event([form.piece(i, "", first=True)], **more)
            while not isinstance(event := await events.get(), list):
                if isinstance(event, ApiError):
                    yield f"data: {json.dumps(event.body)}\n\n"
                    return
                yield form.event([form.piece(*event)], **more)
            for i, answer in enumerate(event):
                yield form.event([form.piece(i, "", answer.finish)], **more)
            if usage:
                yield form.event([], usage=_usage(turn.work.prompt, event))
            yield "data: [DONE]\n\n"
        finally:
            self.turns.leave(turn)
            watch.cancel()

    async def _watch(self, request: Request, turn: Turn[_Work]) -> None:
        """Gives a request up once its client is gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.turns.leave(turn)
        turn.work.emit(ApiError(499, "the client is gone"))

    def _compute(self, turn: Turn[_Work]) -> None:
        """Computes a request, in the thread of the turns."""
        work = turn.work
        if turn.gone.is_set():
            work.emit(ApiError(503, "castor serve ends", code="server_ends"))
            return
        try:
            found: Any = generate(
                self._model,
                work.prompt,
                work.sampling,
                on_text=lambda i, text: work.emit((i, text)),
                cancelled=turn.gone,
            )
            if any(answer.finish == "timeout" for answer in found):
                count = sum(len(answer.token_ids) for answer in found)
                found = ApiError(
                    504,
                    f"the request took longer than {self._limits.max_seconds:g} s, and {count} "
                    "tokens came; ask for fewer, or start castor serve with more --max-seconds",
                    code="timeout",
                )
            elif any(answer.finish == "cancelled" for answer in found):
                found = ApiError(503, "castor serve ends", code="server_ends")
        except OutOfMemoryError as error:
            text = str(error).split("\n")[0]
            found = ApiError(400, f"the request does not fit in memory: {text}",
                             code="out_of_memory")  # fmt: skip
        except Exception as error:  # the next request shall be served
            text = str(error).split("\n")[0] if isinstance(error, Error) else repr(error)
            found = ApiError(500, f"the request failed: {text}")
        work.emit(found)

    def _sampling(
        self, asked: _Asked, num_prompt: int, most: int | None, default: int | None
    ) -> Sampling:
        """Returns how to sample, with the limits checked.

        Args:
            asked: The request.
            num_prompt: Number of tokens of the prompt.
            most: New tokens that it asks for, if it says a number.
            default: New tokens where it says none; None: all that there is room for.
        """
        limit, positions = self._limits.max_new_tokens, self._model.max_positions
        if most is None:
            rest = None if positions is None else positions - num_prompt
            known = [one for one in (limit, rest, default) if one is not None]
            most = max(1, min(known)) if known else _UNBOUNDED_TOKENS
        if limit is not None and most > limit:
            raise UsageError(
                f"{most:,} new tokens are asked for, and this server gives at most {limit:,}"
            )
        check_length(self._model, num_prompt, most)
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        return Sampling(
            max_new_tokens=most, temperature=asked.temperature, top_p=asked.top_p,
            top_k=asked.top_k, seed=asked.seed, stop=tuple(stop), answers=asked.n or 1,
            max_seconds=self._limits.max_seconds,
        )  # fmt: skip

    async def _body(self, request: Request) -> bytes:
        """Reads the body of a request.

        Raises:
            ApiError: It is larger than may be, or does not come.
        """
        most = self._limits.max_body_bytes
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # What a page of another site may send from a browser without asking is not JSON.
            raise ApiError(415, f"the request is {kind or 'of no type'}; send application/json")
        parts: list[bytes] = []

        async def read() -> None:
            count = 0
            async for part in request.stream():
                count += len(part)
                if count > most:
                    raise ApiError(413, f"the request has more than {most:,} bytes; send less",
                                   headers={"Connection": "close"})  # fmt: skip
                parts.append(part)

        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > most:
            raise ApiError(413, f"the request has {int(declared):,} bytes, and may have {most:,}",
                           headers={"Connection": "close"})  # fmt: skip
        try:
            await asyncio.wait_for(read(), _BODY_SECONDS)
        except asyncio.TimeoutError as error:
            raise ApiError(408, f"the request did not come within {_BODY_SECONDS:g} s") from error
        except ClientDisconnect as error:
            raise ApiError(499, "the client is gone") from error
        return b"".join(parts)

    def _client(self, request: Request) -> str:
        """Returns the name of the client, by its key and address.

        Raises:
            ApiError: It shows no key, or a wrong one; or there is no key, and it is no client of
                this machine's.
        """
        address = request.client.host if request.client else ""
        if not self._keys:
            host = request.headers.get("host", "")
            if not _is_local(host):
                # A page of another site, whose name was made to mean this machine.
                raise ApiError(403, f"castor serve has no key: it answers to localhost, not {host}")
            return address
        shown = request.headers.get("authorization", "").removeprefix("Bearer ").strip().encode()
        right = [hmac.compare_digest(shown, key) for key in self._keys]
        if not any(right):
            said = "wrong" if shown else "missing"
            raise ApiError(401, f"the API key is {said}; give one of castor serve's --api-key",
                           code="invalid_api_key")  # fmt: skip
        return f"{hashlib.sha256(shown).hexdigest()} {address}"

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise ApiError(404, f"there is no model {name!r}; castor serve has {self._name!r}",
                           param="model", code="model_not_found")  # fmt: skip

    def _about(self) -> dict[str, Any]:
        about = {"id": self._name, "object": "model", "created": self._started}
        return {**about, "owned_by": "castor"}


def _usage(prompt: list[int], answers: list[Answer]) -> dict[str, int]:
    new = sum(len(answer.token_ids) for answer in answers)
    counts = {"prompt_tokens": len(prompt), "completion_tokens": new}
    return {**counts, "total_tokens": len(prompt) + new}


@contextlib.contextmanager
def _as_bad_request(param: str | None) -> Iterator[None]:
    """Turns what castor refuses into HTTP status 400."""
    try:
        yield
    except (UsageError, ValueError) as error:
        raise ApiError(400, str(error), param=param) from error


def _is_local(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # urlsplit's
        return False


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _not_here(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    text = (
        f"castor serve has no {request.method} {request.url.path}; it has GET /v1/models, "
        "POST /v1/chat/completions and POST /v1/completions"
    )
    return ApiError(status, text).response()
