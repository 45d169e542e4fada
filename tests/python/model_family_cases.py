"""Every class of models of transformers at tight(0.5): `model_family_cases.py RESULTS [CLASS ...]`.

Instead of classes: "causal" for causal language models, "one" for the page's classes. With
ONLY_TRAINING=1 a class is not saved and not converted to bfloat16.

Each class trains in a process of its own, forked from one that has imported all that is large, and
its result is a line of RESULTS (JSON) as soon as it is there.
"""

import contextlib
import copy
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.auto import modeling_auto

import castor
from helpers import LR, Boosted, boost, margin
from model_inputs import Inputs, candidates, loss_of, with_places
from small_configs import small_config

STEPS, MAX_NORM, TOLERANCE, SECONDS = 3, 1.0, 1e-5, 30.0
ACTIVATIONS = ("keep", "recompute", "auto")
COLUMNS = (*ACTIVATIONS, "save_model", "bf16 dtypes")
HOST = 2**31


@dataclass(frozen=True)
class Family:
    """A class of models with one kind of head."""

    name: str
    """Of the class."""
    model_type: str
    head: str
    """The auto class's mapping: "causal LM", "CTC", ...; "base model" of those without a head."""


def _head(mapping: str) -> str:
    words = (
        re.sub(r"^MODEL(_FOR)?|(_MAPPING)?_NAMES$", "", mapping)
        .strip("_")
        .replace("_", " ")
        .lower()
    )
    short = {"causal lm": "causal LM", "masked lm": "masked LM", "ctc": "CTC", "rnnt": "RNN-T",
             "tdt": "TDT", "multimodal lm": "multimodal LM", "": "base model"}  # fmt: skip
    return short.get(words, words)


@cache
def families() -> dict[str, Family]:
    """Every class of the auto classes' mappings, causal language models first, base models last."""
    every = [n for n in dir(modeling_auto) if re.fullmatch(r"MODEL_(FOR_\w+_)?(MAPPING_)?NAMES", n)]
    first, last = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_MAPPING_NAMES"
    found: dict[str, Family] = {}
    for mapping in [first, *(n for n in every if n not in (first, last)), last]:
        for model_type, classes in getattr(modeling_auto, mapping).items():
            for name in [classes] if isinstance(classes, str) else classes:
                found.setdefault(name, Family(name, model_type, _head(mapping)))
    return found


def one_of_each() -> list[Family]:
    """Every causal language model, and of every other model type its first class, head by head."""
    chosen: dict[str, Family] = {}
    for family in families().values():
        key = family.name if family.head == "causal LM" else family.model_type
        if family.head == "causal LM" or not any(
            one.model_type == family.model_type for one in chosen.values()
        ):
            chosen.setdefault(key, family)
    by_head: dict[str, list[Family]] = {}
    for family in chosen.values():
        by_head.setdefault(family.head, []).append(family)
    causal = by_head.pop("causal LM")
    in_turn = zip_longest(*by_head.values())
    return causal + [family for row in in_turn for family in row if family]


class DoesNotBuildError(Exception):
    """Plain transformers makes or trains no small model of this class: the reason."""


