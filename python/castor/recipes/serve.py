"""`castor serve`: one model over OpenAI's HTTP interface, in a memory budget.

What imports torch is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from castor import memory_options
from castor.recipes import options, require
from castor.recipes.addresses import is_loopback

_GRACE_SECONDS = 5
"""Seconds that open connections have for their last words when the server ends."""


def serve(
    path: options.ModelPath,
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
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer. Default: the model's.", min=1)
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait; further ones get HTTP 429.", min=0)
    ] = 64,
    max_seconds: Annotated[float, typer.Option(help="Seconds of computing of a request.")] = 600.0,
    max_body: Annotated[str, typer.Option(help="Size of a request.")] = "4MiB",
    base: options.Base = None,
    tokenizer: options.TokenizerPath = None,
    device_memory: memory_options.DeviceMemory = None,
    host_memory: memory_options.HostMemory = None,
    device: memory_options.Device = None,
    precision: options.Precision = None,
    nvme: memory_options.Nvme = None,
    config: memory_options.Config = None,
    settings: memory_options.Settings = None,
) -> None:
    """Serve a model over OpenAI's HTTP interface, in a memory budget."""
    from castor.config import parse_bytes
    from castor.errors import UsageError

    chosen = memory_options.read_options(
        config, settings, nvme=nvme, device_memory=device_memory, host_memory=host_memory,
        device=device, precision=precision,
    )  # fmt: skip
    body_bytes = parse_bytes(max_body, "--max-body")
    if not max_seconds > 0:
        raise UsageError(f"--max-seconds is {max_seconds:g}; it must be more than 0")
    keys = checked_keys(host, api_key or [])
    require("castor serve", "transformers", "fastapi", "uvicorn", "jinja2")
    with contextlib.closing(listening(host, port)) as listener:
        import transformers

        from castor.recipes.models import load_for_inference
        from castor.recipes.openai_api import Api, Limits

        transformers.logging.set_verbosity_error()
        model = load_for_inference(path, settings=chosen or {}, base=base, tokenizer=tokenizer)
        limits = Limits(
            max_new_tokens=max_new_tokens, max_body_bytes=body_bytes,
            max_seconds=max_seconds, max_waiting=max_queue,
        )  # fmt: skip
        api = Api(model, name=name or model.name, keys=keys, limits=limits)
        where = listener.getsockname()
        shown = f"[{where[0]}]" if ":" in where[0] else where[0]
        typer.echo(
            f"castor serve: {name or model.name} at http://{shown}:{where[1]}/v1, "
            f"{'with a key' if keys else 'without a key'}; Ctrl-C ends it",
            err=True,
        )
        with contextlib.suppress(KeyboardInterrupt):
            server_of(api).run(sockets=[listener])


def server_of(api: Any) -> Any:
    """Returns a uvicorn.Server of an Api, which stops generating as soon as it is told to end."""
    import uvicorn

    server: Any = uvicorn.Server(
        uvicorn.Config(
            api.app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
    )
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
