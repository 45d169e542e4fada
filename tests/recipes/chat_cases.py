"""Tokenizers, chat templates and conversations, and a loss mask by hand to compare with."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from byte_tokens import byte_level_bpe

Message = dict[str, Any]
Piece = tuple[str, bool]
"""A text, and whether the loss counts it."""

SPECIAL = [
    "<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>",
    "<|eot|>",
]  # fmt: skip
WORDS = (
    "the memory of a device", " chunk\n", "naïve café", "数据 和 模型", "  two  spaces", "\n\nline",
    "x = [1, 2];",
    "🙂🙃", "tabs\tand\n", "1234567", "Assistant:", "a", "ﬁ ligature", "é", "end. ",
)  # fmt: skip

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set ns = '<<SYS>>\n' + messages[0]['content'] + "
    "'\n<</SYS>>\n\n' %}{% set turns = messages[1:] %}{% else %}{% set ns = '' %}"
    "{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (ns if loop.first else '') + "
    "m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
TRIMMED = (  # no special tokens: borders lie inside of what a tokenizer merges
    "{% for m in messages %}{{ m['role'] | capitalize + ':\n' + m['content'].strip() + '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def by_chatml(messages: list[Message]) -> list[Piece]:
    pieces = list[Piece]()
    for turn in messages:
        pieces.append((f"<|im_start|>{turn['role']}\n", False))
        pieces.append((f"{turn['content']}<|im_end|>\n", turn["role"] == "assistant"))
    return pieces


def by_llama2(messages: list[Message]) -> list[Piece]:
    system = ""
    if messages[0]["role"] == "system":
        system = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n"
        messages = messages[1:]
    pieces = list[Piece]()
    for turn in messages:
        content = turn["content"].strip()
        if turn["role"] == "user":
            pieces.append((f"<s>[INST] {system}{content} [/INST]", False))
            system = ""
        else:
            pieces.append((f" {content} </s>", True))
    return pieces


def by_llama3(messages: list[Message]) -> list[Piece]:
    pieces: list[Piece] = [("<s>", False)]
    for turn in messages:
        pieces.append((f"<|head|>{turn['role']}<|/head|>\n\n", False))
        pieces.append((f"{turn['content'].strip()}<|eot|>", turn["role"] == "assistant"))
    return pieces


def by_trimmed(messages: list[Message]) -> list[Piece]:
    pieces = list[Piece]()
    for turn in messages:
        pieces.append((f"{turn['role'].capitalize()}:\n", False))
        pieces.append((f"{turn['content'].strip()}\n\n", turn["role"] == "assistant"))
    return pieces


def by_reasoning(messages: list[Message]) -> list[Piece]:
    last = max(i for i, turn in enumerate(messages) if turn["role"] == "user")
    pieces = list[Piece]()
    for i, turn in enumerate(messages):
        content, header = turn["content"], f"<|im_start|>{turn['role']}\n"
        answers = turn["role"] == "assistant"
        if answers and i < last and "</think>" in content:
            content = content.split("</think>")[-1].lstrip("\n")
        if answers and content.startswith("<think>\n"):  # the generation prompt has written it
            header, content = header + "<think>\n", content.removeprefix("<think>\n")
        pieces += [(header, False), (f"{content}<|im_end|>\n", answers)]
    return pieces


TEMPLATES: dict[str, tuple[str, Callable[[list[Message]], list[Piece]]]] = {
    "chatml": (CHATML, by_chatml),
    "llama2": (LLAMA2, by_llama2),
    "llama3": (LLAMA3, by_llama3),
    "trimmed": (TRIMMED, by_trimmed),
    "reasoning": (REASONING, by_reasoning),
}


@functools.cache
def tokenizer(template: str | None = None, vocab_size: int = 600) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on this file and the words above."""
    texts = [Path(__file__).read_text(encoding="utf-8"), *WORDS, *WORDS]
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, vocab_size, SPECIAL, every_byte=True),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=template,
    )


def text(choice: random.Random, most: int = 6) -> str:
    """A few words with whitespace, accents, emoji and Chinese, never blank."""
    found = "".join(choice.choices(WORDS, k=choice.randint(1, most)))
    return found if found.strip() else "word"


def conversation(choice: random.Random, *, reasons: bool = False) -> list[Message]:
    """Turns of a user and an assistant, with a system's at the beginning or without."""
    messages = list[Message]()
    if choice.random() < 0.4:
        messages.append({"role": "system", "content": text(choice)})
    for _ in range(choice.randint(1, 4)):
        messages.append({"role": "user", "content": text(choice)})
        answer = text(choice)
        if reasons and choice.random() < 0.6:
            answer = f"<think>\n{text(choice)}\n</think>\n\n{answer}"
        messages.append({"role": "assistant", "content": answer})
    return messages


def mask_by_hand(words: Any, pieces: list[Piece]) -> tuple[list[int], list[int]]:
    """Token ids and labels: a token counts where it holds a byte of a counted piece.

    Bytes are counted by what each token decodes to, without the tokenizer's offsets.
    """
    full = "".join(piece for piece, _ in pieces)
    flags = [counts for piece, counts in pieces for _ in piece.encode()]
    ids = words(full, add_special_tokens=False)["input_ids"]
    alphabet = {char: byte for byte, char in _bytes_to_characters().items()}
    labels, at = list[int](), 0
    for token in ids:
        name = words.convert_ids_to_tokens(token)
        raw = name.encode() if name in SPECIAL else bytes(alphabet[char] for char in name)
        labels.append(token if any(flags[at : at + len(raw)]) else -100)
        at += len(raw)
    assert at == len(flags)
    return ids, labels


def _bytes_to_characters() -> dict[int, str]:
    """The characters that byte-level BPE writes bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
