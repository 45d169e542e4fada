"""Edits that user code makes of a boosted optimizer's `state` and `param_groups`.

torch's optimizers read both at every step, so that edits of them count: a cleared state starts
anew, and a parameter that is moved to another group follows that group's options. The states of a
fused optimizer lie in chunks, and `optimizer.state` shows views of them. The classes here compare
the present entries with the ones that castor has shown, and write differences into the chunks.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from castor.errors import UsageError
from castor.optim.boosted_state import StoredState, reset_states, state_entry, write_states
from castor.runtime.engine import Engine

NO_GROUP = -1
"""Group, in castor._C, of a parameter that another optimizer updates, or no optimizer."""


@dataclass
class _Shown:
    """The entry of `optimizer.state` that castor made for one parameter."""

    stored: StoredState | None
    """The entry, if the states are not in memory that tensors can view; else None."""
    tensors: dict[str, torch.Tensor]
    """The tensors that castor put into the entry, by key."""


class ShownStates:
    """The entries of `optimizer.state` shown for one model, kept equal to the states in its chunks.

    A call without edits costs one comparison for each parameter and key.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shown: dict[int, _Shown] = {}

    def show(self, optimizer: Optimizer) -> None:
        """Makes entries for parameters that have taken their first step."""
        session = self._engine.session
        if not self._has_states():
            return
        for index, param in self._params(optimizer):
            if index not in self._shown and param.grad is not None and session.steps[index] > 0:
                self._show(optimizer, index, param)

    def show_loaded(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
        """Makes entries for `params`, whose states were written to the chunks."""
        for param in params:
            self._show(optimizer, self._engine.index_of[param], param)  # type: ignore[index]

    def forget(self, optimizer: Optimizer) -> None:
        """Forgets the entries of an optimizer whose state is about to be replaced as a whole.

        Entries that user code has taken out of `optimizer.state` keep their present values.
        """
        for index, param in self._params(optimizer):
            shown = self._shown.pop(index, None)
            if shown is None:
                continue
            entry = optimizer.state.get(param)
            if shown.stored is None and not _untouched(entry, shown.tensors):
                self._keep_for_holders(index, shown.tensors)
            elif shown.stored is not None and entry is not shown.stored:
                shown.stored.part_from_chunk()

    @torch.no_grad()
    def take_up(self, optimizer: Optimizer) -> list[int]:
        """Writes edits of `optimizer.state` since the last call into the chunks.

        Returns:
            Indices of the parameters whose states changed, except by edits of views in place.

        Raises:
            UsageError: An entry lacks a tensor that the update needs, or holds one of another
                shape. Or user code has edited a copy that a step has outdated.
        """
        if not self._has_states():
            return []
        state = optimizer.state
        changed = []
        for index, param in self._params(optimizer):
            entry = state.get(param)
            shown = self._shown.get(index)
            if shown is None:
                edited = entry is not None and self._put(optimizer, index, param, entry, {})
            elif isinstance(entry, StoredState) and entry is shown.stored:
                edited = entry.take_up()
                if entry.cleared:
                    del self._shown[index]
            elif edited := shown.stored is not None or not _untouched(entry, shown.tensors):
                if shown.stored is not None:
                    shown.stored.part_from_chunk()
                self._keep_for_holders(index, shown.tensors)
                if not entry or not self._put(optimizer, index, param, entry, shown.tensors):
                    reset_states(self._engine, index, param)
                    del self._shown[index]
            if edited:
                changed.append(index)
        return changed

    def _put(
        self,
        optimizer: Optimizer,
        index: int,
        param: torch.Tensor,
        entry: dict[str, Any],
        tensors: dict[str, torch.Tensor],
    ) -> bool:
        """Writes an entry's tensors into the chunks; returns False if it has none."""
        engine = self._engine
        assert engine.rule is not None
        name, needed = engine.names[index], engine.rule.entries
        lacking = sorted(key for key in needed if entry.get(key) is None)
        if len(lacking) == len(needed) and not (tensors and engine.rule.counts_steps):
            return False  # it has at most entries of user code
        if lacking:
            raise UsageError(
                f"optimizer.state of parameter '{name}' has no {', '.join(map(repr, lacking))}, "
                f"which {engine.rule.name} needs: empty the whole entry to start its states anew, "
                f"or put all of {', '.join(map(repr, sorted(needed)))} there"
            )
        written = {
            key: entry[key]
            for key in (*engine.session.state_names(index), "step")
            if key in entry and entry[key] is not tensors.get(key)
        }
        for key, value in written.items():
            if key in engine.rule.states and value.shape != param.shape:
                raise UsageError(
                    f"optimizer.state['{key}'] of parameter '{name}' has shape "
                    f"{tuple(value.shape)}; the parameter has {tuple(param.shape)}"
                )
        write_states(engine, index, param, written)
        self._show(optimizer, index, param)
        return True

    def _show(self, optimizer: Optimizer, index: int, param: torch.Tensor) -> None:
        """Puts castor's tensors into the entry, which stays the same object if possible."""
        made = state_entry(self._engine, index)
        entry = optimizer.state.get(param)
        if isinstance(made, StoredState):
            notes = entry.held() if isinstance(entry, StoredState) else dict(entry or {})
            for key in notes.keys() - {*self._engine.session.state_names(index), "step"}:
                made[key] = notes[key]
            optimizer.state[param] = made
            self._shown[index] = _Shown(stored=made, tensors={})
            return
        if entry is None:
            entry = optimizer.state[param] = {}
        entry.update(made)
        self._shown[index] = _Shown(stored=None, tensors=made)

    def _keep_for_holders(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        """Gives views that user code holds their own memory, before their chunk is written."""
        views = list(tensors.values())
        # The list, the dictionary, the generator's variable and the argument: one reference each.
        if not any(sys.getrefcount(view) > _OWN_REFERENCES for view in views):
            return
        self._engine.session.await_updates()
        self._engine.session.release_states(index)
        if "step" in tensors:
            tensors["step"].data = tensors["step"].clone()  # it was a view of all parameters' steps

    def _has_states(self) -> bool:
        rule = self._engine.rule
        return rule is not None and bool(rule.states)

    def _params(self, optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
        for group in optimizer.param_groups:
            for param in group["params"]:
                index = self._engine.trained_index(param)
                if index is not None:
                    yield index, param


_OWN_REFERENCES = 4


def _untouched(entry: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> bool:
    return entry is not None and all(entry.get(key) is one for key, one in tensors.items())


class GroupMembers:
    """The group of each parameter of the model in an optimizer's present `param_groups`."""

    def __init__(self, engine: Engine, *, fused: bool) -> None:
        self._engine = engine
        self._fused = fused
        self._seen: list[list[int]] = []
        self.group_of = array("q", [NO_GROUP]) * len(engine.params)
        """Position of each parameter's group; NO_GROUP if this optimizer does not hold it."""
        self.digest = 0
        """Checksum that is equal on ranks whose groups hold the same parameters."""

    def follow(self, optimizer: Optimizer) -> None:
        """Reads the groups, if their parameters have changed since the last call.

        Raises:
            UsageError: The groups hold a parameter twice, or one that is not the model's. Or they
                hold a parameter of another optimizer, or one that was boosted without states.
        """
        groups = [group["params"] for group in optimizer.param_groups]
        seen = [[id(param) for param in params] for params in groups]
        if seen == self._seen:
            return
        group_of = array("q", [NO_GROUP]) * len(self._engine.params)
        for position, params in enumerate(groups):
            for param in params:
                index = self._checked(param, position, optimizer)
                if group_of[index] != NO_GROUP:
                    raise UsageError(
                        f"optimizer.param_groups hold parameter '{self._engine.names[index]}' "
                        f"twice, in groups {group_of[index]} and {position}: take it out of one"
                    )
                group_of[index] = position
        self.group_of, self._seen = group_of, seen
        self.digest = zlib.crc32(group_of.tobytes())

    def _checked(self, param: torch.Tensor, position: int, optimizer: Optimizer) -> int:
        engine = self._engine
        index: int | None = engine.index_of.get(param)  # type: ignore[call-overload]
        if index is None:
            raise UsageError(
                f"optimizer.param_groups[{position}] holds a parameter of shape "
                f"{tuple(param.shape)} that the model did not have when it was boosted: give it to "
                "an optimizer of its own, or boost the model again with it (booster.reboost)"
            )
        name = engine.names[index]
        if param.requires_grad and (
            not engine.trained[index] or engine.ruled[index] != self._fused
        ):
            raise UsageError(
                f"optimizer.param_groups[{position}] holds parameter '{name}', for which the model "
                "was boosted without a place for "
                f"{'a gradient' if not engine.trained[index] else 'its optimizer states'}: have it "
                "in a group before booster.boost, or boost the model again (booster.reboost)"
            )
        for other in engine.optimizers:
            if other is not optimizer and any(
                param is one for group in other.param_groups for one in group["params"]
            ):
                raise UsageError(
                    f"two optimizers hold parameter '{name}' now; take it out of the groups of one"
                )
        return index
