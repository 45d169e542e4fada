"""Tiny models of every architecture family, with data, from configurations: no network."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY = 256
LENGTH = 24


@dataclass(frozen=True)
class Case:
    """A model and its data, both functions of nothing but a seed."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], torch.Tensor] = lambda outputs, batch: outputs.loss
    """The model's own unless that would round the loss itself to 16 bits: in bfloat16 one unit in
    the last place is up to 0.8%, above the tolerance."""

    def model(self, *, checkpointing: bool = False) -> nn.Module:
        torch.manual_seed(1234)
        model = self.build()
        model.train()
        if checkpointing:
            with warnings.catch_warnings():  # transformers 6 will rename it
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable()
        return model


def _tokens(seed: int, rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)


def _language(seed: int) -> Batch:
    ids = _tokens(seed)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked_language(seed: int) -> Batch:
    ids = _tokens(seed)
    labels = ids.clone()
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    hidden[:, 0] = True
    labels[~hidden] = -100
    return {"input_ids": ids.masked_fill(hidden, 1), "labels": labels}


def _loss_of_float_logits(outputs: Any, batch: Batch) -> torch.Tensor:
    logits = outputs.logits.float()
    labels = batch["labels"].to(logits.device)
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn((4, 3, 16, 16), generator=generator),
        "labels": torch.randint(0, 10, (4,), generator=generator),
    }


def gpt2(*, dropout: float = 0.0, width: int = 48, layers: int = 3) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=4, n_positions=64,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config)


def llama(*, width: int = 48, layers: int = 2) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config)


def _opt() -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=48, ffn_dim=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=48, dropout=0.0,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config)


def _bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.AutoModelForMaskedLM.from_config(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=48, d_ff=96, d_kv=12, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",  # smooth: one flipped ReLU grows past 1e-5 in plain PyTorch
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.AutoModelForSeq2SeqLM.from_config(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=10,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.AutoModelForImageClassification.from_config(config)


def _mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return hf.AutoModelForCausalLM.from_config(config)


CASES = {
    case.name: case
    for case in (
        Case("gpt2", gpt2, _language),
        Case("llama", llama, _language),
        Case("opt", _opt, _language),
        Case("bert", _bert, _masked_language),
        Case("t5", _t5, _language, _loss_of_float_logits),
        Case("vit", _vit, _images, _loss_of_float_logits),
        Case("mixtral", _mixtral, _language),
    )
}


def gpt2_with_dropout() -> Case:
    return replace(CASES["gpt2"], name="gpt2-dropout", build=lambda: gpt2(dropout=0.1))


def medium_gpt2() -> Case:
    """Large enough (400k parameters) that padding does not show."""
    return replace(CASES["gpt2"], name="gpt2-medium", build=lambda: gpt2(width=96, layers=3))


class Tower(nn.Module):
    """A stack of linear layers with a scalar loss: the smallest model that streams."""

    def __init__(self, *, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits, labels)


def tower(**size: int) -> Tower:
    torch.manual_seed(7)
    return Tower(**size)


def tower_batch(seed: int, *, rows: int = 8, width: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn((rows, width), generator=generator),
        "labels": torch.randint(0, 4, (rows,), generator=generator),
    }


def tower_loss(model: nn.Module, seed: int) -> torch.Tensor:
    loss: torch.Tensor = model(**tower_batch(seed))
    return loss