@dataclass(frozen=True)
class Trainable:
    """A small model of a class, and inputs that plain PyTorch trains it with."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Inputs]

    def model(self) -> nn.Module:
        torch.manual_seed(1234)
        model = self.build()
        for param in model.parameters():  # a parameter made by torch.empty has any bits
            if not torch.isfinite(param).all():
                nn.init.normal_(param, std=0.02)
        return model.train()


def config_of(family: Family) -> Any:
    """A small configuration as the auto classes hand it to the class."""
    config = small_config(family.model_type)
    if "SequenceClassification" in family.name and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # else only batches of one row
    kind = getattr(hf, family.name).config_class
    if kind is not None and not isinstance(config, kind):
        for part in vars(config).values():
            if isinstance(part, kind):
                return part
    return config


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.random.seed(seed)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def trainable(family: Family) -> Trainable:
    """Finds inputs.

    Raises:
        DoesNotBuildError: There are none, or there is no small model.
    """

    def build() -> nn.Module:
        return getattr(hf, family.name)(copy.deepcopy(config))  # type: ignore[no-any-return]

    try:
        config = config_of(family)
        model = Trainable(build, lambda _: {}).model()
    except Exception as error:
        raise DoesNotBuildError(f"build: {_said(error)}") from error
    if not any(p.requires_grad for p in model.parameters()):
        raise DoesNotBuildError("build: no parameter trains")
    said: list[str] = []
    for place, inputs in enumerate(candidates(model, 0)):
        message = _tried(model, inputs)
        placed = ""
        if message and (changed := with_places(model, inputs, message)) is not None:
            placed, message = message, _tried(model, changed)
        if not message:
            return Trainable(build, _batch(model, place, placed))
        said.append(message)
    raise DoesNotBuildError(f"inputs: {said[0] if said else 'none known'}")


def _batch(model: nn.Module, place: int, placed: str) -> Callable[[int], Inputs]:
    def batch(seed: int) -> Inputs:
        inputs = next(islice(candidates(model, seed), place, None))
        return with_places(model, inputs, placed) or inputs if placed else inputs

    return batch


def _tried(model: nn.Module, inputs: Inputs) -> str:
    """What a step of plain PyTorch raises, or nothing."""
    try:
        seeded(0)
        loss = loss_of(model(**inputs))
        loss.backward()
        if not torch.isfinite(loss):
            return "the loss is not finite"
        if not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
            return "a gradient is not finite"
    except Exception as error:
        return _said(error)
    finally:
        model.zero_grad()
    return ""


def plain(case: Trainable, nudge: float = 0.0) -> tuple[list[float], nn.Module]:
    """Losses of plain PyTorch, and the model."""
    model = case.model()
    if nudge:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + nudge * torch.randn_like(param))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR)
    losses = []
    for seed in range(STEPS):
        inputs = case.batch(seed)
        seeded(seed)
        loss = loss_of(model(**inputs))
        loss.backward()
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def boosted_losses(boosted: Boosted, case: Trainable) -> list[float]:
    losses = []
    for seed in range(STEPS):
        inputs = case.batch(seed)
        seeded(seed)
        losses.append(boosted.step(loss_of(boosted.model(**inputs))))
    return losses


def _apart(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected, strict=True))


def compared(losses: list[float], expected: list[float], case: Trainable) -> str:
    """ "ok", or how far losses are from plain PyTorch's."""
    if losses[0] == expected[0] and (apart := _apart(losses, expected)) <= TOLERANCE:
        return "ok"
    again, _ = plain(case)
    if again != expected:
        return "ok (plain PyTorch's own losses change between runs)"
    if losses[0] != expected[0]:
        return f"FAILED: losses {losses}, plain PyTorch's {expected}"
    nudged, _ = plain(case, 1e-7)
    if apart <= 10 * _apart(nudged, expected):
        return "ok"
    return f"FAILED: losses {losses}, plain PyTorch's {expected}"


def trains(case: Trainable, found: dict[str, Any]) -> Boosted | None:
    """A column for each way with activations; gives the first model that trained."""
    seeds = torch.get_rng_state()
    expected, _ = plain(case)
    torch.set_rng_state(seeds)
    ample = boost(case.model(), max_norm=MAX_NORM, host_memory=HOST)
    losses = boosted_losses(ample, case)
    found["ample"] = compared(losses, expected, case)
    budget = ample.report().peak_nonmodel_bytes + margin(ample.model, 0.5)
    found["budget"] = budget
    del ample
    trained = None
    for activations in ACTIVATIONS:
        settings = {"activations": activations, "max_norm": MAX_NORM, "host_memory": HOST}
        try:
            try:
                boosted = boost(case.model(), budget, **settings)
                losses = boosted_losses(boosted, case)
            except castor.OutOfMemoryError:  # toys keep less than random states and inputs take
                budget = max(budget, _tight(case, **settings))
                boosted = boost(case.model(), budget, **settings)
                losses = boosted_losses(boosted, case)
            found[activations] = compared(losses, expected, case)
            report = boosted.report()
            if report.peak_device_bytes > budget:
                found[activations] = f"FAILED: {report.peak_device_bytes} of {budget} bytes"
            trained = trained or boosted
        except Exception as error:
            found[activations] = _refusal(error)
    return trained


