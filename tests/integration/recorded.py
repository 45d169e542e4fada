"""Runs somebody's script as it is, and writes down what it computed.

python recorded.py DIRECTORY SCRIPT ARGUMENT...

Into DIRECTORY, for each rank: `held-RANK.pt`, the state dicts of the models that were trained, as
they are when the script ends, and `recorded-RANK.json` with the loss of each backward pass, the
bytes of parameters, gradients and moments of AdamW, and under castor the peaks of device memory and
of what of it is beside the model.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator, DistributedType

losses: list[float] = []
accelerators: list[Any] = []
boosters: list[Any] = []


def record() -> None:
    """Of accelerate's own class, which castor's and the Trainer's Accelerators derive from."""
    base = next(kind for kind in reversed(Accelerator.__mro__) if "backward" in vars(kind))
    assert base.__module__ == accelerate.accelerator.__name__
    backward = base.backward

    def recorded(self: Any, loss: torch.Tensor, **keywords: Any) -> None:
        if self not in accelerators:
            accelerators.append(self)
        losses.append(loss.item())
        backward(self, loss, **keywords)

    base.backward = recorded
    if "castor.booster" in sys.modules:
        from castor import Booster

        boost = Booster.boost

        def kept(self: Any, *arguments: Any, **keywords: Any) -> Any:
            boosters.append(self)
            return boost(self, *arguments, **keywords)

        Booster.boost = kept  # type: ignore[method-assign]


def copied(value: torch.Tensor) -> torch.Tensor:
    """In memory that the CPU device of castor does not count."""
    return torch.from_numpy(value.numpy().copy())


def write(directory: Path) -> None:
    rank = os.environ.get("RANK", "0")
    models = [one.unwrap_model(model) for one in accelerators for model in one._models]
    held = [{name: copied(value) for name, value in one.state_dict().items()} for one in models]
    torch.save(held, directory / f"held-{rank}.pt")
    state_bytes = sum(
        param.nbytes * (4 if param.requires_grad else 1)
        for one in models
        for param in one.parameters()
    )
    report = boosters[0].report() if boosters else None
    peaks = report and (report.peak_device_bytes, report.peak_nonmodel_bytes)
    found = {"losses": losses, "state_bytes": state_bytes, "peaks": peaks}
    (directory / f"recorded-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if not hasattr(
        DistributedType, "TPU"
    ):  # run_clm_no_trainer asks for it; accelerate has XLA now
        DistributedType.TPU = DistributedType.XLA
    target = Path(sys.argv[1])
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    record()
    runpy.run_path(sys.argv[0], run_name="__main__")
    write(target)
