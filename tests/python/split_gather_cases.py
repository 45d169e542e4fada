"""What tests of tokens between divided layers run on several ranks; see tensor_cases."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn

import as_rank
import castor
import grids
import pipeline_cases
from helpers import Boosted, on_device_of
from tensor_cases import (
    EXPERTS,
    FAMILIES,
    STEPS,
    boost,
    decoder,
    half_of,
    of_all,
    padded,
    said,
    train,
    write,
    write_own,
)
from zoo import VOCABULARY, Case, gpt2_with_dropout

SPLIT_GATHER: dict[str, Any] = {"sequence_parallelism_mode": "split_gather"}
TWO = grids.some(
    (*(name for name in FAMILIES if name not in ("t5", "vit")),
     "router_loss", "grouped", "qwen3_moe"),
    "opt", "gemma2", "glm", "phi3", "qwen2_moe", "gpt_neox", "bloom", "falcon", "gptj",
    "router_loss",
)  # fmt: skip
"""Of two ranks; tensor_cases has others in CI, whose plans are the same."""
FOUR = grids.some(("gpt2", "bert", "opt", "bloom"), "bert")
WITH_SETTINGS = grids.some(("llama", "gpt2"), "llama")
WITH_COPIES = grids.some(("gpt2", "mixtral"), "mixtral")
IN_STAGES = grids.some(("llama", "gpt2"), "llama")
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "some": {"activations": {"model.layers.0": "recompute"}},
    "offload": {"activations": "offload"},
    "forward": {"overlap": "forward"},
    "lazy": {"lazy": True},
}
STAGES: dict[str, dict[str, Any]] = grids.some({
    "1f1b": {},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2},
    "zbv": pipeline_cases.ZERO_BUBBLE,
    "recompute": {"activations": "recompute"},
}, "zbv", "recompute")  # fmt: skip


def case_of(name: str) -> Case:
    return FAMILIES.get(name) or EXPERTS[name]


def families(directory: Path) -> None:
    """Losses of every family."""
    size, found = distributed.get_world_size(), {}
    for name in TWO if size == 2 else FOUR:
        boosted = boost(case_of(name), size, **SPLIT_GATHER)
        found[name] = train(case_of(name), boosted)
        # What every rank has whole has had the same gradients on all.
        both = zip(boosted.model.parameters(), case_of(name).model().parameters(), strict=True)
        same = [one.detach().double().sum().item() for one, two in both if one.shape == two.shape]
        assert len(same) >= 5
        assert of_all([found[name], same]) == [[found[name], same]] * size
    write(directory, "families", found)


def settings(directory: Path) -> None:
    """Losses of Llama and GPT-2 with settings that change no bit, and others."""
    found: dict[str, Any] = {}
    for name in WITH_SETTINGS:
        case = FAMILIES[name]
        ample = boost(case, 2, **SPLIT_GATHER)
        found[name] = [train(case, ample)]
        tight = half_of(ample)
        for given in (*SETTINGS.values(), {"device_memory": tight}):
            if name == "gpt2" and isinstance(given.get("activations"), dict):
                continue
            boosted = boost(case, 2, **SPLIT_GATHER | given)
            found[name].append(train(case, boosted))
            if "device_memory" in given:
                assert boosted.report().peak_device_bytes <= tight
        reduced = boost(case, 2, precision="bf16", **SPLIT_GATHER)
        found[f"{name} bf16"] = train(case, reduced)
    case = FAMILIES["llama"]
    loss = boost(case, 2, parallel_output=True, **SPLIT_GATHER)
    found["loss"] = [loss.step(loss.model(**padded(case, seed)).loss) for seed in range(STEPS)]
    mixtral = FAMILIES["mixtral"]
    found["experts"] = train(mixtral, boost(mixtral, 2, ep_size=2, **SPLIT_GATHER))
    write(directory, "settings", found)


def data_too(directory: Path) -> None:
    """Two ranks a layer, two copies of the model with half of the batch each; saved and read."""
    rank, found = distributed.get_rank(), {}
    for name in WITH_COPIES:
        case = FAMILIES[name]
        boosted = boost(case, 2, **SPLIT_GATHER)
        losses = of_all(train(case, boosted, share=rank // 2, of=2))
        found[name] = torch.tensor(losses).mean(0).tolist()
        boosted.booster.save(directory / name, boosted.model, boosted.optimizer)
        later = train(case, boosted, STEPS, 2)
        # As layers of which every rank has all tokens.
        other = boost(case, 2, lazy=True)
        other.booster.load(directory / name, other.model, other.optimizer)
        found[f"{name} later"] = [later, train(case, other, STEPS, 2)]
    write(directory, "data_too", found)


def stages(directory: Path) -> None:
    """Losses of layers divided among two ranks in two stages, by schedule."""
    found = {}
    for name in IN_STAGES:
        case = pipeline_cases.DEEP[name]
        for schedule, given in STAGES.items():
            boosted = pipeline_cases.boost(case, tp_size=2, **SPLIT_GATHER | given)
            found[f"{name} {schedule}"] = pipeline_cases.train(case, boosted)
    write(directory, "stages", found)


def uses(directory: Path) -> None:
    """Generation, evaluation between forward and backward, and a frozen first block."""
    case, found = FAMILIES["gpt2"], {}
    boosted = boost(case, 2, activations="recompute", **SPLIT_GATHER)
    model: Any = boosted.model
    ids = on_device_of(boosted, case.batch(0))["input_ids"]
    found["generated"] = model.generate(
        ids[:, :7], max_new_tokens=8, do_sample=False, pad_token_id=0
    ).tolist()
    losses = []
    for seed in range(3):
        batch = case.batch(seed)
        loss = case.loss(model(**batch), batch)
        with torch.no_grad():
            model(input_ids=ids[:, :5])
        losses.append(boosted.step(loss))
    found["evaluated between"] = losses
    plain = train(case, boost(case, 2, activations="recompute", **SPLIT_GATHER), 0, 3)
    assert losses == plain

    def frozen() -> nn.Module:
        model = case.build()
        for name, param in model.named_parameters():
            param.requires_grad_("h.1" in name and "c_fc" not in name)
        return model

    some = Case("frozen", frozen, case.batch, case.loss)
    found["frozen"] = [train(some, boost(some, 2, **given)) for given in ({}, SPLIT_GATHER)]
    write(directory, "uses", found)


def dropout(directory: Path) -> None:
    """Numbers that ranks draw within blocks, and behind them."""
    case, found = gpt2_with_dropout(), {}
    for name in ("keep", "recompute"):
        model = case.model()
        seen: list[torch.Tensor] = []
        for block in model.transformer.h:  # type: ignore[union-attr, operator]
            block.attn.resid_dropout.register_forward_hook(
                lambda _, __, output, seen=seen: seen.append(output.detach() == 0)
            )
        torch.manual_seed(5)
        plugin = castor.HybridParallelPlugin(
            tp_size=2,
            device="cpu",
            precision="fp32",
            activations=name,
            max_norm=0.5,
            **SPLIT_GATHER,
        )
        booster = castor.Booster(plugin=plugin)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        booster.boost(model, optimizer)
        losses = train(case, Boosted(booster, model, optimizer), 0, 3)
        assert of_all(losses) == [losses, losses]
        masks = of_all(torch.stack(seen[:2]).tolist())
        found[name] = {
            "losses": losses,
            "differ": masks[0] != masks[1] and masks[0][0] != masks[0][1],
        }
        first, second = of_all(torch.get_rng_state().tolist())
        assert first == second
    write(directory, "dropout", found)


def activation_bytes(directory: Path) -> None:
    """What a block keeps for backward, by how a model is divided."""
    found: dict[str, int] = {}
    ids = torch.randint(3, VOCABULARY, (2, 128), generator=torch.Generator().manual_seed(0))
    for name, given in {
        "whole": {},
        "layers": {"size": 2},
        "tokens": {"size": 2} | SPLIT_GATHER,
    }.items():
        peaks = []
        for layers in (2, 4):
            case = decoder("long", hf.LlamaConfig, num_hidden_layers=layers, hidden_size=96,
                           intermediate_size=192, max_position_embeddings=128)  # fmt: skip
            boosted = boost(case, tile_logits=False, activations="keep", **given)  # type: ignore[arg-type]
            for _ in range(2):
                boosted.step(boosted.model(input_ids=ids, labels=ids).loss)
            peaks.append(boosted.report().peak_nonmodel_bytes)
        found[name] = (peaks[1] - peaks[0]) // 2
    write(directory, "activation_bytes", found)


def refused(directory: Path) -> None:
    """What has no tokens between divided layers, or not evenly many."""
    llama = FAMILIES["llama"]
    batch = llama.batch(0)
    boosted = boost(llama, 2, **SPLIT_GATHER)
    ids = batch["input_ids"]
    mlp = {
        "model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    }  # fmt: skip
    noisy = decoder("noisy", hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2,
                    router_jitter_noise=0.1)  # fmt: skip
    found = {
        "odd": said(lambda: boosted.model(input_ids=ids[:, :-1], labels=ids[:, :-1])),
        "states": said(lambda: boosted.model(**batch, output_hidden_states=True)),
        "t5": said(lambda: boost(FAMILIES["t5"], 2, **SPLIT_GATHER)),
        "attention": said(lambda: boost(llama, 2, tp_plan=mlp, **SPLIT_GATHER)),
        "noise": said(lambda: train(noisy, boost(noisy, 2, **SPLIT_GATHER), 0, 1)),
        "ring": said(lambda: boost(llama, 2, sequence_parallelism_mode="ring")),
        "layers": said(lambda: boost(llama, **SPLIT_GATHER)),
        "sequences": said(lambda: boost(llama, 2, sp_size=2, **SPLIT_GATHER)),
        "works": train(llama, boosted, 0, 1),
    }
    write_own(directory, "refused", found)


def written_in_place(directory: Path) -> None:
    """Hidden states that are written after a layer has taken them."""
    case = FAMILIES["llama"]
    model: Any = case.model()
    kept: list[torch.Tensor] = []
    norm = model.model.layers[0].post_attention_layernorm
    norm.register_forward_hook(lambda _, __, output: kept.append(output))
    model.model.layers[1].register_forward_pre_hook(lambda *_: write_to(kept[-1]))
    del norm
    boosted = boost(Case("writes", lambda: model, case.batch, case.loss), 2, **SPLIT_GATHER)
    write(directory, "written_in_place", said(lambda: train(case, boosted, 0, 1)))


def write_to(x: torch.Tensor) -> None:
    """As somebody's code does."""
    x.detach().add_(1.0)


if __name__ == "__main__":
    as_rank.run(globals())
