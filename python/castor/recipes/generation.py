"""Generates answers: prompts from conversations, sampling, stop strings, text as it comes."""

from __future__ import annotations

import copy
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import StoppingCriteria

from castor.errors import UsageError
from castor.recipes.models import InferenceModel

Finish = Literal["stop", "length", "cancelled", "timeout"]
OnText = Callable[[int, str], None]
"""Receives the number of an answer, from 0, and the text that it goes on with."""

MAX_STOPS = 4
"""Most stop strings of one request, as in OpenAI's API."""
_REPLACEMENT = "\ufffd"
"""The character that decoders give for bytes that are no whole character."""
_CONTEXT_TOKENS = 6
"""Tokens of the prompt that the first new token is decoded behind: leading spaces depend on it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Choice of the tokens of an answer, and of its end."""

    max_new_tokens: int
    """Most tokens of an answer, its end token included; at least 1."""
    temperature: float | None = None
    """0: greedy. None: the model's generation_config.json says it, or else 1."""
    top_p: float | None = None
    """Share of probability that is sampled from, in (0, 1]. None: as temperature's."""
    top_k: int | None = None
    """Number of likeliest tokens that are sampled from; 0: all. None: the model's, or else all."""
    beams: int = 1
    """Number of beams of a beam search, which needs temperature 0; 1: none."""
    seed: int | None = None
    """Seed of the sampling; None: a new one each time."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer ends; at most MAX_STOPS."""
    answers: int = 1
    """Number of answers to the prompt, computed as one batch."""
    max_seconds: float | None = None
    """Seconds after which generation stops; None: no limit."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "beams", "answers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.temperature is not None and not 0.0 <= self.temperature <= 2.0:
            raise ValueError(f"temperature is {self.temperature}; it must lie in [0, 2]")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0, which takes all")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must fit 64 bits")
        if len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stop)} texts; give at most {MAX_STOPS}")
        if "" in self.stop:
            raise ValueError("stop has an empty text, which would end every answer; leave it out")
        if self.beams > 1 and self.temperature != 0.0:
            raise ValueError(
                f"a search with {self.beams} beams samples nothing: give temperature 0"
            )
        if self.beams > 1 and self.answers > 1:
            raise ValueError(f"a search with {self.beams} beams gives 1 answer, not {self.answers}")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished answer."""

    text: str
    """Text before the stop string, without special tokens and without half a character at its end.
    """
    token_ids: tuple[int, ...]
    """All ids that were generated, with the end token and those of the stop string."""
    finish: Finish
    """Reason of the end: an end token or stop string, the limit of tokens, the caller, or time."""


class TextDecoder:
    """Turns tokens into text, one at a time; a character appears when its last token is there.

    Args:
        tokenizer: The tokenizer, which leaves special tokens out of the text.
        before: Token ids in front of the first one. Their text is not repeated.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(before)[-_CONTEXT_TOKENS:]
        self._begin = len(self._window)
        self._shown = len(self._decode().rstrip(_REPLACEMENT))

    def push(self, token: int) -> str:
        """Returns the text that a token completes; empty while a character is not whole."""
        self._window.append(token)
        text = self._decode()
        whole = text.rstrip(_REPLACEMENT)
        new = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if new and len(whole) == len(text):
            self._window = self._window[self._begin :]
            self._begin = len(self._window)
            self._shown = len(self._decode())
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(
            self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopCutter:
    """Lets text pass up to the first stop string, whichever pieces the text comes in.

    Text that may begin a stop string is held back until what follows decides it.

    Args:
        stops: The stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string has come; text after it is dropped."""

    def push(self, text: str) -> str:
        """Returns the text that is certain to lie before any stop string."""
        if self.stopped:
            return ""
        self._held += text
        # The string that is complete first ends the text; of two that end together the longer one.
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            passed, self._held = self._held[: min(ends)[1]], ""
            return passed
        kept = max((self._begun(stop) for stop in self._stops), default=0)
        cut = len(self._held) - kept
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def finish(self) -> str:
        """Returns the text that was held back, when no more follows."""
        passed, self._held = self._held, ""
        return passed

    def _begun(self, stop: str) -> int:
        """Returns how many characters at the end of the held text begin a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((k for k in range(longest, 0, -1) if self._held.endswith(stop[:k])), 0)


