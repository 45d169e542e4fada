"""What tests of tensor parallelism run on several ranks: `python tensor_cases.py NAME DIRECTORY`.

A scenario is a function of the directory that the ranks share; rank 0 writes its findings there as
NAME.json, or each rank its own as NAME0.json, NAME1.json (rank_processes.found, found_by_each).
"""

import copy
import functools
import json
import os
import pickle
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch
import transformers as hf
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import as_rank
import castor
import grids
from castor.distributed import ModelParallelGroup
from castor.runtime.engine import engine_of
from helpers import GIB, Boosted, equal, on_device_of, without_collections
from packed_layers import Linear4bit
from zoo import CASES, LENGTH, VOCABULARY, Batch, Case, gpt2_with_dropout, tower

LR, MAX_NORM, STEPS = 1e-3, 0.5, grids.steps(10)
LOSS = 1e-5
"""How near losses are: relative, of each of so many clipped steps in fp32."""


def decoder(name: str, config: type, **settings: Any) -> Case:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    common = {key: value for key, value in (common | settings).items() if value is not None}
    return Case(
        name,
        lambda: hf.AutoModelForCausalLM.from_config(config(**common)),
        CASES["llama"].batch,
    )


def _without_kv(config: type, name: str, **settings: Any) -> Case:
    return decoder(name, config, num_key_value_heads=None, **settings)


FAMILIES = CASES | {
    case.name: case
    for case in (
        decoder("qwen3", hf.Qwen3Config, head_dim=12),
        decoder("mistral", hf.MistralConfig),
        decoder("windows", hf.MistralConfig, sliding_window=5),
        decoder("eager", hf.LlamaConfig, attn_implementation="eager"),
        decoder("gemma2", hf.Gemma2Config, head_dim=12),
        decoder("glm", hf.GlmConfig, head_dim=12),
        decoder("phi3", hf.Phi3Config),
        decoder("qwen2_moe", hf.Qwen2MoeConfig, num_experts=4, num_experts_per_tok=2,
                 moe_intermediate_size=48, shared_expert_intermediate_size=48),
        _without_kv(hf.GPTNeoXConfig, "gpt_neox", hidden_dropout=0.0, attention_dropout=0.0),
        _without_kv(hf.BloomConfig, "bloom", hidden_dropout=0.0, attention_dropout=0.0),
        _without_kv(hf.FalconConfig, "falcon", multi_query=False),
        _without_kv(hf.FalconConfig, "falcon_groups", new_decoder_architecture=True,
                    num_kv_heads=2),
        _without_kv(hf.GPTJConfig, "gptj", rotary_dim=8, attn_pdrop=0.0, resid_pdrop=0.0,
                    embd_pdrop=0.0),
    )
}  # fmt: skip
SIZES = {
    2: tuple(name for name in FAMILIES if name not in ("windows", "eager")),
    4: ("gpt2", "t5", "bert"),
}
"""Families by the number of ranks that share a layer."""
SOME_SIZES = {
    2: grids.some(SIZES[2], "vit", "mixtral", "qwen3", "falcon_groups"),
    4: grids.some(SIZES[4], "t5"),
}
"""Other families' layers are divided in CI where tokens between them are, by the same plans."""

EXPERTS = {
    case.name: case
    for case in (
        FAMILIES["mixtral"],
        FAMILIES["qwen2_moe"],
        decoder("qwen3_moe", hf.Qwen3MoeConfig, head_dim=12, num_experts=6,
                 num_experts_per_tok=2, moe_intermediate_size=48),
        decoder("olmoe", hf.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
        decoder("gpt_oss", hf.GptOssConfig, head_dim=12, num_local_experts=4,
                 num_experts_per_tok=2),
        decoder("router_loss", hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2,
                 output_router_logits=True, router_aux_loss_coef=0.1),
        decoder("grouped", hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2,
                 experts_implementation="grouped_mm"),
    )
}  # fmt: skip
"""Families with experts."""
SEQUENCES = ("llama", "qwen3", "mistral", "gemma2", "glm", "phi3", "gpt_neox", "gpt2", "opt",
             "mixtral", "windows", "eager")  # fmt: skip
"""Families whose sequences are divided."""
SOME_SEQUENCES = {
    2: grids.some(SEQUENCES, "gemma2", "opt", "mixtral"),
    4: grids.some(("llama", "gpt2"), "gpt2"),
}
GATHERED = {name: FAMILIES[name] for name in SEQUENCES} | {
    "three_heads": decoder("three_heads", hf.LlamaConfig, num_attention_heads=3,
                            num_key_value_heads=3),
    "sinks": EXPERTS["gpt_oss"],
    # Attention is given its mask by name, and a view is taken of what it gives.
    "mask_by_name": decoder("mask_by_name", hf.AfmoeConfig, head_dim=12, num_experts=4,
                             num_experts_per_tok=2, moe_intermediate_size=48, num_dense_layers=1),
}  # fmt: skip
"""Families whose ranks gather keys and values, or pass them on."""
SOME_GATHERED = {
    2: grids.some(tuple(GATHERED), "gemma2", "eager", "sinks"),
    4: grids.some(("llama", "three_heads"), "three_heads"),
}
SOME_IN_RINGS = {
    2: grids.some(tuple(GATHERED), "llama", "gemma2", "eager", "sinks"),
    4: grids.some(("llama", "gpt2", "windows", "three_heads"), "three_heads"),
}
MODES = get_args(castor.distributed.Mode)
PACKED = {2: grids.some(MODES, "all_to_all", "all_gather"), 4: grids.some(MODES, "ring_attn")}
"""How ranks meet over packed documents."""
RING: dict[str, Any] = {"sequence_parallelism_mode": "ring_attn"}
SEQUENCE_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "tiles": {"tile_logits": 8},
    "two": {"tp_size": 2},
}
SOME_SETTINGS = {2: SEQUENCE_SETTINGS, 4: grids.some(SEQUENCE_SETTINGS, "plain", "two")}
WITH_SETTINGS = grids.some(("gpt2", "llama"), "gpt2")
WITH_COPIES = grids.some(("gpt2", "llama", "mixtral"), "gpt2")
SAVED: dict[str, dict[str, Any]] = grids.some({
    "gpt2": {}, "llama": {"precision": "bf16"}, "mixtral": {}, "t5": {}, "bert": {},
}, "gpt2", "llama")  # fmt: skip
LOSSES_DIVIDED = {
    2: ("gpt2", "llama", "gemma2", "mixtral"),
    4: grids.some(("gpt2", "llama", "gemma2", "mixtral"), "llama"),
}
"""Families whose losses are divided like the vocabulary, by the number of ranks."""


