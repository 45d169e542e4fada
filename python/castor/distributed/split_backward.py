"""A stage's backward pass in two parts: gradients of its inputs first, of its weights later.

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism, section 2). Hidden states' gradients are
what other stages wait for; those of weights fill the time in which this one would wait.

The graph between a stage's outputs and its inputs is walked once. Weights join it at operators that
lie on the way: their products with what forward saved are what the second part computes, from the
gradients that came to these operators in the first. Each goes to its parameter as in any pass, by
AccumulateGrad, so that whoever follows it there sees it.
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
"""Is told of the parameters whose gradients are computed next."""

_functions: Any = torch._C._functions  # whose stub lacks AccumulateGrad up to torch 2.14
_AccumulateGrad: Any = _functions.AccumulateGrad


@dataclass(eq=False)
class _Part:
    """Weights whose gradients are computed together, in a pass of their own."""

    users: list[Node]
    """Operators on the way to the inputs that these weights go into."""
    weights: list[torch.Tensor]
    arrived: dict[GradientEdge, torch.Tensor] = field(default_factory=dict)
    """The users' outputs, and their gradients."""

    def keep(self, user: Node) -> Callable[[tuple[torch.Tensor | None, ...]], None]:
        """A hook before the user's backward: what has arrived there."""

        def arrives(grads: tuple[torch.Tensor | None, ...]) -> None:
            for output, grad in enumerate(grads):
                if grad is not None:
                    self.arrived[GradientEdge(user, output)] = grad

        return arrives

    def run(self, enter: Enter) -> None:
        """Computes the weights' gradients. What forward saved for them goes."""
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
        """Walks the graph; nothing is computed.

        Args:
            outputs: The stage's hidden states, or the loss. torch 2.15 gives the gradient edge of
                an output that was sent and released.
            grads: Of these; None: 1.
            inputs: Of the stage; leaves, of which at least one requires a gradient.
        """
        self._outputs: Sequence[Any] = outputs
        self._grads = grads
        self._inputs = inputs
        wanted = [x for x in inputs if x.requires_grad]
        self._parts, self._at_once, self._way = _divide(outputs, wanted)
        self._wanted = wanted

    def of_inputs(self) -> tuple[torch.Tensor | None, ...]:
        """Gives the gradient of each input; weights that cannot wait get theirs as well."""
        handles = [
            user.register_prehook(part.keep(user)) for part in self._parts for user in part.users
        ]
        try:
            # Compiled code that overwrites what it saved refuses a graph that is kept. It is a
            # function of Python's, which this pass runs, and no other.
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
            _C.release_saved_variables(node)  # of the graph only what weights need is left
        self._way.clear()
        found = tuple(x.grad for x in self._inputs)
        for x in self._wanted:
            x.grad = None
        self._outputs, self._grads, self._inputs, self._wanted = (), None, (), []
        return found

    def of_weights(self, enter: Enter) -> None:
        """After of_inputs: weights get their gradients, as backward would have come to them."""
        parts, self._parts = self._parts[::-1], []
        while parts:
            parts.pop().run(enter)


def _divide(
    outputs: Sequence[torch.Tensor | GradientEdge], inputs: Sequence[torch.Tensor]
) -> tuple[list[_Part], list[torch.Tensor], set[Node]]:
    """Finds parts that can be computed later, weights that cannot, and operators on the way.

    Operators whose weights are the same are one part. It cannot wait where a pass over one of its
    operators would come to another one again (a layer that is used twice), where an operator is
    Python's and would compute all its gradients twice, or where the weights' way to the outputs
    does not meet the inputs'.
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
    """All nodes of a graph, and which nodes' gradients each gets."""
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
    """The nodes, and all that lead to them, but for those of `until`."""
    found = set(nodes)
    ahead = list(nodes)
    while ahead:
        for parent in parents[ahead.pop()]:
            if parent not in found and parent not in until:
                found.add(parent)
                ahead.append(parent)
    return found


def _in_a_row(part: _Part) -> bool:
    """Whether one of its users leads to another. Autograd's numbers fall on each way."""
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