def _tight(case: Trainable, **settings: Any) -> int:
    """tight(0.5) of a way with activations, in bytes."""
    ample = boost(case.model(), **settings)
    boosted_losses(ample, case)
    return ample.report().peak_nonmodel_bytes + margin(ample.model, 0.5)


def _refusal(error: Exception) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if "/castor/" in f.filename]
    at = f" [{Path(own[-1].filename).name}:{own[-1].lineno}]" if own else ""
    named = isinstance(error, (NotImplementedError, castor.UsageError))
    kind = "refused" if named and own else "FAILED"
    return f"{kind}: {_said(error)}{at}"


def saved(boosted: Boosted, case: Trainable, directory: Path) -> str:
    """save_model against save_pretrained of a model that never was boosted, file by file."""
    theirs, ours = directory / "theirs", directory / "ours"
    model = case.model()
    if hasattr(boosted.model.config, "problem_type"):  # which a loss of a classifier has set
        model.config.problem_type = boosted.model.config.problem_type
    with torch.no_grad():
        for mine, other in ((model.parameters, boosted.model.parameters),
                            (model.buffers, boosted.model.buffers)):  # fmt: skip
            for target, value in zip(mine(), other(), strict=True):
                target.copy_(value)
    try:
        model.save_pretrained(theirs)
    except Exception as error:
        return f"none: save_pretrained raises {_said(error)}"
    boosted.booster.save_model(boosted.model, ours)
    own = "castor-manifest.json"
    names = [sorted(p.name for p in d.iterdir() if p.name != own) for d in (theirs, ours)]
    if names[0] != names[1]:
        return f"FAILED: files {names[1]}, save_pretrained's {names[0]}"
    for name in names[0]:
        if (theirs / name).read_bytes() != (ours / name).read_bytes():
            return f"FAILED: {name} differs: {_difference(theirs / name, ours / name)}"
    return "ok"


def _difference(theirs: Path, ours: Path) -> str:
    if theirs.suffix != ".safetensors":
        return ""
    from safetensors import safe_open

    with safe_open(theirs, "pt") as one, safe_open(ours, "pt") as other:
        expected, found = set(one.keys()), set(other.keys())
        if expected != found:
            return f"names {sorted(found - expected)[:2]} for {sorted(expected - found)[:2]}"
        apart = [k for k in expected if not torch.equal(one.get_tensor(k), other.get_tensor(k))]
        if apart:
            return f"values of {sorted(apart)[:3]}"
        return "names and values are the same, the header or the order of tensors is not"


def _kinds(model: nn.Module) -> dict[str, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in named}


def bf16(family: Family, case: Trainable, directory: Path) -> str:
    """Kinds of tensors with precision="bf16" against from_pretrained(dtype=torch.bfloat16).

    Boosted are a model that was built in float32, and the one that from_pretrained gave.
    """
    try:
        if not directory.exists():
            case.model().save_pretrained(directory)
        theirs = getattr(hf, family.name).from_pretrained(directory, dtype=torch.bfloat16)
    except Exception as error:
        return f"none: from_pretrained raises {_said(error)}"
    expected = _kinds(theirs)
    for model, of in ((case.model(), "one built in float32"), (theirs.train(), "what it gave")):
        found = _kinds(boost(model, precision="bf16", host_memory=HOST).model)
        if apart := [name for name in expected if found.get(name) != expected[name]]:
            shown = ", ".join(f"{n} is {found.get(n)} for {expected[n]}" for n in apart[:2])
            return f"FAILED: {of}: {len(apart)} of {len(expected)}: {shown}"
    return "ok"