def boost(
    case: Case, size: int = 1, *, lazy: bool = False, optimizer: Any = None, **settings: Any
) -> Boosted:
    """A model among `size` ranks; 1: as GeminiPlugin has it."""
    if lazy:
        with castor.LazyInitContext():
            model = case.model()
    else:
        model = case.model()
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    else:
        optimizer = optimizer(model.parameters())
    settings = {
        "device": "cpu", "device_memory": GIB, "host_memory": GIB, "precision": "fp32",
        "max_norm": MAX_NORM, "activations": "keep",
    } | settings  # fmt: skip
    booster = castor.Booster(plugin=castor.HybridParallelPlugin(tp_size=size, **settings))
    booster.boost(model, optimizer)
    return Boosted(booster, model, optimizer)


def train(
    case: Case, boosted: Boosted, first: int = 0, steps: int = STEPS, *, share: int = 0, of: int = 1
) -> list[float]:
    """Losses; `share` of `of`: which rows of the batches."""
    losses = []
    for seed in range(first, first + steps):
        batch = {key: value[share::of] for key, value in case.batch(seed).items()}
        losses.append(boosted.step(case.loss(boosted.model(**batch), batch)))
    return losses


Batches = Callable[[Case, int], dict[str, torch.Tensor]]


@functools.cache
def plain(case: Case, steps: int = STEPS, *, batch: Batches | None = None) -> list[float]:
    """Losses of plain PyTorch; `batch`: another one than the case's, whose loss is the model's."""
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for seed in range(steps):
        given = case.batch(seed) if batch is None else batch(case, seed)
        outputs = model(**given)
        loss = case.loss(outputs, given) if batch is None else outputs.loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accumulated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    loss_of: Callable[[Any, Batch], torch.Tensor] = lambda outputs, _: outputs.loss,
) -> list[float]:
    """Losses of plain PyTorch, which accumulates the gradients of each step's micro-batches."""
    losses = []
    for parts in steps:
        total = 0.0
        for part in parts:
            loss = loss_of(model(**part), part) / len(parts)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def half_of(ample: Boosted) -> int:
    """A budget that holds half of a rank's parameters, of a model that has trained with room."""
    own = sum(param.nbytes for param in ample.model.parameters())
    return int(ample.report().peak_nonmodel_bytes + 0.5 * own)


def save_and_go_on(
    directory: Path,
    name: str,
    make: Callable[..., Boosted],
    train: Callable[[Boosted, int, int], list[float]],
) -> list[float]:
    """Writes a model, before its first step and after three, and its run; goes on with both.

    Returns:
        Losses of the three steps after the save; another model that has read the run has the same.
    """
    boosted = make()
    boosted.booster.save_model(boosted.model, directory / f"{name}-fresh")
    train(boosted, 0, 3)
    boosted.booster.save(directory / name, boosted.model, boosted.optimizer)
    boosted.booster.save_model(boosted.model, directory / f"{name}-model")
    later = train(boosted, 3, 3)
    again = make(lazy=True)
    train(again, 7, 1)
    assert again.booster.load(directory / name, again.model, again.optimizer).step == 3
    assert train(again, 3, 3) == later
    again.booster.load_model(again.model, directory / f"{name}-model")
    boosted.booster.load(directory / name, boosted.model, boosted.optimizer)
    mine, theirs = (list(one.model.parameters()) for one in (again, boosted))
    assert all(map(equal, mine, theirs))
    return later


def assert_goes_at_once(make: Callable[[], Boosted], use: Callable[[Boosted], Any]) -> None:
    """A model that nobody holds goes without the garbage collector."""
    with without_collections():
        gone = make()
        use(gone)
        held = weakref.ref(gone.model)
        del gone
        assert held() is None


