"""What tests of pipelines run on several ranks: `python pipeline_cases.py NAME DIRECTORY`.

As in tensor_cases.py, whose families these are.
"""

import copy
import functools
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import distributed, nn

import as_rank
import castor
import grids
from castor.config.event_names import BACKWARD_ENTER
from castor.runtime.engine import engine_of
from helpers import GIB, Boosted
from tensor_cases import (
    EXPERTS,
    FAMILIES,
    LR,
    MAX_NORM,
    RING,
    STEPS,
    _stepped,
    accumulated,
    assert_goes_at_once,
    decoder,
    die,
    half_of,
    hook_in,
    of_all,
    quantised,
    said,
    save_and_go_on,
    say_who_died,
    write,
    write_own,
)
from zoo import Case, gpt2, gpt2_with_dropout, llama

MICROBATCHES = 4
STAGED = FAMILIES | EXPERTS
FAMILIES_WITH_STAGES = (
    "gpt2", "llama", "qwen3", "mistral", "gemma2", "opt", "bloom", "falcon", "gptj", "gpt_neox",
    "glm", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "bert", "vit",
)  # fmt: skip
SOME_WITH_STAGES = grids.some(FAMILIES_WITH_STAGES, "gpt2", "gemma2", "opt", "bloom", "gpt_oss")
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pp_style": "gpipe"},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2},
    "size": {"num_microbatches": None, "microbatch_size": 2},
    "layers": {"num_layers_per_stage": [3, 1]},
    "lazy": {"lazy": True},
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "overlap": {"overlap": "forward"},
    "named": {"optimizer": lambda params: _named_optimizer(params)},
}
ZERO_BUBBLE: dict[str, Any] = {"pp_style": "zbv", "num_model_chunks": 2}
STYLES: dict[str, dict[str, Any]] = {
    "gpipe": SCHEDULES["gpipe"],
    "interleaved": SCHEDULES["interleaved"],
    "zbv": ZERO_BUBBLE,
}
SCHEDULED = grids.some(
    tuple(
        f"{name} {style}"
        for name in ("qwen3", "mistral", "gemma2", "opt", "bloom", "bert", "falcon", "glm",
                     "mixtral")
        for style in STYLES
    ),
    "gemma2 interleaved", "gemma2 zbv", "bert zbv", "falcon gpipe",
)  # fmt: skip
"""Families and schedules; GPT-2, Llama and T5 go through each elsewhere, with more settings."""
WITH_SEQUENCES: dict[str, dict[str, Any]] = {
    "all_to_all": {"pp_style": "interleaved", "num_model_chunks": 2},
    "all_gather": {"sequence_parallelism_mode": "all_gather"} | ZERO_BUBBLE,
    "ring_attn": {"sequence_parallelism_mode": "ring_attn", "activations": "recompute"},
}
"""Schedules of stages whose sequences are divided as well."""
DEEP = {
    "llama": Case("llama4", lambda: llama(layers=4), FAMILIES["llama"].batch),
    "gpt2": Case("gpt24", lambda: gpt2(layers=4), FAMILIES["gpt2"].batch),
}
"""Of four blocks."""
SETTINGS = grids.some(
    tuple(f"{name} {setting}" for name in DEEP for setting in (*SCHEDULES, "tight", "nvme")),
    *(f"llama {setting}" for setting in (*SCHEDULES, "tight", "nvme")),
    *("gpt2 1f1b", "gpt2 tight"),
)
COMPOSED = grids.some(
    (
        *(f"{name} pp 4" for name in DEEP),
        *(f"{name} {kind}" for kind in ("tp 2", "dp 2") for name in (*DEEP, "mixtral")),
        "mixtral ep 2",
        *(f"{name} sp 2, {kind}" for kind in WITH_SEQUENCES for name in DEEP),
    ),
    *("gpt2 pp 4", "gpt2 tp 2", "gpt2 dp 2", "mixtral ep 2"),
    *(f"llama sp 2, {kind}" for kind in WITH_SEQUENCES),
)
COMPOSED_V = grids.some(tuple(DEEP), "gpt2")
COUNTS = grids.some((1, 2, 4, 8), 1, 8)
"""Of micro-batches in a V on four ranks."""
PRECISIONS = grids.some(("bf16", "fp16"), "fp16")
SAVED: dict[str, dict[str, Any]] = grids.some({
    "gpt2": {}, "llama": {"precision": "bf16"}, "mixtral": {}, "bert": {}, "bloom": {},
    "vit": {}, "gemma2": {"optim_state_format": "fp32"},
}, "gpt2", "llama", "mixtral")  # fmt: skip
OF_A_V = grids.some({
    **DEEP,
    "mixtral": decoder("mixtral4", hf.MixtralConfig, num_hidden_layers=4, num_local_experts=4,
                        num_experts_per_tok=2),
    "shared": Case("shared8", lambda: _with_shared_mlp(), FAMILIES["llama"].batch),
    "frozen": Case("frozen4", lambda: _with_frozen_block(), FAMILIES["llama"].batch),
}, "llama", "mixtral", "shared", "frozen")  # fmt: skip
"""Models whose weights' gradients come by different ways."""
IN_LITTLE = grids.some(
    tuple(f"{name} {setting}" for name in OF_A_V for setting in ("tight", "nvme", "offload")),
    *("llama tight", "llama nvme", "llama offload", "mixtral tight"),
)