class _Row:
    """One answer while it is generated."""

    def __init__(self, tokenizer: Any, before: Sequence[int], stops: Sequence[str]) -> None:
        self._decoder = TextDecoder(tokenizer, before)
        self._cutter = StopCutter(stops)
        self.ids: list[int] = []
        self.text = ""
        self.finish: Finish | None = None

    def push(self, token: int, ends: frozenset[int], most: int) -> str:
        """Takes a token, and returns the text that may be shown now."""
        self.ids.append(token)
        if token in ends:
            return self.end("stop")
        new = self._cutter.push(self._decoder.push(token))
        self.text += new
        if self._cutter.stopped:
            self.finish = "stop"
        elif len(self.ids) >= most:
            return new + self.end("length")
        return new

    def end(self, why: Finish) -> str:
        """Ends the answer, and returns the text that was held back."""
        self.finish = why
        rest = self._cutter.finish()
        self.text += rest
        return rest


class _Progress(StoppingCriteria):  # type: ignore[misc, unused-ignore]
    """Follows `generate` token by token: shows text, and stops the answers that are done."""

    def __init__(
        self,
        rows: list[_Row],
        sampling: Sampling,
        ends: frozenset[int],
        on_text: OnText,
        cancelled: threading.Event,
    ) -> None:
        self._rows, self._ends, self._on_text = rows, ends, on_text
        self._sampling, self._cancelled = sampling, cancelled
        self._begin = time.monotonic()

    def interruption(self) -> Finish | None:
        """Returns why all answers have to end now, if they have to."""
        if self._cancelled.is_set():
            return "cancelled"
        limit = self._sampling.max_seconds
        return "timeout" if limit is not None and time.monotonic() - self._begin > limit else None

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Says of each row whether it is done; `generate` calls it after each token."""
        why = self.interruption()
        if self._sampling.beams > 1:  # rows are beams, whose tokens may still be given up
            return torch.full((input_ids.shape[0],), why is not None, device=input_ids.device)
        for i, token in enumerate(input_ids[:, -1].tolist()):
            self.take(i, token)
            if why is not None and self._rows[i].finish is None:
                self._show(i, self._rows[i].end(why))
        done = [row.finish is not None for row in self._rows]
        return torch.tensor(done, device=input_ids.device)

    def take(self, i: int, token: int) -> None:
        """Adds a token to an answer that is not done."""
        if self._rows[i].finish is None:
            self._show(i, self._rows[i].push(token, self._ends, self._sampling.max_new_tokens))

    def _show(self, i: int, text: str) -> None:
        if text:
            self._on_text(i, text)


def encode_chat(model: InferenceModel, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the token ids of a conversation, up to where the assistant's next turn begins.

    Special tokens that are written out in a message are encoded as ordinary text: nobody ends a
    turn or begins another one from within a message.

    Args:
        model: The model, with its tokenizer and chat template.
        messages: The turns, each with "role" and "content".

    Raises:
        UsageError: The tokenizer has no chat template, or the template refuses the conversation.
    """
    if not model.tokenizer.chat_template:
        raise UsageError(
            f"the tokenizer of {model.name} has no chat template: add one to its folder "
            "(chat_template.jinja), or complete plain text with /v1/completions"
        )
    try:
        with model.encoding:
            ids = model.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                sanitize_control_tokens=True,
                return_dict=False,
            )
    except Exception as error:  # a template raises what it wants, jinja's errors among it
        text = str(error).strip().split("\n")[0]
        raise UsageError(
            f"the chat template of {model.name} refuses the conversation: {text}"
        ) from error
    return list(ids)