def hook_in(
    phase: str, boosted: Boosted, work: Callable[..., Any], block: str = "DecoderLayer"
) -> None:
    """Has `work` called in a phase of the next step of a rank's first block, or of a save."""
    blocks = (one for one in boosted.model.modules() if block in type(one).__name__)
    first = next(blocks)
    if phase == "forward":
        first.register_forward_pre_hook(work)
    elif phase == "backward":
        first.register_full_backward_hook(work)
    elif phase == "weights":
        next(first.parameters()).register_hook(work)
    elif phase == "step":
        boosted.optimizer.step = work  # type: ignore[method-assign]
    else:
        assert phase == "save", phase
        boosted.booster.save_model = work  # type: ignore[method-assign]


def families(directory: Path) -> None:
    """Losses of every family among all ranks."""
    found = {}
    for name in SOME_SIZES[distributed.get_world_size()]:
        case = FAMILIES[name]
        boosted = boost(case, distributed.get_world_size())
        mine = train(case, boosted)
        own = sum(param.numel() for param in boosted.model.parameters())
        whole = sum(param.numel() for param in case.model().parameters())
        found[name] = [mine, own / whole]
        assert of_all(mine) == [mine] * distributed.get_world_size()
    write(directory, "families", found)


def settings(directory: Path) -> None:
    """Losses of GPT-2 and Llama with settings that do not change them, and budgets."""
    size = distributed.get_world_size()
    found: dict[str, Any] = {}
    for name in WITH_SETTINGS:
        case = FAMILIES[name]
        ample = boost(case, size)
        found[name] = [train(case, ample)]
        for given in (
            {"device_memory": half_of(ample)},
            {"overlap": "forward"},
            {"activations": "recompute"},
            {"activations": "offload"},
            {"lazy": True},
        ):
            boosted = boost(case, size, **given)  # type: ignore[arg-type]
            found[name].append(train(case, boosted))
            if "device_memory" in given:
                assert boosted.report().peak_device_bytes <= given["device_memory"]
        for precision, state_format in (("bf16", "split"), ("bf16", "split_bf16"), ("fp16", None)):
            boosted = boost(case, size, precision=precision, optim_state_format=state_format)
            found[f"{name} {precision} {state_format}"] = train(case, boosted)
    write(directory, "settings", found)


