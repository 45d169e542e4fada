"""What the tests of chat and serve share: a tiny model, and a server in a thread."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from byte_tokens import byte_level_bpe
from castor.recipes.models import InferenceModel
from castor.recipes.openai_api import Api, Limits
from castor.recipes.serve import listening, server_of_api

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY, POSITIONS = 400, 256


def save_tokenizer(folder: Path) -> Any:
    """A byte-level tokenizer of castor's README and of characters of several bytes."""
    texts = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split("\n")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(texts, VOCABULARY, SPECIAL, every_byte=True),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[4:],
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(folder)
    return fast


def tiny_model(**changes: Any) -> LlamaForCausalLM:
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 3, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**values | changes))


def save_model(folder: Path) -> Path:
    save_tokenizer(folder)
    tiny_model().save_pretrained(folder)
    return folder


@dataclass
class Served:
    """A server that runs."""

    url: str
    api: Api
    model: InferenceModel


@contextlib.contextmanager
def served(model: InferenceModel, *, keys: tuple[str, ...] = (), **limits: Any) -> Iterator[Served]:
    """Serves a model on a free port of this machine, as castor serve does."""
    api = Api(model, name="tiny", keys=keys, limits=Limits(**limits))
    listener = listening("127.0.0.1", 0)
    server = server_of_api(api)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", api, model)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()
        assert not api.turns._thread.is_alive()


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


class Slow:
    """Makes tokens of a model wait, for tests of what happens meanwhile.

    Each takes some seconds, and after `before_held` of them the next one waits for `goes_on`.
    """

    def __init__(
        self, model: InferenceModel, seconds: float = 0.0, *, before_held: int = 2**63
    ) -> None:
        self.tokens = 0
        self.goes_on = threading.Event()
        self._seconds, self._before_held = seconds, before_held
        self._handle = model.model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.tokens += 1
        if self.tokens > self._before_held:
            assert self.goes_on.wait(60)
        time.sleep(self._seconds)

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()


def pieces_of(text: str, seed: int) -> list[str]:
    """A text in random pieces."""
    rng, pieces = random.Random(seed), []
    while text:
        cut = rng.randint(1, 4)
        pieces.append(text[:cut])
        text = text[cut:]
    return pieces
