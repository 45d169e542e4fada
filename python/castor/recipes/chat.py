"""`castor chat`: a conversation with a model in the terminal, in a memory budget.

What imports torch is imported within functions: `castor --help` imports this file.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castor.options import Memory, ModelPaths, from_fields
from castor.recipes import require

if TYPE_CHECKING:
    from castor.recipes.generation import Sampling
    from castor.recipes.models import InferenceModel

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters of a model's text that a terminal would obey instead of showing them."""
_DEFAULT_TOKENS = 1024
_HELP = "/reset begins a new conversation, Ctrl-C ends an answer, /exit or Ctrl-D the chat."


@from_fields
def chat(
    model: ModelPaths,
    memory: Memory,
    system: Annotated[str | None, typer.Option(help="Text of a system turn.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: greedy. Default: the model's own, or else 1.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens of this share.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from this number of likeliest tokens.")
    ] = None,
    beams: Annotated[int, typer.Option(help="Beams of a search, with --temperature 0.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer; up to 4 times.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer. Default: what fits, at most 1024.")
    ] = None,
) -> None:
    """Talk to a model in the terminal, in a memory budget."""
    settings = memory.arguments() or {}
    require("castor chat", "transformers", "jinja2")
    import transformers

    from castor.recipes.generation import Sampling
    from castor.recipes.models import load_for_inference

    sampling = Sampling(
        max_new_tokens=_DEFAULT_TOKENS if max_new_tokens is None else max_new_tokens,
        temperature=temperature, top_p=top_p, top_k=top_k, beams=beams, seed=seed,
        stop=tuple(stop or ()),
    )  # fmt: skip
    transformers.logging.set_verbosity_error()
    loaded = load_for_inference(
        model.path, settings=settings, base=model.base, tokenizer=model.tokenizer
    )
    if sys.stdin.isatty():
        typer.echo(f"castor chat: {loaded.name}. {_HELP}", err=True)
    converse(
        loaded,
        sampling,
        system=system,
        fits=max_new_tokens is None,
        ask=_asked_at("> " if sys.stdin.isatty() else ""),
    )


def converse(
    model: InferenceModel,
    sampling: Sampling,
    *,
    system: str | None,
    fits: bool,
    ask: Callable[[], str | None],
) -> None:
    """Answers turn after turn, until there is no more.

    Args:
        model: The model that answers.
        sampling: How to choose tokens.
        system: Text of the system turn, if there is one.
        fits: Whether an answer may be shorter than the sampling says where less room is left.
        ask: Gives the next turn of the user; None ends the conversation.
    """
    from castor.errors import OutOfMemoryError, UsageError

    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    while (turn := ask()) is not None:
        if turn.strip() in ("/exit", "/quit"):
            return
        if turn.strip() == "/reset":
            messages = list(opening)
            continue
        if not turn.strip():
            continue
        asked = [*messages, {"role": "user", "content": turn}]
        try:
            answer = _answered(model, asked, sampling, fits=fits)
        except (UsageError, OutOfMemoryError) as error:
            typer.echo(f"castor chat: {str(error).splitlines()[0]}; /reset begins anew", err=True)
            if not sys.stdin.isatty():
                raise typer.Exit(1) from error
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def _answered(
    model: InferenceModel, messages: list[dict[str, str]], sampling: Sampling, *, fits: bool
) -> str:
    """Prints the answer to a conversation while it comes, and returns it."""
    from dataclasses import replace

    from castor.recipes.generation import encode_chat, generate

    prompt = encode_chat(model, messages)
    room = None if model.max_positions is None else model.max_positions - len(prompt)
    if fits and room is not None:
        sampling = replace(sampling, max_new_tokens=max(1, min(sampling.max_new_tokens, room)))
    with _ended_by_interrupt() as cancelled:
        found = generate(
            model, prompt, sampling, on_text=lambda _, text: _show(text), cancelled=cancelled
        )[0]
    _show("\n")
    if found.finish == "length":
        typer.echo(f"castor chat: cut after {len(found.token_ids):,} tokens", err=True)
    return found.text


def _show(text: str) -> None:
    sys.stdout.write(text.translate(_CONTROLS))
    sys.stdout.flush()


@contextmanager
def _ended_by_interrupt() -> Iterator[threading.Event]:
    """Gives an event that Ctrl-C sets, where it would raise otherwise."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before: Any = signal.signal(signal.SIGINT, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _asked_at(prompt: str) -> Callable[[], str | None]:
    """Returns a function that reads a line from the terminal, or from what is piped in."""
    if prompt:
        import readline  # noqa: F401  # editing and history of lines

    def ask() -> str | None:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            return "" if prompt else None

    return ask