def cell(family: Family) -> dict[str, Any]:
    """All columns of a class."""
    found: dict[str, Any] = {}
    try:
        case = trainable(family)
    except DoesNotBuildError as error:
        return {"not built": str(error)}
    inputs = case.batch(0)
    found["inputs"] = sorted(inputs)
    found["parameters"] = sum(p.numel() for p in case.model().parameters())
    try:
        trained = trains(case, found)
    except Exception as error:
        return found | {"ample": _refusal(error)}
    if os.environ.get("ONLY_TRAINING"):
        return found
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        for column, way in (
            ("save_model", lambda: saved(trained, case, directory) if trained else "none"),
            ("bf16 dtypes", lambda: bf16(family, case, directory / "theirs")),
        ):
            try:
                found[column] = way()
            except Exception as error:
                found[column] = _refusal(error)
    return found


def apart(family: Family, seconds: float = SECONDS) -> dict[str, Any]:
    """cell() in a forked process of its own, ended after a time."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                found = cell(family)
        except BaseException as error:
            found = {"ample": f"FAILED: {_said(error)}"}
        with open(writes, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(writes)
    text, end = b"", time.monotonic() + seconds
    with open(reads, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                break
            part = pipe.read(65536)
            if not part:
                break
            text += part
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return {"ample": f"FAILED: took more than {seconds:.0f} s"}
        return {"ample": f"FAILED: ended by {signal.Signals(number).name}"}
    return json.loads(text)  # type: ignore[no-any-return]


def import_all_that_is_large() -> None:
    """What each process would else import itself, for seconds; nothing computes."""
    import torch._dynamo
    import torch.distributed.tensor
    import torch.utils.checkpoint  # noqa: F401
    from transformers import conversion_mapping, pytorch_utils  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.mixtral import modeling_mixtral  # noqa: F401
    from transformers.models.t5 import modeling_t5  # noqa: F401
    from transformers.models.vit import modeling_vit  # noqa: F401

    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")


def run(results: Path, chosen: list[Family], seconds: float) -> Iterator[dict[str, Any]]:
    """Lines of results, each written when it is there."""
    import_all_that_is_large()
    with results.open("a") as lines:
        for family in chosen:
            start = time.monotonic()
            found = apart(family, seconds)
            line = {"class": family.name, "type": family.model_type, "head": family.head,
                    "seconds": round(time.monotonic() - start, 1)} | found  # fmt: skip
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            yield line


def shortcomings(line: dict[str, Any]) -> dict[str, str]:
    """Columns of a result that are no refusal with a reason and not as plain PyTorch."""
    if "not built" in line:
        return {}
    columns = ("ample", *COLUMNS) if line.get("ample") == "ok" else ("ample",)
    said = {column: str(line.get(column, "not run")) for column in columns}
    return {column: text for column, text in said.items() if text.startswith(("FAILED", "not run"))}


def main(arguments: list[str]) -> None:
    results, names = Path(arguments[0]), arguments[1:]
    known, done = families(), set()
    if results.exists():
        done = {json.loads(line)["class"] for line in results.read_text().splitlines()}
    if names == ["causal"]:
        chosen = [family for family in one_of_each() if family.head == "causal LM"]
    elif names == ["one"]:
        chosen = one_of_each()
    else:
        chosen = [known[name] for name in names] if names else list(known.values())
    seconds = float(os.environ.get("SECONDS_EACH", SECONDS))
    for line in run(results, [one for one in chosen if one.name not in done], seconds):
        bad = {
            key: value
            for key, value in line.items()
            if key == "not built" or str(value).startswith(("FAILED", "refused", "none"))
        }
        print(line["class"], line["seconds"], bad or "ok", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    main(sys.argv[1:])
