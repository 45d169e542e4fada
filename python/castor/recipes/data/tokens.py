"""Conversations and texts become token ids, and labels that say which tokens the loss counts.

The loss counts all that the assistant has to write itself: a turn from the end of the template's
generation prompt to the end of the turn, with the template's end-of-turn token. Templates that mark
those places themselves, by {% generation %}, are followed. Otherwise the places are characters of
the rendered text: the history of a turn with the generation prompt, and the history with the turn,
are rendered, and both must be prefixes of the rendered conversation. A template that writes earlier
turns otherwise than the last, and for example drops their reasoning, breaks that; then the content
of a turn is found by rendering the conversation with other contents in its place.

A token counts where it holds at least one such character, so that tokens that merge across a border
count. Tokenizers without character offsets must give the ids of the text before a border as a
prefix of all ids.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jinja2
from transformers import PreTrainedTokenizerFast

from castor.recipes.data.formats import (
    BrokenRowError,
    Conversation,
    Message,
    Text,
    num_shared,
)

Spans: TypeAlias = list[tuple[int, int]]
"""Ranges of characters, each without its end."""

_PROBES = ("Kx7 one", "Qz4 two")
"""Contents that differ in their first and last characters, to see where a template writes one."""


class NoTemplateError(ValueError):
    """There is no chat template, and the rows are conversations."""


@dataclass(frozen=True)
class Tokens:
    """The token ids of one row.

    Attributes:
        ids: Token ids, before any truncation.
        counted: Ranges of tokens that the loss counts.
    """

    ids: list[int]
    counted: Spans


class ChatTemplate:
    """Renders conversations, and finds the characters that the assistant has to write.

    Args:
        tokenizer: A tokenizer of transformers.
        template: Text of a chat template; None: the tokenizer's own.

    Raises:
        NoTemplateError: The tokenizer has none, and none was given.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        try:
            self.text: str = tokenizer.get_chat_template(template)
        except ValueError as error:
            raise NoTemplateError(
                "the rows are conversations, and the tokenizer has no chat template; name a file "
                "with one in data.chat_template"
            ) from error
        self._marked = bool(re.search(r"\{%-?\s*generation\s*-?%\}", self.text))
        self._pieces: dict[tuple[str, bool], tuple[str, str] | None] = {}

    def render(
        self, messages: list[Message], tools: Any = None, *, generation_prompt: bool = False
    ) -> str:
        """Renders messages as text.

        Raises:
            BrokenRowError: The template refuses the messages.
        """
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise BrokenRowError(f"the chat template refuses the conversation: {error}") from error
        return text

    def spans(self, conversation: Conversation) -> tuple[str, Spans]:
        """Renders a conversation and finds its turns of the assistant.

        Returns:
            The text, and the ranges of characters that the assistant has to write.

        Raises:
            BrokenRowError: The template refuses the conversation, or the place of a turn cannot be
                told.
        """
        if self._marked:
            return self._marked_spans(conversation)
        messages, tools = conversation.messages, conversation.tools
        full = self.render(messages, tools)
        found = self._by_pieces(messages, full) if tools is None else None
        if found is None:
            within = _Turns(self, messages, tools, full)
            found = {turn: within.span(turn) for turn in conversation.counted}
        return full, [found[turn] for turn in conversation.counted]

    def _marked_spans(self, conversation: Conversation) -> tuple[str, Spans]:
        """Takes the ranges that the template marks by {% generation %}."""
        from transformers.utils import chat_template_utils

        # transformers declares lists of texts as what it returns.
        render: Any = chat_template_utils.render_jinja_template
        try:
            (full,), (found,) = render(
                [conversation.messages],
                tools=conversation.tools,
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise BrokenRowError(f"the chat template refuses the conversation: {error}") from error
        roles = [message["role"] for message in conversation.messages]
        turns = [number for number, role in enumerate(roles) if role == "assistant"]
        counted = conversation.counted
        if counted == turns:
            return full, list(found)
        if len(found) != len(turns):
            raise BrokenRowError(
                f"the chat template marks {len(found)} places by generation, and the conversation "
                f"has {len(turns)} turns of the assistant: those that count cannot be told"
            )
        pairs = zip(turns, found, strict=True)
        return full, [place for turn, place in pairs if turn in counted]

    def taken(self, conversation: Conversation) -> Conversation:
        """Returns a conversation whose tool calls have their arguments as the template takes them.

        OpenAI's format has JSON in a text. Most templates take an object, and some write a text
        that they are given as a text, in quotes.

        Raises:
            BrokenRowError: The arguments are no JSON.
        """
        messages = list[Message]()
        for message in conversation.messages:
            calls = list[Any]()
            for call in message.get("tool_calls") or []:
                function = call.get("function", call) if isinstance(call, dict) else None
                if not isinstance(function, dict) or "name" not in function:
                    raise BrokenRowError(f"{call!r} is no call of a function with a name")
                function = {**function, "arguments": self._arguments(function.get("arguments"))}
                calls.append({**call, "function": function} if "function" in call else function)
            messages.append({**message, "tool_calls": calls} if calls else message)
        return replace(conversation, messages=messages)

    def _arguments(self, given: Any) -> Any:
        if isinstance(given, str) and not self._takes_text:
            try:
                return json.loads(given or "{}")
            except ValueError as error:
                raise BrokenRowError(f"arguments of a tool call are no JSON: {error}") from None
        if isinstance(given, dict) and self._takes_text:
            return json.dumps(given, ensure_ascii=False)
        return given

    @functools.cached_property
    def _takes_text(self) -> bool:
        """Whether the template refuses arguments of a tool call that are an object."""
        function = {"name": "f", "arguments": {"a": "b"}}
        call = {"id": "call00001", "type": "function", "function": function}
        asked: list[Message] = [
            {"role": "user", "content": _PROBES[0]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        for arguments, takes_text in (({"a": "b"}, False), ('{"a": "b"}', True)):
            function["arguments"] = arguments
            with contextlib.suppress(BrokenRowError):
                self.render(asked)
                return takes_text
        return False

    def _by_pieces(self, messages: list[Message], full: str) -> dict[int, tuple[int, int]] | None:
        """Finds the turns in a text that is nothing but fixed pieces around contents.

        Most templates write each turn as a fixed beginning, the content and a fixed end, which are
        learned once for each role. A text that consists of them exactly has its turns where they
        say, and needs no second rendering.

        Returns:
            The range of each turn of the assistant, or None: the text is otherwise.
        """
        at, found = 0, dict[int, tuple[int, int]]()
        if self.prompt is None:
            return None
        for number, message in enumerate(messages):
            if len(message) != 2:
                return None
            role = message["role"]
            pieces = self._piece(role, number == 0)
            if pieces is None:
                return None
            content, (before, after) = message["content"], pieces
            begin = at + len(before)
            at = begin + len(content) + len(after)
            if not content or full[begin - len(before) : at] != f"{before}{content}{after}":
                return None
            if role == "assistant":
                if not before.startswith(self.prompt):
                    return None
                found[number] = begin - len(before) + len(self.prompt), at
        return found if at == len(full) else None

    @functools.cached_property
    def prompt(self) -> str | None:
        """The text that add_generation_prompt adds after a turn of the user; None: it is no text.

        It is empty where a template does not know add_generation_prompt: the assistant then has to
        write the whole turn.
        """
        user: list[Message] = [{"role": "user", "content": _PROBES[0]}]
        try:
            history, asked = (self.render(user, generation_prompt=asks) for asks in (False, True))
        except BrokenRowError:
            return None
        return asked[len(history) :] if asked.startswith(history) else None

    @functools.cached_property
    def ending(self) -> str | None:
        """The text that ends a turn of the assistant before another turn; None: it is not known."""
        user, answer = (
            {"role": role, "content": probe}
            for role, probe in zip(("user", "assistant"), _PROBES, strict=True)
        )
        try:
            alone, followed = (
                self.render(turns).partition(_PROBES[1])[2]
                for turns in ([user, answer], [user, answer, user])
            )
        except BrokenRowError:
            return None
        if followed.startswith(alone):
            return alone or None
        ends = self.specials_in(followed)
        return followed[: min(ends)] if ends else None

    def specials_in(self, text: str) -> list[int]:
        """Returns the ends of the special tokens in a text, of each the first one."""
        return [
            text.index(token) + len(token)
            for token in self._tokenizer.all_special_tokens
            if token in text
        ]

    def _piece(self, role: str, first: bool) -> tuple[str, str] | None:
        """Returns what the template writes before and after a content; None: it cannot be told."""
        key = (role, first)
        if key not in self._pieces:
            self._pieces[key] = self._learn(role, first)
        return self._pieces[key]

    def _learn(self, role: str, first: bool) -> tuple[str, str] | None:
        user, answer = ({"role": name, "content": _PROBES[0]} for name in ("user", "assistant"))
        if role not in ("system", "user", "assistant") or (first and role == "assistant"):
            return None
        history: list[Message] = [] if first else [user] if role == "assistant" else [user, answer]
        if role == "system" and not first:
            return None
        try:
            before = self.render(history) if history else ""
            texts = [self.render([*history, {"role": role, "content": probe}]) for probe in _PROBES]
        except BrokenRowError:
            return None
        parts = [
            text.removeprefix(before).split(probe)
            for text, probe in zip(texts, _PROBES, strict=True)
        ]
        if not all(text.startswith(before) for text in texts) or parts[0] != parts[1]:
            return None
        return (parts[0][0], parts[0][1]) if len(parts[0]) == 2 else None


class _Turns:
    """Finds turns of one conversation in its rendered text."""

    def __init__(
        self, template: ChatTemplate, messages: list[Message], tools: Any, full: str
    ) -> None:
        self._template, self._messages, self._tools, self._full = template, messages, tools, full

    def span(self, turn: int) -> tuple[int, int]:
        """Returns the range of characters that the assistant has to write for a turn.

        Raises:
            BrokenRowError: It cannot be told.
        """
        begin = self._begin(turn)
        end = self._end(turn)
        if not begin < end:
            raise self._refused(turn)
        return begin, end

    def _begin(self, turn: int) -> int:
        head = self._render(turn, generation_prompt=True)
        if head is not None and self._full.startswith(head):
            return len(head)
        # The history alone is refused or written otherwise, or the prompt opens a reasoning that
        # this turn lacks. The prompt, or most of it, stands between the last content and this one.
        start, _ = self._content(self._messages, turn, self._full)
        history = self._render(turn)
        if history is not None and self._full.startswith(history):
            lowest = len(history)
        else:
            lowest = self._content(self._messages, turn - 1, self._full)[1] if turn else 0
        between, prompt = self._full[lowest:start], self._template.prompt or ""
        for length in range(len(prompt), len(prompt) // 2, -1):
            if (at := between.rfind(prompt[:length])) >= 0:
                return lowest + at + length
        raise self._refused(turn)

    def _end(self, turn: int) -> int:
        if turn == len(self._messages) - 1:
            return len(self._full)
        tail = self._render(turn + 1)
        if tail is not None and self._full.startswith(tail):
            return len(tail)
        # The template writes a turn otherwise while it is the last one.
        ending, message = self._template.ending, self._messages[turn]
        if ending is None or (message.get("tool_calls") and not self._template.specials_in(ending)):
            raise self._refused(turn)
        begin = self._begin(turn)
        if message["content"]:
            begin = self._content(self._messages, turn, self._full)[1]
        following, _ = self._content(self._messages, turn + 1, self._full)
        at = self._full.find(ending, begin, following)
        if at < 0:
            raise self._refused(turn)
        return at + len(ending)

    def _render(self, count: int, *, generation_prompt: bool = False) -> str | None:
        """Renders the first messages; None where the template refuses those."""
        if count == 0:
            return None
        try:
            return self._template.render(
                self._messages[:count], self._tools, generation_prompt=generation_prompt
            )
        except BrokenRowError:
            return None

    def _content(self, messages: list[Message], turn: int, text: str) -> tuple[int, int]:
        """Returns the range of a turn's content, by rendering others in its place."""
        try:
            one, other = (
                self._template.render(
                    [*messages[:turn], {**messages[turn], "content": probe}, *messages[turn + 1 :]],
                    self._tools,
                )
                for probe in _PROBES
            )
        except BrokenRowError:
            raise self._refused(turn) from None
        begin = num_shared(one, other)
        after = num_shared(one[::-1], other[::-1])
        kept = text[:begin] == one[:begin] and text[len(text) - after :] == one[len(one) - after :]
        if not kept or begin + after > len(text):
            raise self._refused(turn)
        return begin, len(text) - after

    def _refused(self, turn: int) -> BrokenRowError:
        return BrokenRowError(
            f"the chat template does not show where turn {turn + 1}, the assistant's, begins and "
            "ends; mark that place in the template by {% generation %} and {% endgeneration %}, or "
            "take loss_on: all"
        )


class Tokenizing:
    """Tokenises rows in batches.

    Args:
        tokenizer: A tokenizer of transformers.
        template: Text of a chat template; None: the tokenizer's own.
        loss_on: "assistant", or "all" for every token.

    Raises:
        ValueError: The tokenizer has no end-of-sequence token, which a text needs. The error comes
            with the first such text.
    """

    def __init__(self, tokenizer: Any, template: str | None, *, loss_on: str) -> None:
        self._tokenizer, self._given, self._loss_on = tokenizer, template, loss_on

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """The chat template; looked for with the first conversation."""
        return ChatTemplate(self._tokenizer, self._given)

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Token ids that a text gets before and after it: the tokenizer's own, and the end."""
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                "the tokenizer has no eos_token, which ends each text; set one in its "
                "tokenizer_config.json"
            )
        alone, whole = (
            self._tokenizer("x", add_special_tokens=special)["input_ids"]
            for special in (False, True)
        )
        at = next(i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
        after = whole[at + len(alone) :]
        return whole[:at], after if end in after else [*after, end]

    def characters(self, row: Conversation | Text) -> tuple[str, Spans]:
        """Returns the text of a row, and the ranges of its characters that the loss counts.

        Raises:
            BrokenRowError: The chat template refuses the row.
        """
        if isinstance(row, Text):
            first = row.prompt_characters if self._loss_on == "assistant" else 0
            return row.text, [(first, len(row.text))]
        row = self.template.taken(row)
        written = self.template.render(row.messages, row.tools) if row.functions else ""
        for function in row.functions:
            if function not in written:
                raise BrokenRowError(
                    f"the chat template does not write the function {function!r} of 'tools' or "
                    "'tool_calls'; name a template that does in data.chat_template"
                )
        if self._loss_on == "all":
            text = self.template.render(row.messages, row.tools)
            return text, [(0, len(text))]
        return self.template.spans(row)

    def __call__(self, rows: Sequence[tuple[str, Spans, bool]]) -> list[Tokens | BrokenRowError]:
        """Tokenises texts in one call of the tokenizer.

        Args:
            rows: The text of each row, its counted characters, and whether it is a text without a
                template, which gets the tokenizer's special tokens.

        Returns:
            Token ids and counted ranges of each row, or why the ranges cannot be told.
        """
        if not rows:
            return []
        offsets = any(spans != [(0, len(text))] for text, spans, _ in rows)
        encoded = self._encoded([text for text, _, _ in rows], offsets=offsets)
        found = list[Tokens | BrokenRowError]()
        for (text, spans, plain), (ids, encoding) in zip(rows, encoded, strict=True):
            try:
                ranges = self._ranges(text, spans, ids, encoding)
            except BrokenRowError as error:
                found.append(error)
                continue
            if plain:
                before, after = self._around
                first = 0 if spans[0][0] == 0 else ranges[0][0] + len(before)
                ids = [*before, *ids, *after]
                ranges = [(first, len(ids))]
            found.append(Tokens(ids, ranges))
        return found

    @functools.cached_property
    def _core(self) -> Any:
        """The tokenizer in Rust whose ids a call of this one returns; None: it does more than that.

        The core is asked itself because it can leave offsets out, and transformers copies all that
        it returns.
        """
        for name in ("__call__", "_encode_plus"):
            own = getattr(type(self._tokenizer), name, None)
            if own is not getattr(PreTrainedTokenizerFast, name):
                return None
        self._tokenizer("x", add_special_tokens=False)  # sets the core to neither cut nor pad
        return self._tokenizer.backend_tokenizer

    def _encoded(self, texts: list[str], *, offsets: bool) -> list[tuple[list[int], Any]]:
        """Returns the token ids of texts without special tokens.

        Args:
            texts: The texts.
            offsets: Whether an encoding that knows the characters of its tokens comes with each;
                None where the tokenizer has none.
        """
        if self._core is None:
            done = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            encodings = done.encodings or [None] * len(texts)
            return list(zip(done["input_ids"], encodings, strict=True))
        encode = self._core.encode_batch if offsets else self._core.encode_batch_fast
        return [(one.ids, one) for one in encode(texts, add_special_tokens=False)]

    def _ranges(self, text: str, spans: Spans, ids: list[int], encoding: Any) -> Spans:
        """Turns ranges of characters into ranges of tokens."""
        if spans == [(0, len(text))]:
            return [(0, len(ids))]
        if encoding is None:
            borders = [self._border(text, at, ids) for span in spans for at in span]
            return list(zip(borders[::2], borders[1::2], strict=True))
        places, count = encoding.token_to_chars, len(ids)

        def ends_after(token: int, at: int) -> bool:
            end: int = places(token)[1]
            return end > at

        def begins_from(token: int, at: int) -> bool:
            return places(token)[0] >= at and ends_after(token, at)

        found: Spans = []
        for span in spans:
            first, last = (
                bisect_left(range(count), True, key=functools.partial(reaches, at=at))
                for reaches, at in zip((ends_after, begins_from), span, strict=True)
            )
            found.append((first, last))
        return found

    def _border(self, text: str, at: int, ids: list[int]) -> int:
        """Returns the number of tokens before a character, of a tokenizer without offsets."""
        if at == len(text):
            return len(ids)
        before: list[int] = self._tokenizer(text[:at], add_special_tokens=False)["input_ids"]
        if ids[: len(before)] != before:
            raise BrokenRowError(
                f"the tokenizer ({type(self._tokenizer).__name__}) has no character offsets and "
                f"merges tokens across character {at}, where the loss begins or ends; take a fast "
                "tokenizer, or loss_on: all"
            )
        return len(before)