def batch(case: Case, seed: int, rows: int = 2 * MICROBATCHES) -> dict[str, torch.Tensor]:
    """As many rows as are wanted."""
    some = [case.batch(seed * rows + i) for i in range(rows)]
    return {name: torch.cat([one[name] for one in some])[:rows] for name in some[0]}


def boost(
    case: Case,
    *,
    lazy: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> Boosted:
    """A model in two stages, unless `settings` say otherwise."""
    if lazy:
        with castor.LazyInitContext():
            model = case.model()
    else:
        model = case.model()
    made = optimizer(model.parameters()) if optimizer else torch.optim.AdamW(model.parameters(), LR)
    settings = {
        "device": "cpu", "device_memory": GIB, "host_memory": GIB, "precision": "fp32",
        "max_norm": MAX_NORM, "activations": "keep", "pp_size": 2,
        "num_microbatches": MICROBATCHES,
    } | settings  # fmt: skip
    booster = castor.Booster(plugin=castor.HybridParallelPlugin(**settings))
    booster.boost(model, made)
    return Boosted(booster, model, made)


def batches(case: Case, first: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Of the steps from `first` on."""
    return (batch(case, seed) for seed in range(first, first + steps))


def train(case: Case, boosted: Boosted, first: int = 0, steps: int = STEPS) -> list[float]:
    """Losses through the pipeline."""
    losses, data = [], batches(case, first, steps)
    for _ in range(steps):
        done = boosted.booster.execute_pipeline(data, boosted.model, None, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        losses.append(done["loss"].item())
    return losses


@functools.cache
def plain(case: Case, steps: int = STEPS) -> list[float]:
    """Losses of plain PyTorch, which accumulates the gradients of as many micro-batches."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return accumulated(model, optimizer, (in_parts(batch(case, seed)) for seed in range(steps)))


def in_parts(whole: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a batch."""
    return [
        {name: value.chunk(MICROBATCHES)[i] for name, value in whole.items()}
        for i in range(MICROBATCHES)
    ]


def accumulate(boosted: Boosted, whole: dict[str, torch.Tensor], criterion: Any = None) -> float:
    """Loss of a batch of which one process takes a micro-batch after the other."""
    total = 0.0
    for part in in_parts(whole):
        outputs = boosted.model(**part)
        loss = (criterion(outputs, part) if criterion else outputs.loss) / MICROBATCHES
        boosted.booster.backward(loss, boosted.optimizer)
        total += loss.item()
    return total


def train_whole(case: Case, boosted: Boosted, seeds: range) -> list[float]:
    """Losses of steps of a model that one process has whole."""
    losses = []
    for seed in seeds:
        losses.append(accumulate(boosted, batch(case, seed)))
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return losses


def families(directory: Path) -> None:
    """Losses of every family in stages."""
    found = {}
    for name in SOME_WITH_STAGES:
        case = STAGED[name]
        boosted = boost(case)
        mine = train(case, boosted)
        own = set(boosted.model.parameters())
        shares = of_all(sum(param.numel() for param in own))
        whole = sum(param.numel() for param in case.model().parameters())
        found[name] = [mine, [share / whole for share in shares]]
        assert of_all(mine) == [mine] * distributed.get_world_size()
    write(directory, "families", found)


@functools.cache
def of_four_blocks(case: Case) -> Case:
    """A deeper one."""

    def build() -> nn.Module:
        model: Any = case.model()
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 4
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [*kinds, *kinds]
        torch.manual_seed(1234)
        deeper: nn.Module = type(model)._from_config(config)
        return deeper

    return Case(f"{case.name}4", build, case.batch, case.loss)


def schedules(directory: Path) -> None:
    """Losses of families of four blocks in the schedules that `families` does not run."""
    found = {}
    for key in SCHEDULED:
        name, style = key.split()
        case = of_four_blocks(STAGED[name])
        found[key] = train(case, boost(case, **STYLES[style]))
    write(directory, "schedules", found)


def settings(directory: Path) -> None:
    """Weights after clipped steps with settings that do not change them, and budgets."""
    found: dict[str, Any] = {}
    for name, case in DEEP.items():
        ample = boost(case)
        found[f"{name} 1f1b"] = train(case, ample)
        given = in_little(ample, directory / name) | SCHEDULES
        for setting, arguments in given.items():
            if setting == "1f1b" or f"{name} {setting}" not in SETTINGS:
                continue
            boosted = boost(case, **arguments)
            found[f"{name} {setting}"] = train(case, boosted)
            if "device_memory" in arguments:
                assert boosted.report().peak_device_bytes <= arguments["device_memory"]
        del boosted  # on a GPU its budget holds for whatever is allocated there
    write(directory, "settings", found)


def saved(directory: Path) -> None:
    """Models and runs written in stages, and read."""
    found = {}
    for name, given in SAVED.items():
        case = FAMILIES[name]
        make = functools.partial(boost, case, **given)
        found[name] = save_and_go_on(directory, name, make, functools.partial(train, case))
    write(directory, "saved", found)


def composed(directory: Path) -> None:
    """Losses on four ranks: four stages, and two with two copies or two parts of each layer."""
    rank, found = distributed.get_rank(), {}
    cases = {**DEEP, "mixtral": FAMILIES["mixtral"]}
    for key in COMPOSED:
        name, kind = key.split(" ", 1)
        case = cases[name]
        if kind == "tp 2":
            boosted = boost(case, tp_size=2)
            found[key] = train(case, boosted)
            boosted.booster.save(directory / name, boosted.model, boosted.optimizer)
            later = train(case, boosted, STEPS, 2)
            again = boost(case, tp_size=2, lazy=True)
            again.booster.load(directory / name, again.model, again.optimizer)
            assert train(case, again, STEPS, 2) == later
        elif kind == "dp 2":  # halves of the micro-batches' rows
            copies = boost(case)
            losses = []
            for seed in range(STEPS):
                half = {name: value[rank // 2 :: 2] for name, value in batch(case, seed).items()}
                losses += _train_on(copies, half)
            everyone = of_all(losses)
            assert everyone[0] == everyone[1]
            assert everyone[2] == everyone[3]
            found[key] = torch.tensor(everyone).mean(0).tolist()
            copies.booster.save(directory / f"{name}-copies", copies.model, copies.optimizer)
            later = _train_on(copies, batch(case, STEPS))
            again = boost(case)
            again.booster.load(directory / f"{name}-copies", again.model, again.optimizer)
            assert _train_on(again, batch(case, STEPS)) == later
            loader = copies.booster.plugin.prepare_dataloader(list(range(8)), 2)
            found["data"] = of_all([some.tolist() for some in loader])
        elif kind in ("pp 4", "ep 2"):
            found[key] = train(case, boost(case, **{f"{kind[:2]}_size": int(kind[3:])}))
        else:
            given = WITH_SEQUENCES[kind.removeprefix("sp 2, ")]
            found[key] = train(case, boost(case, sp_size=2, **given))
    # Whole sequences without gradients.
    data = iter([batch(DEEP["gpt2"], STEPS)])
    one = boost(DEEP["gpt2"], sp_size=2, **WITH_SEQUENCES["ring_attn"])
    with torch.no_grad():
        found["gpt2 evaluated"] = one.booster.execute_pipeline(data, one.model)["loss"].item()
    model = DEEP["gpt2"].model()
    found["gpt2 whole"] = model(**batch(DEEP["gpt2"], STEPS)).loss.item()
    data = iter([batch(DEEP["gpt2"], 0)])
    done = one.booster.execute_pipeline(data, one.model, _own_loss, one.optimizer)
    one.optimizer.zero_grad()
    found["gpt2 own loss"] = done["loss"].item()
    found["odd"] = said(
        lambda: _train_on(one, {k: x[:, 2:] for k, x in batch(DEEP["gpt2"], 0).items()})
    )
    shared = Case("shared", _with_shared_blocks, DEEP["llama"].batch)
    found["shared"] = train(shared, boost(shared, pp_size=4))
    write(directory, "composed", found)


def _with_shared_blocks() -> nn.Module:
    model: Any = llama(layers=4)
    model.model.layers[2].mlp = model.model.layers[1].mlp
    return model  # type: ignore[no-any-return]


def _with_shared_mlp() -> nn.Module:
    """Of eight blocks, the last two of which have one MLP: their stage uses it twice."""
    model: Any = llama(layers=8)
    model.model.layers[7].mlp = model.model.layers[6].mlp
    return model  # type: ignore[no-any-return]


def _with_frozen_block() -> nn.Module:
    """Of four blocks, one of which is a stage without gradients of its own."""
    model: Any = llama(layers=4)
    model.model.layers[1].requires_grad_(False)
    return model  # type: ignore[no-any-return]


def zero_bubble(directory: Path) -> None:
    """Losses of clipped steps in a V of stages, with settings that change nothing."""
    found: dict[str, Any] = {}
    steps = grids.steps(10)
    for name, case in OF_A_V.items():
        ample = boost(case, **ZERO_BUBBLE)
        found[f"{name} ample"] = train(case, ample, 0, steps)
        found[f"{name} entered"] = of_all(_least_entered(ample))
        in_turn = {"pp_style": "interleaved", "num_model_chunks": 2}
        found[f"{name} interleaved"] = train(case, boost(case, **in_turn), 0, steps)
        for setting, given in in_little(ample, directory / name).items():
            if f"{name} {setting}" not in IN_LITTLE:
                continue
            boosted = boost(case, **ZERO_BUBBLE, **given)
            found[f"{name} {setting}"] = train(case, boosted, 0, steps)
            report = boosted.report()
            assert report.divergent_steps == 0
            if "device_memory" in given:
                assert report.peak_device_bytes <= given["device_memory"]
    for precision in PRECISIONS:
        boosted = boost(DEEP["gpt2"], precision=precision, **ZERO_BUBBLE)
        found[precision] = train(DEEP["gpt2"], boosted)
    # By a function of Python's, which cannot compute a part of its gradients.
    found["tiled"] = train(DEEP["gpt2"], boost(DEEP["gpt2"], tile_logits=8, **ZERO_BUBBLE))
    write(directory, "zero_bubble", found)


def in_little(ample: Boosted, scratch: Path) -> dict[str, dict[str, Any]]:
    """Settings in half of the room that a rank's stages take, which change nothing.

    Args:
        ample: The stages with room for all, which have taken a step.
        scratch: For NVMe; is made.
    """
    tight = half_of(ample)
    scratch.mkdir(exist_ok=True, parents=True)
    return {
        "tight": {"device_memory": tight},
        "nvme": {"device_memory": tight, "nvme_path": scratch, "nvme_offload_fraction": 1.0},
        "offload": {"activations": "offload"},
        "lazy": {"lazy": True},
    }


def _least_entered(boosted: Boosted) -> float:
    """How often backward came to a module in a micro-batch, of the one to which least."""
    engine = engine_of(boosted.model)
    events = engine.session.trace()
    assert events is not None
    entered = Counter(of for kind, of, *_ in events if kind == BACKWARD_ENTER)
    trained = [
        position
        for module, position in engine.positions.items()
        if any(param.requires_grad for param in module.parameters(recurse=False))
    ]
    return min(entered[position] for position in trained) / MICROBATCHES


def composed_zero_bubble(directory: Path) -> None:
    """On four ranks: one V, two with other data, and one of divided layers; few micro-batches."""
    rank, found = distributed.get_rank(), {}
    deep = Case("llama8", lambda: llama(layers=8), FAMILIES["llama"].batch)
    for count in COUNTS:
        boosted = boost(deep, pp_size=4, num_microbatches=count, **ZERO_BUBBLE)
        found[f"pp 4, {count}"] = train(deep, boosted)
        boosted = boost(deep, pp_size=4, num_microbatches=count, pp_style="gpipe")
        found[f"gpipe, {count}"] = train(deep, boosted)
    for name in COMPOSED_V:
        case = DEEP[name]
        found[f"{name} tp 2"] = train(case, boost(case, tp_size=2, **ZERO_BUBBLE))
        copies = boost(case, **ZERO_BUBBLE)
        losses = []
        for seed in range(STEPS):
            half = {key: value[rank // 2 :: 2] for key, value in batch(case, seed).items()}
            losses += _train_on(copies, half)
        found[f"{name} dp 2"] = torch.tensor(of_all(losses)).mean(0).tolist()
        copies.booster.save(directory / name, copies.model, copies.optimizer)
        later = _train_on(copies, batch(case, STEPS))
        again = boost(case)  # without a V
        again.booster.load(directory / name, again.model, again.optimizer)
        found[f"{name} later"] = [later, _train_on(again, batch(case, STEPS))]
    write(directory, "composed_zero_bubble", found)


def _train_on(boosted: Boosted, whole: dict[str, torch.Tensor]) -> list[float]:
    given = iter([whole])
    done = boosted.booster.execute_pipeline(given, boosted.model, None, boosted.optimizer)
    boosted.optimizer.step()
    boosted.optimizer.zero_grad()
    return [done["loss"].item()]


def uses(directory: Path) -> None:
    """Evaluation, a loss of the user's own, accumulation, other precisions, other lengths."""
    found: dict[str, Any] = {}
    case = DEEP["gpt2"]
    for style, given in {
        "1f1b": {}, "interleaved": SCHEDULES["interleaved"], "zbv": ZERO_BUBBLE,
    }.items():  # fmt: skip
        last = distributed.get_rank() == (0 if style == "zbv" else 1)
        boosted = boost(case, **given)
        execute = boosted.booster.execute_pipeline
        with torch.no_grad():
            done = execute(iter([batch(case, 0)]), boosted.model, return_outputs=True)
            ids = {"input_ids": batch(case, 0)["input_ids"]}
            logits = execute(iter([ids]), boosted.model, return_loss=False, return_outputs=True)[
                "outputs"
            ]
        assert (logits is not None) == (done["outputs"] is not None) == last
        found[f"{style} evaluated"] = done["loss"].item()
        if logits:
            found[f"{style} logits"] = torch.cat([one.logits for one in logits]).tolist()
        found[f"{style} afterwards"] = train(case, boosted, 0, 2)
        # Two batches a step, of two lengths; the tied embedding's gradient counts once.
        for seed, length in ((0, 24), (1, 16)):
            cut = {name: value[:, :length] for name, value in batch(case, seed).items()}
            execute(iter([cut]), boosted.model, _own_loss, boosted.optimizer, return_loss=False)
        boosted.optimizer.step()
        found[f"{style} norm"] = boosted.report().gradient_norm
        boosted.optimizer.step()  # without a pass between: the same gradients
        found[f"{style} same norm"] = boosted.report().gradient_norm
        # Without zero_grad they go on.
        execute(iter([batch(case, 2)]), boosted.model, None, boosted.optimizer)
        boosted.optimizer.step()
        found[f"{style} more norm"] = boosted.report().gradient_norm
    for precision in PRECISIONS:
        found[precision] = train(case, boost(case, precision=precision))
    dropping = boost(gpt2_with_dropout())
    found["dropout"] = train(case, dropping, 0, 3)
    for given in (SCHEDULES["interleaved"], ZERO_BUBBLE):
        assert_goes_at_once(
            functools.partial(boost, case, **given), lambda gone: train(case, gone, 0, 1)
        )
    everyone = of_all(found)
    write(directory, "uses", everyone[0] | everyone[1])


def _own_loss(outputs: Any, part: Any) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    labels = part["labels"][:, 1:].flatten().to(logits.device)
    return nn.functional.cross_entropy(logits, labels)


_SPARSE = decoder(
    "sparse", hf.GlmMoeDsaConfig, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12, index_topk=4, index_n_heads=2,
    index_head_dim=12, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
)  # fmt: skip


def refused(directory: Path) -> None:
    """What a rank says to what does not go with stages."""
    case, rank = FAMILIES["llama"], distributed.get_rank()
    boosted = boost(case)
    whole = batch(case, 0)

    def run(given: Any, criterion: Any = None) -> str:
        execute = boosted.booster.execute_pipeline
        return said(lambda: execute(iter([given]), boosted.model, criterion, boosted.optimizer))

    found = {
        "call": said(lambda: boosted.model(**whole)),
        "block before": said(lambda: boost(_SPARSE)),
        "state_dict": said(lambda: boosted.model.state_dict()),
        "copy": said(lambda: copy.deepcopy(boosted.model)),
        "pickle": said(lambda: pickle.dumps(boosted.model)),
        "resize": said(lambda: boosted.model.resize_token_embeddings(300)),  # type: ignore[operator]
        "rows": run({name: value[:3] for name, value in whole.items()}),
        "no rows": run({name: value[:0] for name, value in whole.items()}),
        "no mapping": run(whole["input_ids"]),
        "empty": run({}),
        "inputs": run(batch(case, rank)),
        "no loss": run({"input_ids": whole["input_ids"]}),
        "gradients": _in_no_grad_on_one(run, whole),
        "criterion": run(whole, _own_loss if rank else None),
        "part": said(lambda: boosted.model.model(input_ids=whole["input_ids"])),
        "part, evaluated": _evaluated(lambda: boosted.model.model(input_ids=whole["input_ids"])),
        "layers": said(lambda: boost(case, num_layers_per_stage=[1, 2])),
        "no block": said(lambda: boost(case, num_layers_per_stage=[2, 0])),
        "blocks": said(lambda: boost(case, **SCHEDULES["interleaved"])),
        "quantised": said(lambda: boost(Case("packed", quantised, case.batch))),
        "seed": said(lambda: _lazily_seeded(rank)),
        "state": said(lambda: boost(case, optimizer=_stepped)),
        "ranks": said(lambda: boost(case, pp_size=3)),
    }
    plain_booster = castor.Booster(castor.GeminiPlugin(device="cpu", device_memory=GIB))
    for name, criterion in {
        "no scalar": lambda outputs, _: outputs.logits.mean(-1),
        "number": lambda outputs, _: outputs.loss.item(),
        "detached": lambda outputs, _: outputs.loss.detach(),
    }.items():
        boosted = boost(case)
        found[name] = run(whole, criterion)
    boosted = boost(case)
    found["whole"] = said(lambda: plain_booster.execute_pipeline(iter([whole]), case.model()))
    found["works"] = train(case, boosted, 0, 1)
    write_own(directory, "refused", found)


def _in_no_grad_on_one(run: Callable[[Any], str], whole: Any) -> str:
    with torch.set_grad_enabled(distributed.get_rank() == 0):
        return run(whole)


def _evaluated(work: Callable[[], Any]) -> str:
    with torch.no_grad():
        return said(work)


def _named_optimizer(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([(f"p{i}", param) for i, param in enumerate(params)], LR)


def _lazily_seeded(seed: int) -> None:
    case = Case("seeded", lambda: llama(), FAMILIES["llama"].batch)
    torch.manual_seed(seed)
    config = FAMILIES["llama"].model().config
    with castor.LazyInitContext():
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config)
    del case
    booster = castor.Booster(
        castor.HybridParallelPlugin(device="cpu", device_memory=GIB, pp_size=2, num_microbatches=2)
    )
    booster.boost(model, torch.optim.AdamW(model.parameters(), lr=LR))


def one_dies(directory: Path) -> None:
    """Rank 1 is killed in a phase that the environment names; the others say what they hear."""
    phase, rank = os.environ["PHASE"], distributed.get_rank()
    case = DEEP["llama"]
    given = ZERO_BUBBLE if phase == "weights" else {}
    boosted = boost(case, pp_size=distributed.get_world_size(), **given)
    train(case, boosted, 0, 1)
    if rank == 1:
        hook_in(phase, boosted, die)

    def work() -> None:
        train(case, boosted, 1, 1)
        boosted.booster.save_model(boosted.model, directory / "model")

    say_who_died(directory, work)


def one_fails(directory: Path) -> None:
    """Rank 1 raises in a phase that the environment names, and lives on, as all do."""
    phase, rank = os.environ["PHASE"], distributed.get_rank()
    case = DEEP["llama"]
    given = dict(ZERO_BUBBLE) if phase == "weights" else {}
    if neighbours := os.environ["NEIGHBOURS"]:
        given |= {neighbours: 2} | RING
    pp_size = distributed.get_world_size() // (2 if neighbours else 1)
    boosted = boost(case, pp_size=pp_size, **given)
    train(case, boosted, 0, 1)

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("no more")

    def own_loss(outputs: Any, _part: Any) -> Any:
        return outputs.loss

    criterion = own_loss if phase == "criterion" else None
    if rank == 1 and criterion:
        criterion = fail
    elif rank == 1:
        hook_in(phase, boosted, fail)

    def step() -> None:
        data = batches(case, 1, 1)
        boosted.booster.execute_pipeline(data, boosted.model, criterion, boosted.optimizer)

    said = []
    for work in (step, step, lambda: boosted.booster.save_model(boosted.model, directory / "m")):
        start = time.monotonic()
        try:
            work()
        except (castor.Error, ValueError) as error:
            said.append([type(error).__name__, str(error), time.monotonic() - start])
    write_own(directory, "one_fails", said)


if __name__ == "__main__":
    as_rank.run(globals())