def data_too(directory: Path) -> None:
    """Two ranks a layer, two copies of the model with half of the batch each."""
    rank, found = distributed.get_rank(), {}
    for name in WITH_COPIES:
        case = FAMILIES[name]
        boosted = boost(case, 2)
        losses = torch.tensor(train(case, boosted, share=rank // 2, of=2))
        everyone = of_all(losses.tolist())
        assert everyone[0] == everyone[1]
        assert everyone[2] == everyone[3]
        found[name] = [(a + b) / 2 for a, b in zip(everyone[0], everyone[2], strict=True)]
        loader = boosted.booster.plugin.prepare_dataloader(list(range(8)), 2)
        found[f"{name} data"] = of_all([batch.tolist() for batch in loader])
        boosted.booster.save(directory / name, boosted.model, boosted.optimizer)
        found[f"{name} later"] = train(case, boosted, STEPS, 2)
        again = boost(case, 2, lazy=True)
        again.booster.load(directory / name, again.model, again.optimizer)
        assert train(case, again, STEPS, 2) == found[f"{name} later"]
    write(directory, "data_too", found)


def saved(directory: Path) -> None:
    """Models and runs written among two ranks, and read."""
    found = {}
    for name, given in SAVED.items():
        case = FAMILIES[name]
        make = functools.partial(boost, case, 2, **given)
        found[name] = save_and_go_on(directory, name, make, functools.partial(train, case))
    write(directory, "saved", found)


def loaded(directory: Path) -> None:
    """Goes on with what one process has written."""
    case = FAMILIES["llama"]
    boosted = boost(case, 2)
    boosted.booster.load(directory / "run", boosted.model, boosted.optimizer)
    losses = train(case, boosted, 3, 3)
    boosted.booster.load(directory / "run", boosted.model, boosted.optimizer)
    boosted.booster.save(directory / "again", boosted.model, boosted.optimizer)
    write(directory, "loaded", losses)


def uses(directory: Path) -> None:
    """What else is done with a model: generate, evaluation, accumulation."""
    case, found = FAMILIES["llama"], {}
    boosted = boost(case, 2)
    ids = on_device_of(boosted, case.batch(0))["input_ids"]
    found["generated"] = boosted.model.generate(  # type: ignore[operator]
        ids, max_new_tokens=8, do_sample=False, pad_token_id=0
    ).tolist()
    with torch.no_grad():
        found["logits"] = boosted.model(input_ids=ids).logits.double().tolist()
    for seed in range(2):
        loss = case.loss(boosted.model(**case.batch(seed)), case.batch(seed)) / 2
        with boosted.booster.no_sync(boosted.model):
            boosted.booster.backward(loss, boosted.optimizer)
    boosted.optimizer.step()
    found["norm"] = boosted.report().gradient_norm
    eager, given = FAMILIES["eager"], FAMILIES["eager"].batch(0) | {"output_attentions": True}
    expected = eager.model()(**given).attentions
    attentions = boost(eager, 2).model(**given).attentions
    found["attentions"] = [
        torch.allclose(*both, atol=1e-5) for both in zip(attentions, expected, strict=True)
    ]
    found["sums"] = _sums(case), _sums(FAMILIES["gpt2"])
    for given in ({"size": 2}, {"sp_size": 2}):
        assert_goes_at_once(
            functools.partial(boost, case, **given),  # type: ignore[arg-type]
            lambda gone: (train(case, gone, 0, 1), gone.model(**case.batch(0))),
        )
    # What every rank has draws the same dropout.
    model, dropping = gpt2_with_dropout().model(), gpt2_with_dropout()
    torch.manual_seed(distributed.get_rank())
    booster = castor.Booster(plugin=boosted.booster.plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    booster.boost(model, optimizer)
    losses = train(dropping, Boosted(booster, model, optimizer), 0, 3)
    assert of_all(losses) == [losses, losses]
    torch.rand(1 + distributed.get_rank())  # as by a loader that one rank has for itself
    losses = train(dropping, Boosted(booster, model, optimizer), 3, 3)
    assert of_all(losses) == [losses, losses]
    write(directory, "uses", found)


def _sums(case: Case) -> list[int]:
    """Of hidden states, in a forward pass and in a backward pass."""
    boosted, sums = boost(case, 2), []
    total = ModelParallelGroup.all_reduce

    def counted(ranks: ModelParallelGroup, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim > 2:
            sums.append(tensor)
        return total(ranks, tensor)

    ModelParallelGroup.all_reduce = counted  # type: ignore[method-assign]
    loss = case.loss(boosted.model(**case.batch(0)), case.batch(0))
    forward = len(sums)
    boosted.booster.backward(loss, boosted.optimizer)
    ModelParallelGroup.all_reduce = total  # type: ignore[method-assign]
    return [forward, len(sums) - forward]


def quantised() -> Any:
    model: Any = FAMILIES["llama"].model()
    attention = model.model.layers[1].self_attn
    attention.q_proj = Linear4bit(attention.q_proj)
    return model


def refused(directory: Path) -> None:
    """What a rank says to what does not go with parts."""
    case, rank = FAMILIES["llama"], distributed.get_rank()
    boosted = boost(case, 2)
    batch = case.batch(rank)
    found = {
        "copy": said(lambda: copy.deepcopy(boosted.model)),
        "pickle": said(lambda: pickle.dumps(boosted.model)),
        "state_dict": said(lambda: boosted.model.state_dict()),
        "resize": said(lambda: boosted.model.resize_token_embeddings(300)),  # type: ignore[operator]
        "inputs": said(lambda: boosted.model(**batch)),
        "places": said(_one_saves(boosted, directory)),
        "tokens": said(lambda: boosted.model(input_ids=case.batch(0)["input_ids"] + VOCABULARY)),
        "no token": said(lambda: boosted.model(input_ids=case.batch(0)["input_ids"] - VOCABULARY)),
        "labels": said(lambda: _with_labels_of_others(case)),
        "ranks": said(lambda: boost(case, 3)),
        "heads": said(lambda: boost(decoder("odd", hf.LlamaConfig, num_attention_heads=3), 2)),
        "key heads": said(
            lambda: boost(
                decoder("odd", hf.LlamaConfig, num_attention_heads=6, num_key_value_heads=3), 2
            )
        ),
        "alibi": said(
            lambda: boost(_without_kv(hf.FalconConfig, "a", multi_query=False, alibi=True), 2)
        ),
        "no plan": said(lambda: boost(Case("tower", tower, case.batch), 2)),
        "unknown name": said(lambda: boost(case, 2, tp_plan={"model.layer.*": "colwise"})),
        "unknown style": said(lambda: boost(case, 2, tp_plan={"lm_head": "diagonal"})),
        "wrong module": said(lambda: boost(case, 2, tp_plan={"model.norm": "colwise"})),
        "quantised": said(lambda: boost(Case("packed", quantised, case.batch), 2)),
        "muon": said(lambda: boost(case, 2, optimizer=lambda p: torch.optim.RMSprop(p, lr=0.1))),
        "state": said(lambda: boost(case, 2, optimizer=_stepped)),
        "int8": said(lambda: boost(case, 2, precision="bf16", optim_state_format="split_int8")),
        "models": said(lambda: boost(FAMILIES["llama" if rank else "mistral"], 2, max_norm=rank)),
    }
    # The model works on after each of them.
    found["works"] = train(case, boosted, 0, 1)
    write_own(directory, "refused", found)


def _with_labels_of_others(case: Case) -> None:
    labels = case.batch(0)["labels"].clone()
    labels[0, 5] = VOCABULARY
    divided = boost(case, 2, parallel_output=True)
    divided.model(input_ids=case.batch(0)["input_ids"], labels=labels)


def _one_saves(boosted: Boosted, directory: Path) -> Callable[[], Any]:
    """Rank 1 is out of batches, and saves; rank 0 goes on."""
    if distributed.get_rank():
        return lambda: boosted.booster.save_model(boosted.model, directory / "early")
    return lambda: boosted.model(**FAMILIES["llama"].batch(0))


def edits(directory: Path) -> None:
    """What a step says to gradients that were edited before it, and to those that may be."""
    found = {}
    for name, size, settings in (("llama", 2, {}), ("mixtral", 1, {"ep_size": 2})):
        case = FAMILIES[name]
        boosted = boost(case, size, max_norm=0.0, **settings)
        batch = case.batch(0)
        for param in boosted.model.parameters():
            param.register_hook(lambda grad: 0.5 * grad)
        boosted.booster.backward(boosted.model(**batch).loss, boosted.optimizer)
        for param in boosted.model.parameters():
            param.grad = 2 * param.grad
        boosted.optimizer.step()
        boosted.model.zero_grad(set_to_none=False)
        boosted.booster.backward(boosted.model(**batch).loss, boosted.optimizer)
        nn.utils.clip_grad_norm_(boosted.model.parameters(), MAX_NORM)
        found[f"clipped {name}"] = said(boosted.optimizer.step)
        boosted.optimizer.zero_grad()
        boosted.step(boosted.model(**batch).loss)
    boosted = boost(FAMILIES["llama"], max_norm=0.0, sp_size=2)
    boosted.booster.backward(boosted.model(**FAMILIES["llama"].batch(0)).loss, boosted.optimizer)
    nn.utils.clip_grad_norm_(boosted.model.parameters(), MAX_NORM)
    found["clipped whole gradients"] = said(boosted.optimizer.step)
    write_own(directory, "edits", found)


def padded(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """A batch whose second row ends early, and whose first tokens have no labels."""
    batch = case.batch(seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, LENGTH - 5 - seed % 3 :] = 0
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


def padded_in_front(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """A batch whose rows begin with padding, of other lengths."""
    batch = case.batch(seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :2] = 0
    mask[1, : 5 + seed % 3] = 0
    labels = batch["input_ids"].masked_fill(mask == 0, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


def begun_behind_padding(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """... whose first token is no label of the padding before it."""
    batch = padded_in_front(case, seed)
    labels = batch["labels"].masked_fill(batch["attention_mask"].roll(1, 1) == 0, -100)
    return batch | {"labels": labels}


def divided_sequences(directory: Path) -> None:
    """Losses of families whose ranks divide sequences, by how ranks meet."""
    found = {"heads": _sequences(), "keys": _gathered_sequences(), "rings": _ring_sequences()}
    write(directory, "divided_sequences", found)


def _sequences() -> dict[str, Any]:
    """Losses of families whose ranks exchange heads for tokens."""
    size = distributed.get_world_size()
    found = {}
    for name in SOME_SEQUENCES[size]:
        case = FAMILIES[name]
        boosted = boost(case, sp_size=size)
        losses = [boosted.step(boosted.model(**padded(case, seed)).loss) for seed in range(STEPS)]
        assert of_all(losses) == [losses] * size
        found[name] = losses
    if size == 2:
        case = FAMILIES["opt"]
        boosted = boost(case, sp_size=2)
        found["in front"] = [
            boosted.step(boosted.model(**padded_in_front(case, seed)).loss) for seed in range(STEPS)
        ]
    return found


def _gathered_sequences() -> dict[str, Any]:
    """... whose ranks gather keys and values: heads need not be divided."""
    size, found = distributed.get_world_size(), {}
    for name in SOME_GATHERED[size]:
        case = GATHERED[name]
        for given in ({}, {"activations": "recompute"}):
            boosted = boost(case, sp_size=size, sequence_parallelism_mode="all_gather", **given)  # type: ignore[arg-type]
            losses = [
                boosted.step(boosted.model(**padded(case, seed)).loss) for seed in range(STEPS)
            ]
            assert of_all(losses) == [losses] * size
            assert found.setdefault(name, losses) == losses
    case = GATHERED["sinks" if size == 2 else "three_heads"]
    unpadded = boost(case, sp_size=size, sequence_parallelism_mode="all_gather")
    found["unpadded"] = train(case, unpadded, 0, 3)
    return found


def packed(case: Case, seed: int) -> dict[str, Any]:
    """A batch whose first row is three documents, and whose second is two."""
    batch = case.batch(seed)
    positions = torch.arange(LENGTH).repeat(2, 1)
    for row, begin in ((0, 5), (0, 14), (1, 9 + seed % 3)):
        positions[row, begin:] = torch.arange(LENGTH - begin)
    return batch | {"position_ids": positions, "use_cache": False}


def _ring_sequences() -> dict[str, Any]:
    """... among whom keys and values travel."""
    size = distributed.get_world_size()
    found: dict[str, Any] = {"padded": {}, "packed": {}}

    def losses_of(case: Case, batches: Batches, steps: int = STEPS, **given: Any) -> list[float]:
        boosted = boost(case, **({"sp_size": size} | RING | given))
        losses = [boosted.step(boosted.model(**batches(case, seed)).loss) for seed in range(steps)]
        assert of_all(losses) == [losses] * size
        return losses

    for name in SOME_IN_RINGS[size]:
        found["padded"][name] = losses_of(GATHERED[name], padded)
    for mode in PACKED[size]:
        given = {"sequence_parallelism_mode": mode}
        found["packed"][mode] = losses_of(FAMILIES["windows"], packed, **given)
    llama = FAMILIES["llama"]
    ample = boost(llama, sp_size=size, **RING)
    found["unpadded"] = train(llama, ample)
    if size == 2 or grids.WHOLE:
        tight = half_of(ample)
        boosted = boost(llama, sp_size=size, device_memory=tight, **RING)
        assert train(llama, boosted) == found["unpadded"]
        assert boosted.report().peak_device_bytes <= tight
    if size == 4:
        found["copies"] = _with_copies(llama, 2, sp_size=2, **RING)
        found["layers too"] = _with_copies(llama, 4, size=2, sp_size=2, **RING)
        return found
    # Blocks recomputed, or kept elsewhere, have the same bits; with dropout they draw the same.
    dropout = gpt2_with_dropout()
    for case in grids.some((FAMILIES["windows"], dropout), dropout):
        kept = losses_of(case, padded, 4)
        for where in ("recompute", "offload"):
            assert losses_of(case, padded, 4, activations=where) == kept
    found["dropout"] = kept
    os.environ["CASTOR_RANK_LINK"] = "group"
    assert losses_of(llama, padded, 4) == found["padded"]["llama"][:4]
    del os.environ["CASTOR_RANK_LINK"]
    # A loss of the user's own, over logits; and a whole forward between.
    boosted, losses = boost(llama, sp_size=2, **RING), []
    for seed in range(3):
        batch = llama.batch(seed)
        logits = boosted.model(input_ids=batch["input_ids"]).logits
        losses.append(boosted.step(_own_loss(logits, batch["labels"])))
        with torch.no_grad():
            boosted.model(input_ids=batch["input_ids"])
    found["own loss"] = losses
    parts = boost(llama, sp_size=2, num_microbatches=2, **RING)
    done = parts.booster.execute_pipeline(
        iter([llama.batch(0)]),
        parts.model,
        lambda outputs, part: _own_loss(outputs.logits, part["labels"]),
        parts.optimizer,
    )
    found["criterion"] = done["loss"].item()
    found["hidden"] = [_hidden_states_are_all_tokens(mode) for mode in MODES]
    found["lengths"] = _lengths()
    return found


def _hidden_states_are_all_tokens(mode: str) -> bool:
    """Whether hidden states of a forward with gradients are those of one without."""
    boosted = boost(FAMILIES["llama"], sp_size=2, sequence_parallelism_mode=mode)
    given = FAMILIES["llama"].batch(0) | {"output_hidden_states": True}
    own = boosted.model(**given).hidden_states
    with torch.no_grad():
        full = boosted.model(**given).hidden_states
    assert len(own) == len(full) == 3
    return all(torch.allclose(*both, atol=1e-5) for both in zip(own, full, strict=True))


def _with_copies(case: Case, sharing: int, **given: Any) -> list[float]:
    """Mean losses of copies of the model, each of `sharing` ranks with its share of the batch."""
    copies, mine = distributed.get_world_size() // sharing, distributed.get_rank() // sharing
    losses = train(case, boost(case, **given), share=mine, of=copies)
    return torch.tensor(of_all(losses)).mean(0).tolist()


class _Lengths(TorchDispatchMode):
    """Shapes of all floating-point tensors that operators give."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        self.found |= {
            tuple(one.shape)
            for one in tree_leaves(given)
            if isinstance(one, torch.Tensor) and one.is_floating_point()
        }
        return given


def _lengths(length: int = 56) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of a step that have the number of all tokens, by how ranks meet."""
    ids = torch.randint(3, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    found = {}
    for name, given in (
        ("all_gather", {}),
        ("ring_attn", {}),
        ("padded", {"attention_mask": mask}),
    ):
        mode = "all_gather" if name == "all_gather" else "ring_attn"
        boosted = boost(
            FAMILIES["llama"], sp_size=2, sequence_parallelism_mode=mode, tile_logits=False
        )
        with _Lengths() as lengths:
            boosted.step(boosted.model(input_ids=ids, labels=ids, **given).loss)
        found[name] = [shape for shape in lengths.found if length in shape]
    return found


def sequence_settings(directory: Path) -> None:
    """Losses of Llama with settings, whole forwards between, and two kinds of parallelism."""
    case, found = FAMILIES["llama"], {}
    ids = case.batch(0)["input_ids"]
    for name, given in SOME_SETTINGS[distributed.get_world_size()].items():
        if distributed.get_world_size() % (given.get("tp_size", 1) * 2):
            continue
        sharing = 2 * given.pop("tp_size", 1)
        copies, mine = distributed.get_world_size() // sharing, distributed.get_rank() // sharing
        boosted = boost(case, sharing // 2, sp_size=2, **given)
        losses = []
        for seed in range(STEPS):
            batch = {key: value[mine::copies] for key, value in case.batch(seed).items()}
            losses.append(boosted.step(case.loss(boosted.model(**batch), batch)))
            with torch.no_grad():
                boosted.model(input_ids=ids)
        found[name] = (torch.tensor(of_all(losses)).mean(0)).tolist()
        if name == "plain":
            generated = boosted.model.generate(  # type: ignore[operator]
                ids.to(engine_of(boosted.model).device),
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
            )
            found["generated"] = generated.tolist()
            boosted.booster.save_model(boosted.model, directory / "model")
            pickled = pickle.dumps(copy.deepcopy(boosted.model))
            if distributed.get_rank() == 0:
                (directory / "pickled").write_bytes(pickled)
    # A loss of the user's own, over logits.
    boosted = boost(case, sp_size=2)
    losses = []
    for seed in range(3):
        batch = case.batch(seed)
        logits = boosted.model(input_ids=batch["input_ids"]).logits
        losses.append(boosted.step(_own_loss(logits, batch["labels"])))
    found["own loss"] = losses
    write(directory, "sequence_settings", found)


def activation_bytes(directory: Path) -> None:
    """Peaks of what is not the model, of long sequences, by how they are divided."""
    found = {}
    case = decoder("long", hf.LlamaConfig, max_position_embeddings=256)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, 256), generator=generator)
    for name, sizes in {
        "whole": {}, "sequences": {"sp_size": 2}, "ring": {"sp_size": 2} | RING,
        "layers": {"size": 2},
        "loss too": {"size": 2, "parallel_output": True},
    }.items():  # fmt: skip
        boosted = boost(case, tile_logits=False, **sizes)  # type: ignore[arg-type]
        for _ in range(2):
            boosted.step(boosted.model(input_ids=ids, labels=ids).loss)
        found[name] = boosted.report().peak_nonmodel_bytes
    write(directory, "activation_bytes", found)


def vocab_parallel_loss(directory: Path) -> None:
    """Losses of causal models, of which nobody has all logits."""
    found: dict[str, Any] = {}
    size = distributed.get_world_size()
    for name in LOSSES_DIVIDED[size]:
        case = FAMILIES[name]
        boosted = boost(case, 2, sp_size=size // 2, parallel_output=True)
        assert boosted.model(**padded(case, 0)).logits is None
        losses = [boosted.step(boosted.model(**padded(case, seed)).loss) for seed in range(STEPS)]
        assert of_all(losses) == [losses] * size
        found[name] = losses
    ids = padded(case, 0)["input_ids"]
    with torch.no_grad():
        found["logits"] = list(boosted.model(input_ids=ids).logits.shape)
    reduced = boost(FAMILIES["llama"], 2, parallel_output=True, precision="bf16")
    found["llama bf16"] = [
        reduced.step(reduced.model(**padded(FAMILIES["llama"], seed)).loss) for seed in range(STEPS)
    ]
    # A criterion is given all logits, and the model's own loss beside.
    case, stages = FAMILIES["llama"], {"num_microbatches": 2, "pp_size": size // 2}
    boosted = boost(case, 2, parallel_output=True, **stages)
    found["criterion"] = []
    for seed in range(3):
        done = boosted.booster.execute_pipeline(
            iter([case.batch(seed)]), boosted.model, _half_own_loss, boosted.optimizer
        )
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        found["criterion"].append(done["loss"].item())
    found["bert"] = said(lambda: boost(FAMILIES["bert"], 2, parallel_output=True))
    found["no head"] = said(
        lambda: boost(FAMILIES["llama"], 2, parallel_output=True,
                      tp_plan={"model.layers.*.mlp.down_proj": "rowwise_split_input"})
    )  # fmt: skip
    write(directory, "vocab_parallel_loss", found)


def _own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _half_own_loss(outputs: Any, part: Batch) -> torch.Tensor:
    return (outputs.loss + _own_loss(outputs.logits, part["labels"])) / 2


def sequences_refused(directory: Path) -> None:
    """What cannot be divided."""
    rank = distributed.get_rank()
    llama = FAMILIES["llama"]
    batch = llama.batch(0)
    boosted = boost(llama, sp_size=2)
    ids = batch["input_ids"]
    found = {
        name: said(lambda name=name: boost(FAMILIES[name], sp_size=2))  # type: ignore[misc]
        for name in ("t5", "bert", "bloom", "falcon", "vit")
    }
    found |= {
        "odd": said(lambda: boosted.model(input_ids=ids[:, :-1], labels=ids[:, :-1])),
        "packed": said(lambda: boosted.model(**packed(llama, 0) | {"use_cache": True})),
        "positions": said(lambda: boosted.model(**batch, position_ids=ids[None])),
        "mask": said(lambda: boosted.model(**batch, attention_mask=ids[:, None, None] > 0)),
        "argument": said(lambda: boosted.model(**batch, kept_tokens=ids)),
        "attentions": said(lambda: boosted.model(**batch, output_attentions=True)),
        "inputs": said(lambda: boosted.model(**llama.batch(rank))),
        "part": said(lambda: boosted.model.model(input_ids=ids)),
        "saves": said(_one_saves(boosted, directory)),
        "steps": said(
            boosted.optimizer.step if rank else lambda: boosted.model(**llama.batch(0))
        ),
        "heads": said(
            lambda: boost(
                decoder("three", hf.LlamaConfig, num_attention_heads=3, num_key_value_heads=3,
                         hidden_size=48), sp_size=2)
        ),
        "of a part": _of_a_part(boosted, ids),
        "conv": said(
            lambda: boost(
                decoder("conv", hf.Lfm2Config, layer_types=["conv", "full_attention"]), sp_size=2)
        ),
        "roberta": said(
            lambda: boost(_without_kv(hf.RobertaConfig, "roberta", is_decoder=True), sp_size=2)
        ),
        "mode": said(lambda: boost(llama, sp_size=2, sequence_parallelism_mode="ring")),
        "works": [boosted.step(boosted.model(**batch).loss)],
    }  # fmt: skip
    boosted = boost(llama, sp_size=2, **RING)
    found["of a part, ring"] = _of_a_part(boosted, ids)
    found["pieces"] = said(lambda: boosted.model(**{name: x[:, 2:] for name, x in batch.items()}))
    attention: Any = boosted.model.model.layers[1].self_attn  # type: ignore[union-attr, index]
    with _extra(attention, position_bias=ids):
        found["bias"] = said(lambda: boosted.model(**batch))
    with _extra(attention, tilt=0.5):
        found["option"] = said(lambda: boosted.model(**batch))
    with _extra(attention, attention_mask=torch.zeros(2, 1, 12, 12)):
        found["own mask"] = said(lambda: boosted.model(**batch))
    found["ring works"] = [boosted.step(boosted.model(**batch).loss)]
    eager = boost(FAMILIES["eager"], sp_size=2, **RING)
    found["blind"] = said(lambda: eager.model(**padded_in_front(llama, 0)))
    found["blind, own loss"] = said(
        lambda: eager.model(**padded_in_front(llama, 0) | {"labels": None})
    )
    found["blind, ignored"] = [eager.step(eager.model(**begun_behind_padding(llama, 0)).loss)]
    # Its model is what it was: with other attention it is boosted.
    model: Any = decoder("flex", hf.LlamaConfig, attn_implementation="flex_attention").model()
    flex = Case("flex", lambda: model, llama.batch)
    found["attention"] = said(lambda: boost(flex, sp_size=2))
    model.set_attn_implementation("sdpa")
    boosted = boost(flex, sp_size=2)
    found["other attention"] = [boosted.step(boosted.model(**batch).loss)]
    write_own(directory, "sequences_refused", found)


def _of_a_part(boosted: Boosted, ids: torch.Tensor) -> list[Any]:
    with torch.no_grad():
        return boosted.model.model(input_ids=ids).last_hidden_state.tolist()


@contextmanager
def _extra(module: nn.Module, **given: Any) -> Iterator[None]:
    """In it a module is called with more, or something else."""
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | given), with_kwargs=True
    )
    try:
        yield
    finally:
        hook.remove()


def one_dies(directory: Path) -> None:
    """Rank 1 is killed in a phase that the environment names; rank 0 says what it hears."""
    kind, phase = os.environ["KIND"], os.environ["PHASE"]
    case = FAMILIES["llama"]
    sizes: dict[str, Any] = {
        "tp_size": {"size": 2}, "sp_size": {"sp_size": 2}, "ring_attn": {"sp_size": 2} | RING,
        "split_gather": {"size": 2, "sequence_parallelism_mode": "split_gather"},
    }  # fmt: skip
    boosted = boost(case, **sizes[kind])
    train(case, boosted, 0, 1)
    if distributed.get_rank() == 1:
        hook_in(phase, boosted, die)

    def work() -> None:
        train(case, boosted, 1, 1)
        boosted.booster.save_model(boosted.model, directory / "model")

    say_who_died(directory, work)


def die(*_: Any, **__: Any) -> None:
    """Where this rank is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def say_who_died(directory: Path, work: Callable[[], Any]) -> NoReturn:
    """What a rank hears of another that dies meanwhile, and after how many seconds: its end."""
    start = time.monotonic()
    try:
        work()
    except castor.Error as error:
        write_own(directory, "one_dies", [str(error), time.monotonic() - start])
    sys.stdout.flush()
    os._exit(0)  # there is nobody to meet at the end


def own_plan(directory: Path) -> None:
    """A model of nobody's, with a plan of the user's."""
    case = Case("tower", tower, lambda seed: {"seed": seed})
    plan = {
        "layers.0": "colwise", "layers.1": "rowwise", "layers.2": "colwise_gather_output",
        "layers.3": "rowwise_split_input",
    }  # fmt: skip
    losses = {}
    for size, given in ((1, None), (2, plan)):
        boosted = boost(case, size, tp_plan=given)
        generator = torch.Generator().manual_seed(3)
        losses[size] = []
        for _ in range(STEPS):
            x = torch.randn((4, 32), generator=generator)
            labels = torch.randint(0, 4, (4,), generator=generator)
            losses[size].append(boosted.step(boosted.model(x, labels=labels)))
    write(directory, "own_plan", list(losses.values()))


def _stepped(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=LR)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return optimizer


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def of_all(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, value)
    return everyone


def write(directory: Path, name: str, found: Any) -> None:
    if distributed.get_rank() == 0:
        (directory / f"{name}.json").write_text(json.dumps(found))


def write_own(directory: Path, name: str, found: Any) -> None:
    (directory / f"{name}{distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    as_rank.run(globals())
