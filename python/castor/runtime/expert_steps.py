"""Rows of experts in training steps, for forwards and for their backward (docs/design/0059)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from castor import _C

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions that pack a tensor that autograd saves, and unpack it."""
_SETTLED = 2
"""Steps after which the plan knows which chunks stay on the device."""
_MARGIN = 1.1
"""Full layers stay where they are less than a tenth more bytes than experts by the row."""
_CALLS = 4096
"""Number of calls that may wait for their backward, before the first is forgotten."""


class Rows(Protocol):
    """Rows of some experts."""

    def take(self, position: int) -> torch.Tensor:
        """Returns the rows of the parameter at that position of its module."""
        ...


class Steps:
    """Training steps of one model with experts: how they fetch experts, and what they fetched.

    The first steps take full layers, until the plan has settled: it keeps on the device the layers
    that it has room for, which stay there. Where the experts that the next step needs are fewer
    bytes than what it streams, later steps take rows.
    """

    def __init__(self, *, measures: bool) -> None:
        """Begins before the first step.

        Args:
            measures: Whether full layers are measured; steps take rows in any case otherwise.
        """
        self._measures = measures
        self.by_row: bool | None = None
        """Whether steps take rows; None: not decided yet."""
        self.num_forwards = 0
        """Number of forwards of the model so far."""
        self.experts = 0
        """Number of experts fetched, for a forward or for a backward."""
        self.fetched_bytes = 0
        self._calls: deque[tuple[StepRows, list[int]]] = deque(maxlen=_CALLS)
        self._needed_bytes = 0
        self._measured: tuple[int, int] | None = None

    def model_called(self, session: _C.Session, experts: _C.Experts, share: float) -> None:
        """Notes that a forward of the model begins.

        Args:
            session: Session of the model.
            experts: Experts of the model, which are told when steps begin to take rows.
            share: Share of experts in the bytes of all parameters.
        """
        self.num_forwards += 1
        if not torch.is_grad_enabled():
            self._measured = None  # what it moves is no step's
            return
        self._calls.clear()
        if self.by_row is not None:
            return
        report = session.report()
        num_steps, moved = int(report["steps"]), int(report["h2d_bytes"])
        if num_steps < _SETTLED:
            return
        if not self._measures:
            self.by_row = True
        elif self._measured is None:
            self._measured, self._needed_bytes = (num_steps, moved), 0
        elif num_steps > self._measured[0]:
            full_bytes = share * (moved - self._measured[1])
            self.by_row = _MARGIN * self._needed_bytes < full_bytes
        if self.by_row:
            experts.expect_rows()

    def needs(self, num_bytes: int) -> None:
        """Notes the bytes of the experts that a forward needs, and its backward again."""
        self._needed_bytes += 2 * num_bytes

    def forward(self, layer: StepRows, experts: list[int]) -> None:
        """Notes a call that backward will come back to."""
        self._calls.append((layer, experts))

    def backward(self, layer: StepRows, experts: list[int]) -> None:
        """Begins to fetch for the call before this one, which backward comes to next."""
        for i in range(len(self._calls) - 1, -1, -1):
            if self._calls[i] == (layer, experts):
                while len(self._calls) > i:
                    self._calls.pop()
                break
        else:
            return
        if self._calls:
            before, needed = self._calls[-1]
            before.fetch_ahead(needed)


@dataclass(frozen=True)
class _Ahead:
    """Rows that were fetched ahead of their use."""

    experts: list[int]
    versions: list[int]
    num_forwards: int
    """Number of forwards of the model until then: a later one may follow an update."""
    rows: _C.ExpertRows


