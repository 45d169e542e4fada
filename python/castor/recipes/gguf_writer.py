"""Writes a dense Llama-like model as one GGUF file, which llama.cpp loads.

The names of tensors and keys are the gguf library's. Which values a family needs follows llama.cpp:
https://github.com/ggml-org/llama.cpp, conversion/llama.py, conversion/qwen.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from castor.errors import UsageError
from castor.recipes.exports import Weights

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Architectures of GGUF by transformers' model_type."""
_KINDS = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_CASTS = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace("{1,3}", ""): "qwen2"}
"""llama.cpp's names of pre-tokenizers by their regular expression."""
_PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS.values())


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of the file, which is computed when its turn to be written comes."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    compute: Callable[[], torch.Tensor]
    """Function that returns the values in float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values in the file."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def values(self) -> np.ndarray[Any, Any]:
        """Returns the values as bytes of the file.

        Raises:
            UsageError: float16 does not reach the values.
        """
        exact = self.compute().contiguous()
        if self.kind not in _CASTS:
            return gguf.quantize(exact.numpy(), self.kind)
        cast = exact.to(_CASTS[self.kind])
        if not cast.isfinite().all() and exact.isfinite().all():
            raise UsageError(f"{self.name} has values above float16's 65504: give --dtype bfloat16")
        return cast.view(torch.uint8).numpy()


class GgufFile:
    """The contents of a GGUF file: tensors, metadata and vocabulary of a model."""

    def __init__(self, weights: Weights, words: Any, *, kind: str, name: str) -> None:
        """Plans the file.

        Args:
            weights: A model's weights in float32.
            words: Its tokenizer, a PreTrainedTokenizerBase.
            kind: Type of matrices: "float32", "bfloat16", "float16" or "q8_0". Vectors are float32.
            name: Name of the model.

        Raises:
            UsageError: The model or the tokenizer is none that castor writes as GGUF.
        """
        self._config = weights.model.config
        self._check_model()
        self.kind, self._file_type = _KINDS[kind]
        self._name = name
        self.architecture = FAMILIES[self._config.model_type]
        self._heads = self._config.num_attention_heads
        self._kv_heads = self._config.num_key_value_heads or self._heads
        self._head_dim = getattr(self._config, "head_dim", None) or (
            self._config.hidden_size // self._heads
        )
        self.tensors = self._planned(weights)
        rows = weights.model.get_input_embeddings().weight.shape[0]
        self._vocabulary = Vocabulary(words, rows)

    @property
    def nbytes(self) -> int:
        """Upper bound of the file's bytes."""
        count = sum(tensor.nbytes + 256 for tensor in self.tensors)
        return count + sum(map(len, self._vocabulary.merges + self._vocabulary.tokens)) * 2 + 2**20

    def _check_model(self) -> None:
        """Raises UsageError for a model that llama.cpp would compute otherwise."""
        config = self._config
        family = config.model_type
        if family not in FAMILIES:
            raise UsageError(
                f"castor writes GGUF files of {', '.join(FAMILIES)}, and this model is {family}: "
                "give --format safetensors and convert that with llama.cpp's convert_hf_to_gguf.py"
            )
        scaling = config.rope_parameters
        window = getattr(config, "sliding_window", None)
        kind = scaling.get("rope_type", "default")
        unlike = None
        if config.hidden_act != "silu":
            unlike = f"hidden_act {config.hidden_act!r}"
        elif window is not None and window < config.max_position_embeddings:
            unlike = f"sliding_window {window}"
        elif kind not in ("default", "linear", *(("llama3",) if family == "llama" else ())):
            unlike = f"rope_type {kind!r}"
        elif scaling.get("partial_rotary_factor", 1.0) != 1.0:
            unlike = "a partial_rotary_factor"
        elif family == "qwen3" and config.attention_bias:
            unlike = "an attention_bias"
        if unlike is not None:
            raise UsageError(
                f"castor writes no GGUF file of a {family} model with {unlike}: give --format "
                "safetensors"
            )

    def _planned(self, weights: Weights) -> list[GgufTensor]:
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        names = gguf.get_tensor_name_map(arch, self._config.num_hidden_layers)
        planned = []
        for key, tensor in weights.tensors.items():
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise UsageError(f"GGUF's {self.architecture} has no place for the tensor {key}")
            kind = self.kind if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
            if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                raise UsageError(
                    f"{key} has rows of {tensor.shape[-1]} values, and {kind.name} packs multiples "
                    "of 32: give --dtype float16"
                )
            heads = {"q_proj": self._heads, "k_proj": self._kv_heads}.get(key.split(".")[-2])
            compute = tensor.compute
            if self.architecture == "llama" and heads is not None:
                compute = partial(_paired, compute, heads)
            planned.append(GgufTensor(name=name, shape=tensor.shape, kind=kind, compute=compute))
        if self._config.rope_parameters.get("rope_type") == "llama3":
            planned.insert(0, self._rope_factors())
        return planned

    def _rope_factors(self) -> GgufTensor:
        """Returns the numbers that Llama 3.1 divides its rotary frequencies by."""
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self._config, torch.device("cpu"))
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.int64).float() / self._head_dim
        factors = 1.0 / self._config.rope_parameters["rope_theta"] ** exponents / scaled
        kind = gguf.GGMLQuantizationType.F32
        shape = tuple(factors.shape)
        return GgufTensor(name="rope_freqs.weight", shape=shape, kind=kind, compute=lambda: factors)

    def write(self, path: Path) -> None:
        """Writes the file, one tensor after the other.

        Raises:
            OSError: The disk refuses.
            UsageError: float16 does not reach the values.
        """
        writer = gguf.GGUFWriter(path, self.architecture)
        try:
            self._add_model(writer)
            self._vocabulary.add_to(writer)
            for tensor in self.tensors:
                writer.add_tensor_info(
                    tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, tensor.kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in self.tensors:
                writer.write_tensor_data(tensor.values())
        finally:
            writer.close()

    def _add_model(self, writer: gguf.GGUFWriter) -> None:
        config, rope = self._config, self._config.rope_parameters
        count = sum(math.prod(tensor.shape) for tensor in self.tensors)
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(self._name)
        writer.add_size_label(gguf.size_label(count, count, 0, 0))
        writer.add_file_type(self._file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(len(self._vocabulary.tokens))
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(self._heads)
        writer.add_head_count_kv(self._kv_heads)
        writer.add_key_length(self._head_dim)
        writer.add_value_length(self._head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(self._head_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope.get("rope_type") == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])


def _paired(read: Callable[[], torch.Tensor], heads: int) -> torch.Tensor:
    """Reorders the rows of each head: llama.cpp rotates neighbours, transformers rotates halves."""
    values = read()
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


class Vocabulary:
    """A byte-level BPE tokenizer in the terms of GGUF."""

    def __init__(self, words: Any, rows: int) -> None:
        """Reads a tokenizer.

        Args:
            words: A PreTrainedTokenizerBase.
            rows: Number of the model's embeddings; those without a token get a placeholder.

        Raises:
            UsageError: The tokenizer is no byte-level BPE, or llama.cpp splits texts otherwise.
        """
        backend = getattr(words, "backend_tokenizer", None)
        if backend is None:
            raise UsageError("the tokenizer has no tokenizer.json: give one with --tokenizer")
        document = json.loads(backend.to_str())
        self._words = words
        self._pre = _pre_tokenizer(document)
        pairs = document["model"]["merges"]
        self.merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        by_id = {number: token for token, number in words.get_vocab().items()}
        added = words.added_tokens_decoder
        self.tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
        self._types = [self._type(number, by_id, added) for number in range(rows)]

    @staticmethod
    def _type(number: int, by_id: dict[int, str], added: Any) -> gguf.TokenType:
        if number not in by_id:
            return gguf.TokenType.UNUSED
        if number not in added:
            return gguf.TokenType.NORMAL
        return gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Adds tokens, merges, special tokens and the chat template to a file's metadata."""
        words = self._words
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self._pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self._types)
        writer.add_token_merges(self.merges)
        for number, add in (
            (words.bos_token_id, writer.add_bos_token_id),
            (words.eos_token_id, writer.add_eos_token_id),
            (words.unk_token_id, writer.add_unk_token_id),
            (words.pad_token_id, writer.add_pad_token_id),
        ):
            if number is not None:
                add(number)
        ids = words("a")["input_ids"]
        writer.add_add_bos_token(words.bos_token_id is not None and ids[0] == words.bos_token_id)
        writer.add_add_eos_token(words.eos_token_id is not None and ids[-1] == words.eos_token_id)
        template = words.chat_template
        if isinstance(template, dict):
            template = [{"name": name, "template": text} for name, text in template.items()]
        if template is not None:
            writer.add_chat_template(template)


def _pre_tokenizer(document: dict[str, Any]) -> str:
    """Returns llama.cpp's name of how a tokenizer.json splits texts.

    Raises:
        UsageError: llama.cpp has no name for it.
    """
    model, normalizer = document["model"], document["normalizer"]
    plain = model["type"] == "BPE" and not any(
        model.get(key)
        for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout")
    )
    steps = document["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    by_bytes = steps[-1].get("type") == "ByteLevel" and not steps[-1]["add_prefix_space"]
    if not plain or not by_bytes or (normalizer or {"type": "NFC"})["type"] != "NFC":
        raise UsageError(
            "the tokenizer is no byte-level BPE, the only kind that castor writes into GGUF files: "
            "give --format safetensors"
        )
    name = None
    if steps[-1]["use_regex"]:
        digits = [{"type": "Digits", "individual_digits": True}]
        name = "gpt-2" if len(steps) == 1 else "smollm" if steps[:-1] == digits else None
    elif len(steps) == 2 and steps[0]["type"] == "Split":
        isolated = steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]
        name = _SPLITS.get(steps[0]["pattern"].get("Regex")) if isolated else None
    if name is None:
        raise UsageError(
            f"the tokenizer splits texts otherwise than {', '.join(_PRE_TOKENIZERS)} do, the only "
            "ones that castor writes into GGUF files: give --format safetensors"
        )
    return name
