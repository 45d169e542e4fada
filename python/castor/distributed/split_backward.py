"""A stage's backward pass in two halves: gradients of its inputs first, of its weights later.

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, section 2). Other stages wait for the
gradients of hidden states. Gradients of weights fill the time in which this stage would wait.

The graph between a stage's outputs and its inputs is walked once. Weights join it at operators on
the way between them. The first half saves the gradients that arrive at these operators. The second
half computes the weights' gradients from them and from the tensors that forward saved. Each
gradient reaches its parameter through AccumulateGrad, as in any backward, so hooks there see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch import config as compiled_code
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from castor import _C

Enter = Callable[[Sequence[torch.Tensor]], None]
"""Function that is called with the parameters whose gradients are computed next."""

_functions: Any = torch._C._functions  # its stub lacks AccumulateGrad up to torch 2.14
_AccumulateGrad: Any = _functions.AccumulateGrad


@dataclass(eq=False)
class _Part:
    """Weights whose gradients are computed together, in one backward of the second half."""

    users: list[Node]
    """Operators on the way between outputs and inputs that these weights go into."""
    weights: list[torch.Tensor]
    """The weights."""
    arrived: dict[GradientEdge, torch.Tensor] = field(default_factory=dict)
    """Gradients that have arrived at the users' outputs."""

    def keep(self, user: Node) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """Returns a pre-hook of the user's backward that saves the gradients arriving there."""

        def arrives(grads: tuple[torch.Tensor | None, ...]) -> None:
            for output, grad in enumerate(grads):
                if grad is not None:
                    self.arrived[GradientEdge(user, output)] = grad

        return arrives

    def run(self, enter: Enter) -> None:
        """Computes the weights' gradients, and releases the tensors that forward saved for them."""
        entered = False

        def begins(_: object) -> None:
            nonlocal entered
            if not entered:
                entered = True
                enter(self.weights)

        handles = [user.register_prehook(begins) for user in self.users]
        try:
            if self.arrived:
                torch.autograd.backward(
                    list(self.arrived), list(self.arrived.values()), inputs=self.weights
                )
        finally:
            for handle in handles:
                handle.remove()


class SplitBackward:
    """One backward pass of one micro-batch through one stage."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor | GradientEdge],
        grads: Sequence[torch.Tensor | None] | None,
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Walks the graph; computes nothing.

        Args:
            outputs: The stage's hidden states, or the loss. torch 2.15 gives the gradient edge of
                an output that was sent and released.
            grads: Gradients of the outputs; None: 1.
            inputs: Inputs of the stage; leaves, of which at least one requires a gradient.
        """
        self._outputs: Sequence[Any] = outputs
        self._grads = grads
        self._inputs = inputs
        wanted = [x for x in inputs if x.requires_grad]
        self._parts, self._at_once, self._way = _divide(outputs, wanted)
        self._wanted = wanted

    def of_inputs(self) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradient of each input; computes those of weights that cannot wait, too."""
        handles = [
            user.register_prehook(part.keep(user)) for part in self._parts for user in part.users
        ]
        try:
            # Compiled code that overwrites its saved tensors refuses a graph that is retained. It
            # is a Python function, so this pass runs it, and no later one does.
            with compiled_code.patch(donated_buffer=False):
                torch.autograd.backward(
                    self._outputs,
                    self._grads,
                    retain_graph=True,
                    inputs=[*self._wanted, *self._at_once],
                )
        finally:
            for handle in handles:
                handle.remove()
        for output in self._outputs:
            if isinstance(output, torch.Tensor):
                output.detach_()
        for node in self._way.difference(*(part.users for part in self._parts)):
            _C.release_saved_variables(node)  # leaves only what weights need
        self._way.clear()
        found = tuple(x.grad for x in self._inputs)
        for x in self._wanted:
            x.grad = None
        self._outputs, self._grads, self._inputs, self._wanted = (), None, (), []
        return found

    def of_weights(self, enter: Enter) -> None:
        """Computes the weights' gradients, after of_inputs, in the order of a plain backward."""
        parts, self._parts = self._parts[::-1], []
        while parts:
            parts.pop().run(enter)


def _divide(
    outputs: Sequence[torch.Tensor | GradientEdge], inputs: Sequence[torch.Tensor]
) -> tuple[list[_Part], list[torch.Tensor], set[Node]]:
    """Finds groups of weights that can wait, weights that cannot, and operators on the way.

    Operators that use the same weights form one group. Weights cannot wait in three cases:

    - A pass over one of the group's operators would run another one again (a layer used twice).
    - An operator is a Python function, which would compute all its gradients twice.
    - The weights' way to the outputs does not meet that of the inputs.
    """
    nodes = (x.node if isinstance(x, GradientEdge) else x.grad_fn for x in outputs)
    roots = [node for node in nodes if node is not None]
    parents = _parents(roots)
    leaves = [node for node in parents if isinstance(node, _AccumulateGrad)]
    given = {id(x) for x in inputs}
    on_the_way = _upwards([leaf for leaf in leaves if id(leaf.variable) in given], parents)
    at_once: list[torch.Tensor] = []
    part_of: dict[Node, _Part] = {}
    for leaf in leaves:
        if id(leaf.variable) in given:
            continue
        apart = _upwards([leaf], parents, until=on_the_way)
        users = {user for node in apart for user in parents[node] if user in on_the_way}
        if not users or not apart.isdisjoint(roots):
            at_once.append(leaf.variable)
            continue
        joined = dict.fromkeys(part_of[user] for user in users if user in part_of)
        part = _Part(
            users=list(users.union(*(other.users for other in joined))),
            weights=[*(weight for other in joined for weight in other.weights), leaf.variable],
        )
        part_of |= dict.fromkeys(part.users, part)
    parts = []
    for part in dict.fromkeys(part_of.values()):
        if any(isinstance(user, BackwardCFunction) for user in part.users) or _in_a_row(part):
            at_once += part.weights
        else:
            parts.append(part)
    parts.sort(key=lambda part: -max(user._sequence_nr() for user in part.users))
    return parts, at_once, on_the_way


def _parents(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Returns all nodes of a graph, each with the nodes that it gets gradients from."""
    parents: dict[Node, list[Node]] = {root: [] for root in roots}
    ahead = list(parents)
    while ahead:
        node = ahead.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in parents:
                parents[child] = []
                ahead.append(child)
            parents[child].append(node)
    return parents


def _upwards(
    nodes: list[Node], parents: dict[Node, list[Node]], until: AbstractSet[Node] = frozenset()
) -> set[Node]:
    """Returns the nodes and all nodes that lead to them, up to those of `until`, excluded."""
    found = set(nodes)
    ahead = list(nodes)
    while ahead:
        for parent in parents[ahead.pop()]:
            if parent not in found and parent not in until:
                found.add(parent)
                ahead.append(parent)
    return found


def _in_a_row(part: _Part) -> bool:
    """Whether a user leads to another. Autograd's sequence numbers fall along each path."""
    users = set(part.users)
    if len(users) == 1:
        return False
    least = min(user._sequence_nr() for user in users)
    found: set[Node] = set()
    ahead = list(users)
    while ahead:
        for child, _ in ahead.pop().next_functions:
            if child is None or isinstance(child, _AccumulateGrad) or child in found:
                continue
            if child in users:
                return True
            if child._sequence_nr() >= least:
                found.add(child)
                ahead.append(child)
    return False
