"""Runs somebody's script as it is, and writes down what it computed.

python recorded.py DIRECTORY SCRIPT ARGUMENT...

Into DIRECTORY, for each rank: `held-RANK.pt`, the state dicts of the models that were trained, as
they are when the script ends (without an Accelerator what its optimizers hold), and
`recorded-RANK.json` with the loss of each backward pass, the bytes of parameters, gradients and
moments of AdamW, and under castor the peaks of device memory and of what of it is beside the model.
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
optimizers: list[Any] = []
boosters: list[Any] = []
boosted: list[Any] = []
"""So that models of a function that has returned are still there to report of."""


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
    record_loops()
    if "castor.booster" in sys.modules:
        from castor import Booster

        boost = Booster.boost

        def kept(self: Any, *arguments: Any, **keywords: Any) -> Any:
            boosters.append(self)
            boosted.append(arguments)
            return boost(self, *arguments, **keywords)

        Booster.boost = kept  # type: ignore[method-assign]


def record_loops() -> None:
    """Of scripts without an Accelerator, as the Trainer has one: losses end in torch's backward."""
    backward, made = torch.Tensor.backward, torch.optim.Optimizer.__init__

    def recorded(self: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        if not accelerators:
            losses.append(self.item())
        backward(self, *arguments, **keywords)

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        optimizers.append(self)

    torch.Tensor.backward = recorded  # type: ignore[method-assign, assignment]
    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]


def copied(value: torch.Tensor) -> torch.Tensor:
    """In memory that the CPU device of castor does not count."""
    return torch.from_numpy(value.numpy().copy())


def write(directory: Path) -> None:
    rank = os.environ.get("RANK", "0")
    models = [one.unwrap_model(model) for one in accelerators for model in one._models]
    held = [{name: copied(value) for name, value in one.state_dict().items()} for one in models]
    params = [param for one in models for param in one.parameters()]
    if not accelerators:
        params = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        held = [{str(i): copied(param.detach()) for i, param in enumerate(params)}]
    torch.save(held, directory / f"held-{rank}.pt")
    state_bytes = sum(param.nbytes * (4 if param.requires_grad else 1) for param in params)
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
