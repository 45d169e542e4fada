"""Rows of every accepted format become conversations, texts or preferences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from castor.config.names import did_you_mean

Message: TypeAlias = dict[str, Any]
"""One turn: "role", "content", and where they are there "tool_calls" and the reasoning's fields."""

_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
"""Names of roles, ShareGPT's among them, and the role that each stands for."""


class BrokenRowError(ValueError):
    """A row cannot be used. The message says why, and names the file and line once it is placed."""


@dataclass(frozen=True)
class Conversation:
    """Turns between a user and an assistant.

    Attributes:
        messages: The turns in order; at least one of the assistant's counts for the loss.
        loss_from: Index of the first message that may count: 0 but for prompts with a completion.
        tools: Descriptions of functions for the chat template, or None.
    """

    messages: list[Message]
    loss_from: int = 0
    tools: list[dict[str, Any]] | None = None

    @property
    def counted(self) -> list[int]:
        """Indices of the messages that the loss counts: OpenAI's weight 0 leaves a turn out."""
        return [
            number
            for number, turn in enumerate(self.messages)
            if turn["role"] == "assistant" and number >= self.loss_from and turn.get("weight") != 0
        ]

    @property
    def functions(self) -> list[str]:
        """Names of the functions that are described or called."""
        calls = [call for turn in self.messages for call in turn.get("tool_calls") or []]
        functions = [one.get("function", one) for one in (*(self.tools or []), *calls)]
        return [str(one.get("name", "")) for one in functions if isinstance(one, dict)]


@dataclass(frozen=True)
class Text:
    """A text without turns.

    Attributes:
        text: The characters.
        prompt_characters: Number of characters at the beginning that are a prompt.
    """

    text: str
    prompt_characters: int = 0


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt. Each part is a text, or all three are lists of messages."""

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]


Row: TypeAlias = Conversation | Text | Preference


def _text_of(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        found = "is lacking" if value is None else f"is {type(value).__name__}, not text"
        raise BrokenRowError(f"{key!r} {found}{_keys_of(row) if value is None else ''}")
    return _encodable(value, repr(key))


def _encodable(text: str, where: str) -> str:
    """Checks that a text is Unicode: JSON can escape halves of a surrogate pair alone."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BrokenRowError(
            f"{where} has the half of a character, {text[error.start]!r}, at character "
            f"{error.start + 1}"
        ) from None
    return text


def _keys_of(row: Mapping[str, Any]) -> str:
    return f"; the row has {', '.join(sorted(map(str, row))) or 'no keys'}"


def _content(value: Any, where: str) -> str:
    """Returns a turn's text; a list of text parts, as OpenAI's format has, is joined."""
    if isinstance(value, str):
        return _encodable(value, where)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        other = next((part.get("type") for part in value if part.get("type") != "text"), None)
        if other is None:
            return "".join(_text_of(part, "text") for part in value)
        raise BrokenRowError(f"{where} holds a part of type {other!r}; only text can be trained on")
    raise BrokenRowError(f"the content of {where} is {type(value).__name__}, not text")


def _messages(value: Any, key: str) -> list[Message]:
    """Checks a list of turns, in OpenAI's or ShareGPT's spelling, and returns it in the former."""
    if not isinstance(value, list) or not value:
        raise BrokenRowError(f"{key!r} is {'empty' if value == [] else 'no list of turns'}")
    found = list[Message]()
    for number, turn in enumerate(value, 1):
        where = f"turn {number} of {key!r}"
        if not isinstance(turn, dict):
            raise BrokenRowError(f"{where} is {type(turn).__name__}, not an object")
        given = turn.get("role", turn.get("from"))
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            meant = did_you_mean(given, _ROLES) if isinstance(given, str) else ""
            raise BrokenRowError(f"{where} has the role {given!r}, which is none{meant}")
        more = {
            name: field
            for name, field in turn.items()
            if name not in ("role", "from", "content", "value") and field is not None
        }
        content = turn.get("content", turn.get("value"))
        if content is None and more.get("tool_calls"):
            content = ""
        message = {"role": role, "content": _content(content, where), **more}
        if role == "assistant" and not message["content"].strip() and not more.get("tool_calls"):
            raise BrokenRowError(f"{where} is an empty turn of the assistant")
        if more.get("weight", 1) not in (0, 1):
            raise BrokenRowError(f"{where} has the weight {more['weight']!r}, which is not 0 or 1")
        found.append(message)
    return found


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the functions of a row, which may be JSON within a text."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BrokenRowError(f"'tools' is a text that is no JSON: {error}") from None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(one, dict) for one in tools)
    ):
        raise BrokenRowError("'tools' is no list of functions")
    return tools


