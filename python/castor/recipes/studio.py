"""`castor studio`: a page for one user of this machine, whose buttons run castor's commands.

What imports gradio is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, urlencode

import typer

from castor.recipes import require
from castor.recipes.addresses import is_loopback
from castor.recipes.serve import listening

_GRACE_SECONDS = 1
"""Seconds that the page's open streams have when the studio ends."""
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' blob: data:; worker-src 'self' blob:; frame-ancestors 'none'"
)
"""Content security policy: the browser loads nothing from other machines."""
_OTHERS = ("evaluate", "export")
"""Commands that have a tab of the page where castor has them."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def studio(
    context: typer.Context,
    workspace: Annotated[
        Path, typer.Option(help="Folder of data, recipes, runs and logs; made if it is not there.")
    ] = Path("~/castor-studio"),
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0: a free one.", min=0, max=65535)
    ] = 7860,
    max_upload: Annotated[str, typer.Option(help="Size of an uploaded file.")] = "4GiB",
) -> None:
    """Open a page on this machine: data, recipe, training, chat and serving."""
    from castor.config import parse_bytes

    upload_bytes = parse_bytes(max_upload, "--max-upload")
    if importlib.util.find_spec("gradio") is None:
        raise ModuleNotFoundError(
            "castor studio needs gradio: pip install 'castor-torch[studio]'", name="gradio"
        )
    require("castor studio", "fastapi", "uvicorn", "yaml", "pydantic", "trl", "datasets")
    with contextlib.closing(listening("127.0.0.1", port)) as listener:
        import uvicorn

        from castor.recipes.studio_jobs import Workspace

        place = Workspace.at(workspace)
        # gradio reads these when it is imported: no statistics, and uploads stay in the workspace.
        os.environ |= {
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_TEMP_DIR": str(place.root / "uploads"),
        }
        from castor.recipes.studio_page import make_app

        root: Any = context.find_root().command
        has = [name for name in _OTHERS if name in root.list_commands(context)]
        token, own = secrets.token_urlsafe(32), listener.getsockname()[1]
        app = TokenGate(make_app(place, has, upload_bytes), token=token, port=own)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        typer.echo(
            f"castor studio: http://127.0.0.1:{own}/?token={token}\n"
            f"workspace: {place.root}; Ctrl-C ends the page, and what it has started goes on",
            err=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


class TokenGate:
    """An ASGI application that lets requests with the token through to another one.

    The address with the token gives the browser a cookie, which later requests carry. Requests that
    name another host, or come from a page of another origin, are refused: a page of the web cannot
    reach the studio through its user's browser.
    """

    def __init__(self, app: Any, *, token: str, port: int) -> None:
        self._app = app
        self._token = token.encode()
        self._cookie = f"castor-studio-{port}"  # cookies are of a host, not of a port
        self._set_cookie = f"{self._cookie}={token}; HttpOnly; SameSite=Strict; Path=/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        host = headers.get("host", b"").decode("latin-1")
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        origin = headers.get("origin", b"").decode("latin-1")
        if not is_loopback(host.rpartition(":")[0].strip("[]")) or (
            origin and origin != f"http://{host}"
        ):
            await _refuse(
                scope, send, "castor studio answers to its own page on this machine alone"
            )
        elif any(name == "token" and self._is_token(value) for name, value in query):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            to = "/" + quote(scope["path"].lstrip("/")) + (f"?{rest}" if rest else "")
            await _answer(send, 303, "", {"location": to, "set-cookie": self._set_cookie})
        elif self._is_token(_cookie(headers.get("cookie", b"").decode("latin-1"), self._cookie)):
            await self._app(scope, receive, _with_policy(send))
        else:
            await _refuse(
                scope,
                send,
                "this page needs its token: open the address that castor studio printed",
            )

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token)


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


async def _refuse(scope: Scope, send: Send, text: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, 403, text + "\n", {"content-type": "text/plain; charset=utf-8"})


async def _answer(send: Send, status: int, text: str, headers: dict[str, str]) -> None:
    body = text.encode()
    listed = {**headers, "content-length": str(len(body)), "cache-control": "no-store"}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in listed.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _with_policy(send: Send) -> Send:
    """Returns a `send` that adds headers by which the browser loads nothing from elsewhere."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message.get("headers", []),
                (b"content-security-policy", _POLICY.encode()),
                (b"referrer-policy", b"no-referrer"),
                (b"x-content-type-options", b"nosniff"),
            ]
        await send(message)

    return sending
