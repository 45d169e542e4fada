"""What tests of calls of models in stages run on several ranks; as pipeline_cases.py."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import StaticCache

import castor
import grids
import pipeline_cases
from helpers import Boosted, device_of
from pipeline_cases import (
    DEEP,
    SCHEDULES,
    SOME_WITH_STAGES,
    STAGED,
    ZERO_BUBBLE,
    batch,
    boost,
)
from simulated import compute_as_asked
from tensor_cases import FAMILIES, of_all, said, write, write_own
from zoo import Case

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "in chunks": {"prefill_chunk_size": 4},
}
STYLES: dict[str, dict[str, Any]] = {
    "1f1b": {}, "interleaved": SCHEDULES["interleaved"], "zbv": ZERO_BUBBLE,
}  # fmt: skip
CALLED = grids.some(
    tuple(f"{name} {style}" for name in DEEP for style in STYLES),
    *("llama 1f1b", "llama interleaved", "gpt2 zbv"),
)
GENERATED = grids.some(
    tuple(f"{called} {way}" for called in CALLED for way in WAYS),
    *(f"llama 1f1b {way}" for way in WAYS),
    *("llama interleaved beams", "gpt2 zbv greedy", "gpt2 zbv sampled", "gpt2 zbv beams"),
)
KINDS: dict[str, dict[str, Any]] = {
    "pp 4": {"pp_size": 4},
    "tp 2": {"tp_size": 2},
    "loss": {"tp_size": 2, "parallel_output": True},
    "sp 2": {"sp_size": 2},
    "dp 2": {},
}
COMPOSED = grids.some(
    tuple(f"{name} {kind}" for name in DEEP for kind in KINDS),
    *("gpt2 pp 4", *(f"llama {kind}" for kind in ("loss", "sp 2", "dp 2"))),
)
TIGHT = grids.some(tuple(DEEP), "gpt2")
PROMPT = 9
GENERATING = tuple(name for name in SOME_WITH_STAGES if name not in ("bert", "vit"))


def prompts(case: Case) -> dict[str, torch.Tensor]:
    """Two, the second padded on the left."""
    ids = batch(case, 0)["input_ids"][:2, :PROMPT].clone()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, case: Case, **how: Any) -> list[list[int]]:
    """Some tokens; they do not end early."""
    torch.manual_seed(3)
    settings = {"do_sample": False, "min_new_tokens": 7, "max_new_tokens": 7, "pad_token_id": 0}
    given = {name: of.to(device_of(model)) for name, of in prompts(case).items()}
    tokens: torch.Tensor = model.generate(**given, **settings | how)
    return tokens.tolist()


def families(directory: Path) -> None:
    """Each, greedily."""
    found = {}
    for name in GENERATING:
        boosted = boost(STAGED[name])
        found[name] = of_all(generate(boosted.model, STAGED[name]))
    write(directory, "families", found)


def ways(directory: Path) -> None:
    """Ways to generate, schedules, and calls of a user's."""
    found: dict[str, Any] = {}
    for called in CALLED:
        name, style = called.split()
        case = DEEP[name]
        boosted = boost(case, **STYLES[style])
        boosted.model.eval()
        for way, how in WAYS.items():
            if f"{called} {way}" in GENERATED:
                found[f"{called} {way}"] = of_all(generate(boosted.model, case, **how))
        found[f"{called} call"] = of_all(_called(case, boosted))
        boosted.model.train()
        generate(boosted.model, case)
        found[f"{called} trained"] = pipeline_cases.train(case, boosted)
        if style == "zbv" and name in TIGHT:
            peak = boosted.report().peak_device_bytes
            boosted = boost(case, device_memory=int(0.7 * peak))
            found[f"{name} tight"] = of_all(generate(boosted.model, case))
            found[f"{name} bytes"] = [int(0.7 * peak), boosted.report().peak_device_bytes]
    boosted = boost(FAMILIES["bert"])
    boosted.model.eval()
    found["bert"] = of_all(_called(FAMILIES["bert"], boosted))
    write(directory, "ways", found)


def _called(case: Case, boosted: Boosted) -> list[Any]:
    with torch.inference_mode():
        outputs = boosted.model(**batch(case, 0))
    return [outputs.loss.item(), outputs.logits.tolist()]


def composed(directory: Path) -> None:
    """With divided layers, sequences, copies of the model, four stages."""
    found: dict[str, Any] = {}
    for key in COMPOSED:
        name, kind = key.split(" ", 1)
        boosted = boost(DEEP[name], **KINDS[kind])
        found[key] = of_all(generate(boosted.model, DEEP[name]))
    write(directory, "composed", found)


def refused(directory: Path) -> None:
    """What cannot be called, and that the model works afterwards."""
    case = DEEP["llama"]
    boosted = boost(case)
    model: Any = boosted.model
    rank = torch.distributed.get_rank()
    ids = batch(case, 0)["input_ids"]

    def without_gradients(**given: Any) -> str:
        with torch.no_grad():
            return said(lambda: model(**{"input_ids": ids} | given))

    found = {
        "gradients": said(lambda: model(input_ids=ids)),
        "hidden": without_gradients(output_hidden_states=True),
        "attentions": without_gradients(output_attentions=True),
        "tuple": without_gradients(return_dict=False),
        "inputs": without_gradients(input_ids=ids + rank),
        "arguments": without_gradients(output_hidden_states=bool(rank)),
        "schedule": said(
            lambda: boosted.booster.execute_pipeline(
                iter([batch(case, 0) | {"output_hidden_states": True}]), model, None,
                boosted.optimizer,
            )
        ),
    }  # fmt: skip
    with torch.no_grad():
        cache = StaticCache(model.config, max_cache_len=8)
        cache.layers[0].__class__ = type("Quantised", (type(cache.layers[0]),), {})
        found["cache"] = without_gradients(past_key_values=cache)
        model.config.layer_types = ["conv", *["full_attention"] * 3]
        found["layers"] = without_gradients(use_cache=True)
        found["no cache"] = without_gradients(use_cache=False)
        model.config.layer_types = None
        found["works"] = model(**batch(case, 0)).loss.item()
    write_own(directory, "refused", found)


def one_fails(directory: Path) -> None:
    """Rank 1 raises in the middle of a call, or is killed."""
    case = DEEP["llama"]
    boosted = boost(case)
    generate(boosted.model, case)
    rank = torch.distributed.get_rank()
    if rank == 1:

        def fail(*_: Any) -> None:
            if os.environ["PHASE"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no more")

        boosted.model.get_submodule("model.layers.2").register_forward_pre_hook(fail)
    begun = time.monotonic()
    first = said(lambda: generate(boosted.model, case))
    write_own(
        directory, "one_fails",
        [first, time.monotonic() - begun, said(lambda: generate(boosted.model, case))],
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    castor.launch_from_torch()
    globals()[sys.argv[1]](Path(sys.argv[2]))
    if "one_fails" not in sys.argv:
        torch.distributed.barrier()
