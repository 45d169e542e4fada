"""What tests of router losses in stages run on several ranks; as pipeline_cases.py."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed

import as_rank
import grids
import pipeline_cases
from helpers import Boosted
from pipeline_cases import SCHEDULES, ZERO_BUBBLE, batch, boost, in_parts
from stage_call_cases import generate
from tensor_cases import EXPERTS, FAMILIES, LR, accumulated, decoder, of_all, said, write, write_own
from zoo import Batch, Case

STEPS = grids.steps(10)
STYLES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "gpipe": {"pp_style": "gpipe"}, "interleaved": SCHEDULES["interleaved"],
    "zbv": ZERO_BUBBLE,
}  # fmt: skip
PADDED = 5
"""Tokens of the second row that are padding."""


def _padded(seed: int) -> Batch:
    given = FAMILIES["llama"].batch(seed)
    mask = torch.ones_like(given["input_ids"])
    mask[1, -PADDED:] = 0
    return given | {"attention_mask": mask}


def _mixture(name: str, config: type, **settings: Any) -> Case:
    case = decoder(
        name, config, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1,
        num_hidden_layers=4, **settings,
    )  # fmt: skip
    return Case(name, case.build, _padded)


MIXTURES = {
    case.name: case
    for case in (
        _mixture("mixtral", hf.MixtralConfig, num_local_experts=4),
        _mixture("tied", hf.MixtralConfig, num_local_experts=4, tie_word_embeddings=True),
        _mixture("qwen2_moe", hf.Qwen2MoeConfig, num_experts=4, moe_intermediate_size=48,
                 shared_expert_intermediate_size=48),
        # Blocks without routers, stages of them too.
        _mixture("qwen3_moe", hf.Qwen3MoeConfig, head_dim=12, num_experts=6,
                 moe_intermediate_size=48, mlp_only_layers=[0, 2]),
        _mixture("olmoe", hf.OlmoeConfig, num_experts=4, eos_token_id=1),
    )
}  # fmt: skip
TRAINED = grids.some(
    tuple(f"{name} {style}" for name in MIXTURES for style in STYLES),
    *("mixtral gpipe", "tied zbv", "qwen2_moe interleaved", "qwen3_moe 1f1b", "qwen3_moe zbv"),
)
UNCHANGED = ("1f1b ample", "1f1b recompute", "zbv ample", "zbv tight", "zbv offload")
COMPILED = grids.some(("1f1b", "interleaved"), "interleaved")
BASE = grids.some(("1f1b", "zbv"), "zbv")
WITH_EXPERTS = grids.some(tuple(STYLES), "1f1b", "zbv")
KINDS: dict[str, dict[str, Any]] = grids.some({
    "tp 2": {"tp_size": 2},
    "tp 2, tokens": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "tp 2, ep 2": {"tp_size": 2, "ep_size": 2},
    "pp 4": {"pp_size": 4},
}, "tp 2, tokens", "tp 2, ep 2", "pp 4")  # fmt: skip
IN_FP32 = _mixture(
    "ernie4_5_moe", hf.Ernie4_5_MoeConfig, moe_num_experts=4, moe_k=2, moe_intermediate_size=48,
    moe_layer_start_index=1, eos_token_id=1,
)  # fmt: skip
"""Routers that compute in fp32 whatever the model does."""
OF_ANOTHER_FORM = decoder(
    "doge", hf.DogeConfig, is_moe=True, num_experts=16, num_experts_per_tok=2,
    output_router_logits=True,
)  # fmt: skip


@cache
def plain(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of plain PyTorch, which accumulates as many micro-batches."""
    case = MIXTURES[name]
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = accumulated(model, optimizer, (in_parts(batch(case, seed)) for seed in range(STEPS)))
    return losses, model.state_dict()


def _train(case: Case, boosted: Boosted, path: Path | None = None) -> list[float]:
    losses = pipeline_cases.train(case, boosted, 0, STEPS)
    if path:
        boosted.booster.save_model(boosted.model, path)
    return losses


def _evaluated(case: Case, boosted: Boosted) -> dict[str, Any]:
    """Of a call of the whole, and of the micro-batches of a schedule."""
    execute = boosted.booster.execute_pipeline
    with torch.no_grad():
        outputs: Any = boosted.model(**batch(case, 0))
        done = execute(iter([batch(case, 0)]), boosted.model, return_outputs=True)
    parts = done["outputs"]
    return {
        "loss": outputs.loss.item(),
        "aux_loss": outputs.aux_loss.item(),
        "router_logits": [x.tolist() for x in outputs.router_logits],
        "scheduled": done["loss"].item(),
        "parts": parts and [[one.aux_loss.item(), len(one.router_logits)] for one in parts],
    }


def schedules(directory: Path) -> None:
    """Losses and weights in each schedule, and evaluations before."""
    found: dict[str, Any] = {}
    for trained in TRAINED:
        name, style = trained.split()
        case = MIXTURES[name]
        boosted = boost(case, **STYLES[style])
        found[f"{trained} evaluated"] = of_all(_evaluated(case, boosted))
        found[trained] = of_all(_train(case, boosted, directory / trained))
    write(directory, "schedules", found)