def _conversation(row: Mapping[str, Any], key: str) -> Conversation:
    messages = _messages(row.get(key), key)
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if all(message["role"] != "assistant" for message in messages):
        raise BrokenRowError(f"{key!r} has no turn of the assistant to learn from")
    return Conversation(messages, tools=_tools(row))


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    messages = list[Message]()
    if system := row.get("system"):
        messages.append({"role": "system", "content": _content(system, "'system'")})
    for pair in row.get("history") or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BrokenRowError("'history' is no list of pairs of question and answer")
        turns = zip(("user", "assistant"), pair, strict=True)
        messages += [{"role": role, "content": _content(text, role)} for role, text in turns]
    question = _text_of(row, "instruction")
    if more := row.get("input"):
        question = f"{question}\n\n{_content(more, repr('input'))}"
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _text_of(row, "output")})
    return Conversation(_messages(messages, "output"))


def _prompt_completion(row: Mapping[str, Any]) -> Conversation | Text:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
        if all(message["role"] != "assistant" for message in after):
            raise BrokenRowError("'completion' has no turn of the assistant")
        return Conversation([*before, *after], len(before), _tools(row))
    text, answer = _text_of(row, "prompt"), _text_of(row, "completion")
    if not answer:
        raise BrokenRowError("'completion' is empty")
    return Text(text + answer, len(text))


def _preference(row: Mapping[str, Any]) -> Preference:
    chosen, rejected, prompt = row.get("chosen"), row.get("rejected"), row.get("prompt")
    if chosen == rejected:
        raise BrokenRowError("'chosen' and 'rejected' are lacking or the same")
    if isinstance(chosen, list) and isinstance(rejected, list):
        good, bad = _messages(chosen, "chosen"), _messages(rejected, "rejected")
        if isinstance(prompt, list):
            return Preference(_messages(prompt, "prompt"), good, bad)
        if prompt is not None and good[0]["role"] == "assistant":
            asked: list[Message] = [{"role": "user", "content": _text_of(row, "prompt")}]
            return Preference(asked, good, bad)
        shared = num_shared(good, bad)
        if not shared or shared in (len(good), len(bad)):
            raise BrokenRowError("'chosen' and 'rejected' do not begin with the same prompt")
        return Preference(good[:shared], good[shared:], bad[shared:])
    answers = _text_of(row, "chosen"), _text_of(row, "rejected")
    if prompt is not None:
        return Preference(_text_of(row, "prompt"), *answers)
    shared = num_shared(*answers)
    if not shared or shared == min(map(len, answers)):
        raise BrokenRowError("there is no 'prompt', and 'chosen' and 'rejected' share no beginning")
    return Preference(answers[0][:shared], answers[0][shared:], answers[1][shared:])


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Counts the elements at the beginning that two sequences share."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _text(row: Mapping[str, Any]) -> Text:
    text = _text_of(row, "text")
    if not text.strip():
        raise BrokenRowError("'text' is empty")
    return Text(text)


_READERS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Row]]] = {
    "preference": (("chosen", "rejected"), _preference),
    "messages": (("messages",), lambda row: _conversation(row, "messages")),
    "sharegpt": (("conversations",), lambda row: _conversation(row, "conversations")),
    "alpaca": (("instruction", "output"), _alpaca),
    "prompt_completion": (("prompt", "completion"), _prompt_completion),
    "text": (("text",), _text),
}
"""Name of each format, the keys that show it, and what reads a row; looked for in this order."""

FORMATS = ("auto", *_READERS, "megatron")


def detect(keys: Sequence[str]) -> str:
    """Finds the format of a row by its keys.

    Raises:
        BrokenRowError: The keys are those of no format.
    """
    for name, (needed, _) in _READERS.items():
        if set(needed) <= set(keys):
            return name
    wanted = "; ".join(f"{name} ({', '.join(needed)})" for name, (needed, _) in _READERS.items())
    known = [key for needed, _ in _READERS.values() for key in needed]
    unknown = [key for key in keys if key not in known]
    meant = next(filter(None, (did_you_mean(key, known) for key in unknown)), "")
    found = ", ".join(sorted(keys)) or "none"
    raise BrokenRowError(f"the keys ({found}) are those of no format{meant}; formats are {wanted}")


def parse(row: object, format_name: str) -> Row:
    """Reads one row.

    Args:
        row: An object of JSON, or the columns of a table by name.
        format_name: One of FORMATS but "auto" and "megatron".

    Raises:
        BrokenRowError: The row is none of this format, or has nothing to learn from.
    """
    if not isinstance(row, Mapping):
        raise BrokenRowError(f"the row is {type(row).__name__}, not an object with keys")
    needed, read = _READERS[format_name]
    lacking = [key for key in needed if key not in row]
    if lacking:
        raise BrokenRowError(f"a row of format {format_name} needs {lacking[0]!r}{_keys_of(row)}")
    return read(row)
