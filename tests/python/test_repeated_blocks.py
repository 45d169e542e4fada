"""What alike blocks do, of which four run, is what all of them do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from castor.planner import repeated_blocks
from castor.planner.repeated_blocks import NotRepeated, RepeatedBlocks, repeats
from castor.planner.simulated_rank import SimulatedModel
from castor.runtime.parallel_dims import ParallelDims

COMMON = {
    "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "llama": hf.LlamaConfig(**COMMON, architectures=["LlamaForCausalLM"]),
    "qwen3": hf.Qwen3Config(**COMMON, head_dim=16, architectures=["Qwen3ForCausalLM"]),
    "mixtral": hf.MixtralConfig(
        **COMMON, num_local_experts=4, architectures=["MixtralForCausalLM"]
    ),
    "router loss": hf.MixtralConfig(
        **COMMON, num_local_experts=4, output_router_logits=True,
        architectures=["MixtralForCausalLM"],
    ),
    "hidden states": hf.LlamaConfig(
        **COMMON, output_hidden_states=True, architectures=["LlamaForCausalLM"]
    ),
    "gpt2": hf.GPT2Config(
        vocab_size=1000, n_embd=64, n_layer=12, n_head=4, n_positions=128, bos_token_id=0,
        eos_token_id=0, architectures=["GPT2LMHeadModel"],
    ),
    "opt": hf.OPTConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=12, num_attention_heads=4, ffn_dim=96,
        max_position_embeddings=128, word_embed_proj_dim=64, architectures=["OPTForCausalLM"],
    ),
    "bloom": hf.BloomConfig(
        vocab_size=1000, hidden_size=64, n_layer=12, n_head=4, architectures=["BloomForCausalLM"]
    ),
    "gemma2": hf.Gemma2Config(**COMMON, head_dim=16, architectures=["Gemma2ForCausalLM"]),
}  # fmt: skip
DIVIDED: dict[str, dict[str, Any]] = {
    "whole": {},
    "layers": {"dims": ParallelDims(tp=2)},
    "tokens": {"dims": ParallelDims(tp=2), "sequence_parallel": True},
    "sequences": {"dims": ParallelDims(cp=2)},
    "keys": {"dims": ParallelDims(cp=2), "sequence_mode": "all_gather"},
}
REFUSED = {
    ("bloom", "sequences"), ("bloom", "keys"), ("router loss", "sequences"),
    ("router loss", "keys"), ("hidden states", "tokens"),
}  # fmt: skip
# Stages of a rank, stages of the model, and whether gradients of weights come later.
STAGES = [
    ((0,), 2, False),
    ((0,), 2, True),
    ((1,), 2, False),
    ((1,), 2, True),
    ((0, 3), 4, True),
    ((0, 2), 4, False),
]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether four blocks were enough, each time that not all ran."""
    found: list[bool] = []
    whole = RepeatedBlocks.full_trace

    def noted(self: RepeatedBlocks, *args: Any) -> Any:
        try:
            result = whole(self, *args)
        except NotRepeated:
            found.append(False)
            raise
        found.append(True)
        return result

    monkeypatch.setattr(RepeatedBlocks, "full_trace", noted)
    return found


@pytest.mark.parametrize("state_format", ["split", "split_int8"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("name", "divided"),
    [(name, divided) for name in CONFIGS for divided in DIVIDED if (name, divided) not in REFUSED],
)
def test_passes_are_those_of_stages_whose_blocks_all_run(
    name: str, divided: str, *, recomputes: bool, state_format: Any, answers: list[bool],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "config.json"
    CONFIGS[name].to_json_file(path, use_diff=False)
    model = SimulatedModel(path, precision="bf16", state_format=state_format, **DIVIDED[divided])

    def passes() -> list[Any]:
        return [
            model.record(own, stages, rows=2, sequence=32, tile=1 << 20, splits=splits,
                         recomputes=recomputes).passes
            for own, stages, splits in STAGES
        ]  # fmt: skip

    found = passes()
    monkeypatch.setattr(repeated_blocks, "_FEWEST", 100)
    assert passes() == found
    # Every second block of Gemma 2 sees a window; a recomputed one of BLOOM's leaves something that
    # what stands for its neighbour does not; a loss of routers and hidden states are of all blocks.
    enough = {"bloom": {not recomputes}}
    enough |= {unlike: set() for unlike in ("gemma2", "router loss", "hidden states")}
    assert set(answers) == enough.get(name, {True})


def test_where_blocks_share_a_part_all_of_them_run(
    tmp_path: Path, answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    CONFIGS["llama"].to_json_file(path, use_diff=False)
    model = SimulatedModel(path, precision="bf16", state_format="split")
    layers = model.model.model.layers
    layers[4].mlp = layers[3].mlp
    shortened = model.record((0,), 2, rows=2, sequence=32, tile=0).passes
    monkeypatch.setattr(repeated_blocks, "_FEWEST", 100)
    assert model.record((0,), 2, rows=2, sequence=32, tile=0).passes == shortened
    assert answers == []


class Numbered(nn.Module):
    """A block that knows its number."""

    def __init__(self, number: int, width: int = 4, slope: float = 1.0) -> None:
        super().__init__()
        self.number = number
        self.slope = slope
        self.inner = nn.Linear(width, width)


def test_blocks_repeat_where_they_differ_in_their_number_alone() -> None:
    one = Numbered(3)
    assert repeats(one, Numbered(4), 1)
    assert repeats(one, Numbered(3), 1)
    assert not repeats(one, Numbered(5), 1)
    assert not repeats(one, Numbered(4, slope=2.0), 1)
    assert not repeats(one, Numbered(4, width=5), 1)
    frozen = Numbered(4)
    frozen.inner.weight.requires_grad_(False)
    assert not repeats(one, frozen, 1)
    more = Numbered(4)
    more.inner.register_forward_hook(lambda *_: None)
    assert not repeats(one, more, 1)
    other = Numbered(4)
    other.inner = nn.Bilinear(4, 4, 4)
    assert not repeats(one, other, 1)
    assert not repeats(one, Numbered(4).to(torch.bfloat16), 1)