def settings(directory: Path) -> None:
    """What changes nothing, budgets among it; reduced precisions."""
    found: dict[str, Any] = {}
    case = MIXTURES["mixtral"]
    for style in ("1f1b", "zbv"):
        ample = boost(case, **STYLES[style])
        found[f"{style} ample"] = _train(case, ample)
        settings_of_style = pipeline_cases.in_little(ample, directory / style)
        settings_of_style["recompute"] = {"activations": "recompute"}
        for setting, given in settings_of_style.items():
            if f"{style} {setting}" not in UNCHANGED:
                continue
            boosted = boost(case, **STYLES[style], **given)
            found[f"{style} {setting}"] = _train(case, boosted)
            if "device_memory" in given:
                assert boosted.report().peak_device_bytes <= given["device_memory"]
    found["tiles"] = _train(case, boost(case, tile_logits=8))
    compiled = Case("compiled", lambda: _compiled(case), case.batch)
    for style in COMPILED:
        found[f"{style} compiled"] = _train(compiled, boost(compiled, **STYLES[style]))
    found["mixtral bf16"] = _train(case, boost(case, precision="bf16"))
    for precision in ("fp32", "bf16"):
        boosted = boost(IN_FP32, precision=precision)
        found[f"in fp32 {precision}"] = _train(IN_FP32, boosted)
    # The call asks for it, not the configuration; then none does.
    quiet = Case("quiet", lambda: _quiet(case), case.batch)
    boosted = boost(quiet)
    asked = batch(quiet, 0) | {"output_router_logits": True}
    for key, one in {"asked": asked, "not asked": batch(quiet, 0)}.items():
        done = boosted.booster.execute_pipeline(iter([one]), boosted.model, None, boosted.optimizer)
        boosted.optimizer.zero_grad()
        found[key] = done["loss"].item()
    boosted = boost(case)
    boosted.model.config.output_router_logits = False  # type: ignore[union-attr]
    found["generated"] = of_all(generate(boosted.model, case))
    boosted.model.config.output_router_logits = True  # type: ignore[union-attr]
    found["trained afterwards"] = _train(case, boosted)
    # A base model, whose user has a loss of the routers.
    base = Case("base", lambda: base_of(case), case.batch)
    inputs = {key: x for key, x in batch(base, 0).items() if key != "labels"}
    for style in BASE:
        boosted = boost(base, **STYLES[style])
        with torch.no_grad():
            outputs = boosted.model(**inputs)
        found[f"{style} base called"] = of_all(of_routers(outputs, None).item())
        losses = []
        for _ in range(3):
            execute = boosted.booster.execute_pipeline
            done = execute(iter([inputs]), boosted.model, of_routers, boosted.optimizer)
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
            losses.append(done["loss"].item())
        found[f"{style} base"] = losses
    write(directory, "settings", found)


def base_of(case: Case) -> Any:
    model: Any = case.build()
    return model.model


def of_routers(outputs: Any, _: Any) -> torch.Tensor:
    """A loss of all layers' router logits, the sooner ones less."""
    losses = [(i + 1) * x.square().mean() for i, x in enumerate(outputs.router_logits)]
    return torch.stack(losses).sum()


def _quiet(case: Case) -> Any:
    model: Any = case.build()
    model.config.output_router_logits = False
    return model


def _compiled(case: Case) -> Any:
    model: Any = case.build()
    for block in model.model.layers:
        block.compile(backend="aot_eager" if grids.WHOLE else "eager")
    return model


def composed(directory: Path) -> None:
    """On four ranks: with experts and layers divided, four stages, copies of the model."""
    found: dict[str, Any] = {}
    case, rank = MIXTURES["mixtral"], distributed.get_rank()
    for style in WITH_EXPERTS:
        boosted = boost(case, ep_size=2, **STYLES[style])
        found[f"ep 2 {style} evaluated"] = of_all(_evaluated(case, boosted))
        path = directory / f"ep-{style}"
        found[f"ep 2 {style}"] = of_all(_train(case, boosted, path))
    for kind, given in KINDS.items():
        found[kind] = of_all(_train(case, boost(case, **given)))
    copies = boost(case)
    losses = []
    for seed in range(STEPS):
        half = {key: value[rank // 2 :: 2] for key, value in batch(case, seed, 16).items()}
        losses += pipeline_cases._train_on(copies, half)
    found["dp 2"] = of_all(losses)
    write(directory, "composed", found)


def refused(directory: Path) -> None:
    """Router logits of another form, and of none; the model works without."""
    llama = FAMILIES["llama"]
    boosted = boost(llama)
    asked = batch(llama, 0) | {"output_router_logits": True}
    execute = boosted.booster.execute_pipeline

    def call() -> Any:
        with torch.no_grad():
            return boosted.model(**asked)

    found = {
        "another form": said(lambda: boost(OF_ANOTHER_FORM)),
        "none": said(
            lambda: execute(iter([asked]), boosted.model, None, boosted.optimizer)
        ),
        "call": said(call),
        "sequences": said(lambda: boost(EXPERTS["router_loss"], pp_size=1, sp_size=2)),
        "works": pipeline_cases.train(llama, boosted, 0, 1),
        "works too": pipeline_cases.train(
            OF_ANOTHER_FORM, boost(Case("doge", lambda: _quiet(OF_ANOTHER_FORM), llama.batch)), 0, 1
        ),
    }  # fmt: skip
    write_own(directory, "refused", found)


if __name__ == "__main__":
    as_rank.run(globals())