class StepRows:
    """Fetches the rows of one module's experts in training steps."""

    def __init__(
        self,
        experts: _C.Experts,
        layer: int,
        params: Sequence[nn.Parameter],
        steps: Steps,
    ) -> None:
        """Takes the module's parameters.

        Args:
            experts: Experts of the model.
            layer: Number of the module there.
            params: The parameters.
            steps: Calls and counts of the model.
        """
        self._model = experts
        self._layer = layer
        self._params = list(params)
        self.steps = steps
        self._ahead: _Ahead | None = None

    def fetch(self, experts: list[int]) -> _C.ExpertRows | None:
        """Begins the copies of the experts' rows; None: host storage cannot be read by the row."""
        ahead, self._ahead = self._ahead, None
        if (
            ahead
            and ahead.experts == experts
            and ahead.versions == self.versions()
            and ahead.num_forwards == self.steps.num_forwards
        ):
            return ahead.rows
        return self._counted(experts, self._model.rows(self._layer, experts))

    def fetch_ahead(self, experts: list[int]) -> None:
        """Begins the copies for the next `fetch` of the same experts, if there is free room."""
        self._ahead = None
        rows = self._model.rows_ahead(self._layer, experts)
        if self._counted(experts, rows) is not None:
            assert rows
            self._ahead = _Ahead(experts, self.versions(), self.steps.num_forwards, rows)

    def _counted(self, experts: list[int], rows: _C.ExpertRows | None) -> _C.ExpertRows | None:
        if rows is not None:
            self.steps.experts += len(experts)
            self.steps.fetched_bytes += rows.bytes
        return rows

    def read(self, experts: Sequence[int]) -> Rows:
        """Returns the experts' rows in any case, also where `fetch` cannot."""
        return _Selected(self._params, experts)

    def followed(self, position: int, rows: torch.Tensor, experts: list[int]) -> torch.Tensor:
        """Returns rows of a parameter, such that its gradient follows where autograd needs one."""
        param = self._params[position]
        if not (param.requires_grad and torch.is_grad_enabled()):
            return rows
        send = functools.partial(self._model.gradient_rows, self._layer, position)
        followed: torch.Tensor = _RowsOfTrained.apply(param, rows, experts, send)
        return followed

    def needs(self, experts: Sequence[int]) -> None:
        """Notes that a forward needs these experts, by the row or not."""
        self.steps.needs(len(experts) * sum(p.nbytes // p.shape[0] for p in self._params))

    def versions(self) -> list[int]:
        """Returns the numbers of writes to each parameter so far."""
        return [param._version for param in self._params]


class _RowsOfTrained(torch.autograd.Function):
    """Rows of a parameter that an optimizer steps, whose gradient goes to p.grad by the row.

    The gradient of the full parameter is made on the device where something else than p.grad gets
    it: torch.autograd.grad, a hook, or the graph of create_graph=True.
    """

    @staticmethod
    def forward(
        ctx: Any,
        param: nn.Parameter,
        rows: torch.Tensor,
        experts: list[int],
        send: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        """Returns the rows.

        Args:
            ctx: Keeps what backward needs.
            param: The parameter [experts, ...].
            rows: Its rows of some experts.
            experts: Numbers of these.
            send: Function that adds gradients of rows, given by their numbers, to p.grad.
        """
        ctx.param, ctx.experts, ctx.send = param, experts, send
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        """Sends the gradient of the rows, or returns that of the parameter."""
        param = ctx.param
        numbers = torch.tensor(ctx.experts, device=gradient.device)
        if torch.is_grad_enabled() or _is_seen(param) or not _goes_to_grad(ctx):
            full = gradient.new_zeros(param.shape).index_add(0, numbers, gradient)
            return full, None, None, None
        if param.requires_grad:  # as AccumulateGrad: it may have been frozen since forward
            ctx.send(numbers, gradient)
        return None, None, None, None


def _is_seen(param: nn.Parameter) -> bool:
    """Whether hooks see the parameter's gradient on its way."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def _goes_to_grad(ctx: Any) -> bool:
    """Whether the backward pass under way adds the parameter's gradient to p.grad."""
    accumulate, _ = ctx.next_functions[0]  # of the first argument, which is the parameter
    try:
        return bool(torch._C._will_engine_execute_node(accumulate))
    except RuntimeError:  # torch.autograd.grad returns it
        return False


class _Selected:
    """Rows that an operator selects from the parameters, wherever these are."""

    def __init__(self, params: Sequence[nn.Parameter], experts: Sequence[int]) -> None:
        self._params = params
        self._experts = experts

    def take(self, position: int) -> torch.Tensor:
        """Returns a copy of the rows."""
        param = self._params[position].detach()
        return param.index_select(0, torch.tensor(self._experts, device=param.device))


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a parameter's rows, without their memory."""

    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that stays, and the number of writes to it when it was saved."""

    tensor: torch.Tensor
    version: int


class SavedRows:
    """Rows of one call's experts, of which autograd saves views for backward.

    It saves no memory of the rows: backward fetches them again when it first needs one, and drops
    them when it has had them all. Other tensors that the call saves stay, or go to the hooks that
    were there before.
    """

    def __init__(self, layer: StepRows, experts: list[int], outer: Hooks | None) -> None:
        """Takes a call.

        Args:
            layer: The module's rows.
            experts: Numbers of the experts that the call needs.
            outer: Hooks for tensors that the call saves; None: there are none.
        """
        self._layer = layer
        self._experts = experts
        self._outer = outer
        self._versions = layer.versions()
        self._storages: dict[int, int] = {}  # position of the parameter, by its rows' storage
        self._views = 0
        self._left = 0
        self._rows: Rows | None = None

    def know(self, position: int, rows: torch.Tensor) -> None:
        """Takes the rows of the parameter at that position, which live until hooks() ends."""
        self._storages[rows.untyped_storage()._cdata] = position

    def hooks(self) -> saved_tensors_hooks:
        """Returns the context of the call's forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def forward_ends(self) -> None:
        """Forgets the rows' addresses, which other tensors may get from now on."""
        self._storages.clear()
        self._left = self._views
        if self._views:
            self._layer.steps.forward(self._layer, self._experts)

    def _pack(self, tensor: torch.Tensor) -> Any:
        position = self._storages.get(tensor.untyped_storage()._cdata)
        if position is not None:
            self._views += 1
            return _View(position, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        if self._outer:
            return self._outer[0](tensor)
        return _Kept(tensor.detach(), tensor._version)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Kept):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {list(saved.tensor.shape)} that a "
                    f"forward of experts saved is at version {saved.tensor._version}; expected "
                    f"version {saved.version} instead"
                )
            return saved.tensor
        if not isinstance(saved, _View):
            assert self._outer
            return self._outer[1](saved)
        rows_of_call = self._fetched(saved.position)
        with torch.no_grad():
            rows = rows_of_call.take(saved.position)
            view = rows.as_strided(saved.size, saved.stride, saved.offset)
        self._left -= 1
        if self._left <= 0:  # also where a graph is retained, for the next backward
            self._left, self._rows = self._views, None
        return view

    def _fetched(self, position: int) -> Rows:
        """Returns the rows, of which a parameter's at that position are those of forward.

        Others may have been written since their gradients have come, as by an optimizer that steps
        within backward.
        """
        version = self._layer.versions()[position]
        if version != self._versions[position]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a parameter of experts is at version {version}; expected "
                f"version {self._versions[position]} instead"
            )
        if self._rows is None:
            self._rows = self._layer.fetch(self._experts) or self._layer.read(self._experts)
            self._layer.steps.backward(self._layer, self._experts)
        return self._rows
