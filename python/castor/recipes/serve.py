"""`castor serve`: one model over OpenAI's HTTP interface, in a memory budget.

What imports torch is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from castor.options import Memory, ModelPaths, from_fields, read_size
from castor.recipes import require

_GRACE_SECONDS = 5
"""Seconds that open connections have for their last words when the server ends."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that a client may ask of the server."""

    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None
    """Most tokens of an answer. Default: as many as the model has positions for."""
    max_waiting: Annotated[int, typer.Option("--max-queue", min=0)] = 64
    """Requests that may wait while another one is computed; further ones get HTTP 429."""
    max_seconds: float = 600.0
    """Seconds of computing of a request."""
    max_body_bytes: Annotated[
        int,
        typer.Option("--max-body"),
        read_size("--max-body"),
    ] = 4 * 2**20
    """Size of a request. Default: 4MiB."""

    def __post_init__(self) -> None:
        if not self.max_seconds > 0:
            raise ValueError(f"--max-seconds is {self.max_seconds:g}; it must be more than 0")


@from_fields
def serve(
    paths: ModelPaths,
    limits: Limits,
    memory: Memory,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="CASTOR_API_KEY",
            help="Key that clients must show; may be given several times, one for each client.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients. Default: the folder's.")
    ] = None,
) -> None:
    """Serve a model over OpenAI's HTTP interface, in a memory budget."""
    settings = memory.arguments() or {}
    keys = checked_keys(host, api_key or [])
    require("castor serve", "transformers", "fastapi", "uvicorn", "jinja2")
    with contextlib.closing(listening(host, port)) as listener:
        import transformers

        from castor.recipes.models import load_for_inference
        from castor.recipes.openai_api import Api

        transformers.logging.set_verbosity_error()
        model = load_for_inference(
            paths.path, settings=settings, base=paths.base, tokenizer=paths.tokenizer
        )
        api = Api(model, name=name or model.name, keys=keys, limits=limits)
        where = listener.getsockname()
        shown = f"[{where[0]}]" if ":" in where[0] else where[0]
        typer.echo(
            f"castor serve: {name or model.name} at http://{shown}:{where[1]}/v1, "
            f"{'with a key' if keys else 'without a key'}; Ctrl-C ends it",
            err=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            server_of_api(api).run(sockets=[listener])


def server_of(app: Any, *, grace_seconds: int = _GRACE_SECONDS) -> Any:
    """Returns a uvicorn.Server of an ASGI application, which says nothing but warnings."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=grace_seconds,
        )
    )


def server_of_api(api: Any) -> Any:
    """Returns a server of an Api, which stops generating as soon as it is told to end."""
    server = server_of(api.app)
    its_own = server.handle_exit

    def handle_exit(sig: int, frame: Any) -> None:
        threading.Thread(target=api.turns.close, daemon=True).start()
        its_own(sig, frame)

    server.handle_exit = handle_exit
    return server


def checked_keys(host: str, keys: Sequence[str]) -> list[str]:
    """Returns the keys, if they may be served at an address.

    Raises:
        UsageError: A key is empty or no plain text, or others can reach the address without a key.
    """
    from castor.errors import UsageError

    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError("--api-key: give a text of ASCII letters, digits and signs, no spaces")
    if not keys and not is_loopback(host):
        raise UsageError(
            f"--host {host}: other machines could use the model; give an --api-key that clients "
            "must show, or serve at 127.0.0.1"
        )
    return list(keys)


def is_loopback(name: str) -> bool:
    """Whether a host name or an IP address, without a port, means this machine alone."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens, so that a port in use is found before a model is loaded.

    Raises:
        UsageError: The port is in use or not allowed, or the address is not this machine's.
    """
    from castor.errors import UsageError

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise UsageError(f"--host {host}: there is no such address ({error.strerror})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            reason = "in use by another program; give another one with --port, or --port 0"
        elif error.errno == errno.EACCES:
            reason = "not allowed to this user; give one from 1024 on with --port"
        else:
            reason = f"not to be had: {os.strerror(error.errno or 0)}"
        raise UsageError(f"port {port} of {host} is {reason}") from error
    return listener