def encode_text(model: InferenceModel, text: str) -> list[int]:
    """Returns the token ids of plain text, with the special tokens that the tokenizer adds.

    Raises:
        UsageError: It has no tokens.
    """
    with model.encoding:
        ids = list(model.tokenizer(text)["input_ids"])
    if not ids:
        raise UsageError("the prompt has no tokens; give some text")
    return ids


def check_length(model: InferenceModel, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Checks that prompt and answer fit the positions of the model.

    Raises:
        UsageError: They do not; the message has the numbers.
    """
    most = model.max_positions
    if most is not None and num_prompt_tokens + max_new_tokens > most:
        raise UsageError(
            f"the prompt has {num_prompt_tokens:,} tokens and {max_new_tokens:,} more are asked "
            f"for, together {num_prompt_tokens + max_new_tokens:,}; {model.name} takes {most:,}: "
            "shorten the prompt, or ask for fewer tokens"
        )


def generate(
    model: InferenceModel,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    on_text: OnText = lambda *_: None,
    cancelled: threading.Event | None = None,
) -> list[Answer]:
    """Generates the answers to a prompt.

    A beam search gives its text to `on_text` at the end; otherwise text comes token by token.

    Args:
        model: The model. One call at a time: sampling uses torch's global random generators, whose
            states are put back afterwards.
        prompt: Token ids, at least one.
        sampling: How to choose tokens.
        on_text: Receives text in the thread that calls.
        cancelled: Ends generation at the next token once it is set.

    Returns:
        `sampling.answers` answers.

    Raises:
        UsageError: Prompt and answer do not fit the model's positions.
        OutOfMemoryError: They do not fit the budget; the model can be used on.
    """
    check_length(model, len(prompt), sampling.max_new_tokens)
    special = model.tokenizer.added_tokens_encoder
    hidden = set(model.tokenizer.all_special_ids)
    named = {special[stop] for stop in sampling.stop if special.get(stop) in hidden}
    ends = model.end_ids | named
    rows = [_Row(model.tokenizer, prompt, sampling.stop) for _ in range(sampling.answers)]
    progress = _Progress(rows, sampling, ends, on_text, cancelled or threading.Event())
    ids = torch.tensor([list(prompt)] * sampling.answers, device=model.device)
    on_gpu = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), torch.no_grad():
        torch.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed)
        given: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        found = model.model.generate(
            input_ids=ids,
            generation_config=_configured(model, sampling, ends),
            stopping_criteria=[progress],
            **given,
        )
    if sampling.beams > 1:
        for token in found[0, len(prompt) :].tolist():
            progress.take(0, token)
    for i, row in enumerate(rows):
        if row.finish is None:
            text = row.end(progress.interruption() or "length")
            if text:
                on_text(i, text)
    return [
        Answer(text=row.text, token_ids=tuple(row.ids), finish=row.finish or "length")
        for row in rows
    ]


def _configured(model: InferenceModel, sampling: Sampling, ends: frozenset[int]) -> Any:
    """Returns the model's generation config with what the request says."""
    config = copy.deepcopy(model.model.generation_config)
    greedy = sampling.temperature == 0.0

    def chosen(name: str, neutral: float) -> float:
        asked = getattr(sampling, name)
        own = getattr(config, name, None)
        return neutral if greedy else own if asked is None and own is not None else asked or neutral

    pad = model.tokenizer.pad_token_id
    values = {
        "max_new_tokens": sampling.max_new_tokens,
        "max_length": None,
        "min_length": None,
        "num_beams": sampling.beams,
        "num_return_sequences": 1,
        "do_sample": not greedy,
        "temperature": chosen("temperature", 1.0),
        "top_p": chosen("top_p", 1.0),
        "top_k": 50 if greedy else int(chosen("top_k", 0)),
        "use_cache": True,
        "eos_token_id": sorted(ends) or None,
        "pad_token_id": pad if pad is not None else min(ends, default=0),
    }
    for name, value in values.items():
        setattr(config, name, value)
    return config
