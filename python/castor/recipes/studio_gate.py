"""The gate of `castor studio`: requests with the token, from the studio's own page, come in."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from castor.recipes.serve import is_loopback

_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "connect-src 'self' blob: data:; worker-src 'self' blob:; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Headers of each page: the browser loads nothing from other machines."""
_REFUSED = 1008
"""WebSocket's code of a refusal."""


class TokenGate:
    """An ASGI application that lets requests with the token through to another one.

    The address with the token gives the browser a cookie, which later requests carry. Requests that
    name another host, or come from a page of another origin, are refused: a page of the web cannot
    reach the studio through its user's browser.

    Args:
        app: The application inside.
        token: The token.
        port: Port of the studio: cookies are of a host, not of a port.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token, f"castor-studio-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        answer = None if scope["type"] == "lifespan" else self._answer(HTTPConnection(scope))
        if answer is None:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await WebSocketClose(_REFUSED)(scope, receive, send)
        else:
            answer.headers["cache-control"] = "no-store"
            await answer(scope, receive, send)

    def _answer(self, asked: HTTPConnection[Any]) -> Response | None:
        """Returns the answer to a request that may not come in; None: it may."""
        host = asked.headers.get("host", "")
        own = is_loopback(host.rpartition(":")[0].strip("[]"))
        if not own or asked.headers.get("origin", f"http://{host}") != f"http://{host}":
            said = "castor studio answers to its own page on this machine alone\n"
            return PlainTextResponse(said, 403)
        if any(map(self._is_token, asked.query_params.getlist("token"))):
            answer = RedirectResponse(asked.url.remove_query_params("token"), 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        if self._is_token(asked.cookies.get(self._cookie, "")):
            return None
        said = "this page needs its token: open the address that castor studio printed\n"
        return PlainTextResponse(said, 403)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return sending
