"""Names and shapes of the hub's files, by transformers' own weight conversions.

transformers 5 holds some weights under other names and in other shapes than the hub's files. The
experts of a layer, for example, are one fused tensor in memory and separate tensors in files.
`save_pretrained` undoes that by `revert_weight_conversion`. This module runs the function twice:

- on the meta device, to find the tensors of the files and the sources of each;
- for each group of tensors that belong together, when its turn to be written comes.

transformers is never imported here: a model of its classes has already imported it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from castor.checkpoint.container import ComputedTensor, SavedTensor, values_of
from castor.checkpoint.snapshot import SnapshotTensor, full_shape
from castor.errors import CheckpointError
from castor.lazy.replay import in_own_pages
from castor.runtime.boosted_model import compiled_from
from castor.runtime.engine import engines_holding
from castor.runtime.weight_conversions import (
    LOADING,
    FileLayout,
    file_layout,
    is_transformers_model,
)


@dataclass(frozen=True, kw_only=True)
class HubNames:
    """The layout of a transformers model's tensors in the files of save_pretrained."""

    model: Any
    """The model, or the same model built on the meta device: conversions read its config."""
    layout: FileLayout

    def in_files(self, tensors: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        """Returns the tensors of the files by name, in the order of save_pretrained.

        Args:
            tensors: The model's tensors by state_dict key, each once.

        Raises:
            CheckpointError: transformers cannot revert its conversions.
        """
        kept = {key: tensor for key, tensor in tensors.items() if key not in self.layout.left_out}
        if self.layout.transforms is None:
            return kept
        plan = self.plan({key: (one.dtype, tuple(one.shape)) for key, one in kept.items()})
        together: dict[int, list[PlannedTensor]] = {}
        for entry in plan:
            together.setdefault(entry.group, []).append(entry)
        groups = {
            number: Group(self, {key: kept[key] for key in entries[0].sources}, entries)
            for number, entries in together.items()
            if not entries[0].unchanged
        }
        return {
            entry.name: kept[entry.sources[0]]
            if entry.unchanged
            else groups[entry.group].tensor(entry)
            for entry in plan
        }

    def plan_of_files(
        self, shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
    ) -> list[PlannedTensor]:
        """Returns the plan of a full model, for callers that do not need dtypes.

        Args:
            shapes: Full shape of each tensor, by state_dict key.
            tied: Keys that are in no file, see castor.checkpoint.model.tied_keys.
        """
        return self.plan(
            {
                key: (torch.float32, shape)
                for key, shape in shapes.items()
                if key not in tied and key not in self.layout.left_out
            }
        )

    def plan(
        self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> list[PlannedTensor]:
        """Returns the tensors of the files with their sources; computes no values.

        Args:
            tensors: (dtype, shape) of each of the model's tensors, by key.

        Raises:
            CheckpointError: transformers cannot revert its conversions.
        """
        if self.layout.transforms is None:
            return [
                PlannedTensor(
                    name=key,
                    dtype=dtype,
                    shape=shape,
                    sources=(key,),
                    group=number,
                    unchanged=True,
                    memory=(number, _numel(shape) * dtype.itemsize),
                )
                for number, (key, (dtype, shape)) in enumerate(tensors.items())
            ]
        placeholders = {
            key: torch.empty(shape, dtype=dtype, device="meta")
            for key, (dtype, shape) in tensors.items()
        }
        key_of = {id(tensor): key for key, tensor in placeholders.items()}
        with _Origins(placeholders) as origins:
            reverted = self.revert(placeholders)
        sources = {name: origins.of(tensor) for name, tensor in reverted.items()}
        roots = _connected(sources.values())
        members: dict[str, dict[str, None]] = {}
        for name in reverted:
            members.setdefault(roots[sources[name][0]], {}).update(dict.fromkeys(sources[name]))
        numbers = {root: number for number, root in enumerate(members)}
        order = {key: place for place, key in enumerate(tensors)}
        planned = []
        for name, tensor in reverted.items():
            root = roots[sources[name][0]]
            planned.append(
                PlannedTensor(
                    name=name,
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape),
                    sources=tuple(sorted(members[root], key=order.__getitem__)),
                    group=numbers[root],
                    unchanged=id(tensor) in key_of,
                    memory=(_memory(tensor), tensor.untyped_storage().nbytes()),
                )
            )
        return planned

    def revert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Converts tensors as transformers does when it saves them.

        Raises:
            CheckpointError: transformers cannot revert its conversions.
        """
        loading: Any = sys.modules[LOADING]
        like = _Like(self.model, self.layout.transforms, tensors)
        try:
            reverted: dict[str, torch.Tensor] = loading.revert_weight_conversion(
                like, dict(tensors)
            )
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot revert the weight conversions of this "
                f"{type(self.model).__name__}, so that its files cannot have the names of the hub "
                f"({type(error).__name__}: {error}); its save_pretrained fails alike"
            ) from error
        return reverted


def hub_names_of(model: nn.Module) -> HubNames | None:
    """Returns save_pretrained's layout of a model; None: the model is not transformers'."""
    model = compiled_from(model)
    engines = engines_holding(model)
    for engine in engines:
        full = engine.model_shards.full_model if engine.model_shards else None
        if full is not None:
            return None if full.files is None else HubNames(model=model, layout=full.files)
    if not is_transformers_model(model):
        return None
    layout = file_layout(
        model, sum(_numel(full_shape(engines, param)) for param in model.parameters())
    )
    return None if layout is None else HubNames(model=model, layout=layout)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


class _Like:
    """A substitute for the model in transformers' conversions, with tensors of full shapes.

    Some conversions look up the shape of a parameter, of which a boosted model may have a shard.
    """

    def __init__(
        self, model: Any, transforms: Sequence[Any] | None, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._model = model
        self._weight_conversions = None if transforms is None else list(transforms)
        self._tensors = tensors

    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns the tensor of a key, or else the model's parameter."""
        found = self._tensors.get(name)
        return self._model.get_parameter(name) if found is None else found

    def __getattr__(self, name: str) -> Any:
        """Returns the model's attribute."""
        return getattr(self._model, name)


# --- the plan -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor of a file, and the model's tensors that it is made of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Keys of all the model's tensors that its group is made of."""
    group: int
    """Number of the group; tensors of one group are made together."""
    unchanged: bool
    """Whether the tensor is one of the model's as it is, perhaps under another name."""
    memory: tuple[int, int]
    """(number, bytes) of the memory in which transformers has the tensor, alone or with others."""


def in_names_of_files(
    stored: Iterable[str],
    plan: Sequence[PlannedTensor],
    keys: Container[str],
    *,
    sealed: bool,
    record: Mapping[str, Any] | None,
) -> bool:
    """Whether files have names of save_pretrained that are not the model's own.

    Args:
        stored: Names in the files.
        plan: Plan of the model.
        keys: Keys of the model's state dict.
        sealed: Whether castor wrote the files. Earlier versions of castor knew only the model's
            names.
        record: The manifest's record of the names, see record_of; None: there is none.
    """
    stored = set(stored)
    own = {entry.name for entry in plan if entry.unchanged and entry.sources == (entry.name,)}
    if {entry.name for entry in plan} <= own:
        return False
    if record is not None:
        return bool(record["names"] == "files")
    theirs = {entry.name for entry in plan}
    if all(name in keys for name in stored) and (sealed or not stored <= theirs):
        return False
    return bool(stored & (theirs - own))


def keys_of_files(model: Any, stored: Iterable[str], keys: Mapping[str, Any]) -> dict[str, str]:
    """Maps each name in the files to the model's key that from_pretrained reads it for.

    Args:
        model: A model of transformers, or of a library like it, whose files have the model's names.
        stored: Names in the files.
        keys: The model's state dict, or any mapping with its keys.
    """
    loading: Any = sys.modules.get(LOADING)
    if not is_transformers_model(model) or not hasattr(loading, "rename_source_key"):
        return {name: name for name in stored}
    mapping: Any = sys.modules["transformers.conversion_mapping"]
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    # The loop follows transformers' convert_and_load_state_dict_in_model.
    found = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        prefix = model.base_model_prefix
        key, pattern = loading.rename_source_key(name, renamings, converters, prefix, keys)
        if key not in keys and name in keys:
            key, pattern = loading.rename_source_key(name, [], [], prefix, keys)
        del pattern
        found[name] = key
    return found


def own_key_mapping(model: Any) -> dict[str, str] | None:
    """Returns the key_mapping with which from_pretrained made the model; None: there was none."""
    used = getattr(model, "_weight_conversions", None)
    if not used or not is_transformers_model(model):
        return None
    loading: Any = sys.modules[LOADING]
    mapping: Any = sys.modules["transformers.conversion_mapping"]

    def patterns(one: Any) -> tuple[str, str]:
        return one._original_source_patterns[0], one._original_target_patterns[0]

    known = {patterns(one) for one in mapping.get_model_conversion_mapping(model)}
    given = [patterns(one) for one in used if type(one) is loading.WeightRenaming]
    return {source: target for source, target in given if (source, target) not in known} or None


class _Origins(TorchDispatchMode):
    """A dispatch mode that tracks which of a model's tensors the results of operations come from.

    It tells tensors apart by their memory on the meta device.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._keys = {_memory(tensor): {key: None} for key, tensor in tensors.items()}
        self._alive: list[Any] = [tensors]

    def of(self, tensor: torch.Tensor) -> list[str]:
        """Returns the keys of the model's tensors that a tensor is made of."""
        return list(self._keys[_memory(tensor)])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Adds the origins of an operation's arguments to those of its results."""
        result = func(*args, **(kwargs or {}))
        taken: dict[str, None] = {}
        for leaf in tree_flatten((args, kwargs or {}))[0]:
            if isinstance(leaf, torch.Tensor):
                taken.update(self._keys.get(_memory(leaf), {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor):
                self._keys.setdefault(_memory(leaf), {}).update(taken)
                self._alive.append(leaf)
        return result


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _connected(sets: Iterable[list[str]]) -> dict[str, str]:
    """Maps each key to one key that represents all keys connected with it through the sets."""
    root: dict[str, str] = {}

    def find(key: str) -> str:
        while root.setdefault(key, key) != key:
            root[key] = root[root[key]]
            key = root[key]
        return key

    for keys in sets:
        for key in keys:
            root[find(key)] = find(keys[0])
    return {key: find(key) for key in root}


# --- the values ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ConvertedTensor(ComputedTensor):
    """A tensor of a file that transformers' conversions make of other tensors."""

    group: Group
    place: int
    memory: tuple[int, int]
    """See PlannedTensor."""

    def own(self, *, replicated: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the full tensor and a mask of the elements that this rank writes; None: none.

        Args:
            replicated: Whether this rank writes the tensors that are the same on several ranks.
        """
        return self.group.own(self.place, replicated=replicated)


@dataclass(kw_only=True)
class _Made:
    """Tensors of a group that have been made and wait for their turn."""

    left: dict[int, Any] = field(default_factory=dict)


class Group:
    """A group of tensors of files that are made together, from the same tensors of a model.

    All are made when the first is asked for, and each is dropped when it is handed out. If tensors
    are asked for in the order of the files, about one layer's experts are in memory at a time.
    """

    def __init__(
        self,
        names: HubNames,
        sources: Mapping[str, SavedTensor],
        planned: Sequence[PlannedTensor],
    ) -> None:
        """Stores the arguments; tensors are made when the first is asked for.

        Args:
            names: Layout of the model's files.
            sources: The model's tensors that the group is made of, by key.
            planned: All tensors of the group, in order.
        """
        self._names = names
        self._sources = sources
        self._planned = planned
        self._place = {entry.name: place for place, entry in enumerate(planned)}
        self._made = _Made()
        self._not_written = len(planned)

    def tensor(self, entry: PlannedTensor) -> ConvertedTensor:
        """Returns a tensor of the group, to be computed when it is written."""
        place = self._place[entry.name]
        return ConvertedTensor(
            dtype=entry.dtype,
            shape=entry.shape,
            compute=partial(self._value, place),
            written=self._written,
            group=self,
            place=place,
            memory=entry.memory,
        )

    @property
    def bytes_held(self) -> int:
        """Bytes of tensors that have been made and not handed out yet."""
        made = [leaf for one in self._made.left.values() for leaf in tree_flatten(one)[0]]
        return sum({_memory(one): one.untyped_storage().nbytes() for one in made}.values())

    def _value(self, place: int) -> torch.Tensor:
        if place not in self._made.left:
            values = {key: values_of(one) for key, one in self._sources.items()}
            self._made.left = dict(enumerate(self._make(values)))
        value: torch.Tensor = self._made.left.pop(place)
        return value

    def own(self, place: int, *, replicated: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns what ConvertedTensor.own returns for the tensor at `place`."""
        if place not in self._made.left:
            parts = [
                (key, _local_shard(one, replicated=replicated))
                for key, one in self._sources.items()
            ]
            if all(part is None for _, part in parts):
                return None
            values = {key: self._filled(key, part, mask=False) for key, part in parts}
            masks = {key: self._filled(key, part, mask=True) for key, part in parts}
            del parts
            pairs = zip(self._make(values), self._make(masks), strict=True)
            self._made.left = dict(enumerate(pairs))
        pair: tuple[torch.Tensor, torch.Tensor] = self._made.left.pop(place)
        return pair

    def _filled(
        self, key: str, part: list[tuple[int, torch.Tensor]] | None, *, mask: bool
    ) -> torch.Tensor:
        """Returns a full tensor with this rank's shard in it, or a mask of the shard.

        The other pages of a large tensor are never touched, and so take no memory.
        """
        source = self._sources[key]
        dtype = torch.bool if mask else source.dtype
        flat = in_own_pages(torch.Size([max(_numel(source.shape), 1)]), dtype)
        runs = source.runs if isinstance(source, SnapshotTensor) else None
        if flat.nbytes < 2**20:
            flat.zero_()
        for begin, values in part or ():
            end = begin + values.numel()
            places = [(begin, values.numel())] if runs is None else runs.of(begin, end)
            for first, count in places:
                if first is not None:  # None: another rank has the same elements and writes them
                    flat[first : first + count] = True if mask else values[:count]
                values = values[count:]
        return flat[: _numel(source.shape)].view(tuple(source.shape))

    @torch.no_grad()
    def _make(self, values: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        made = list(self._names.revert(values).values())
        values.clear()
        shapes = [tuple(tensor.shape) for tensor in made]
        if shapes != [entry.shape for entry in self._planned]:
            raise CheckpointError(
                f"transformers converts {', '.join(self._sources)} alone otherwise than together "
                "with the rest of the model, so that its files cannot be streamed; save it with "
                "its own save_pretrained"
            )
        return made

    def _written(self) -> None:
        self._not_written -= 1
        if self._not_written == 0:
            for source in self._sources.values():
                if isinstance(source, ComputedTensor) and source.written is not None:
                    source.written()


def _local_shard(tensor: SavedTensor, *, replicated: bool) -> list[tuple[int, torch.Tensor]] | None:
    """Returns the runs of a tensor that this rank writes: (first element, elements); None: none.

    Elements are counted in this rank's tensor. `replicated`: see ConvertedTensor.own.
    """
    if isinstance(tensor, SnapshotTensor):
        found = []
        for at, piece in tensor.own():
            # The piece is valid until the next one is asked for.
            values = torch.frombuffer(bytearray(piece), dtype=torch.uint8).view(tensor.dtype)
            found.append((at // tensor.element_size(), values))
        return found or None
    if not replicated or not isinstance(tensor, torch.Tensor) or tensor.is_meta:
        return None
    return [(0, tensor.detach().cpu().reshape(-1))] if tensor.numel() else None


def own_runs(
    values: torch.Tensor, mine: torch.Tensor, *, most: int
) -> list[tuple[int, torch.Tensor]] | None:
    """Returns the runs of values that a rank writes: (first element in row-major order, elements).

    Args:
        values: The full tensor.
        mine: Mask of the elements that the rank writes, of the same shape.
        most: Largest number of runs; with more of them, the function returns None.
    """
    flat = mine.reshape(-1)
    if bool(flat.all()):
        return [(0, values.reshape(-1))]
    padded = torch.zeros(flat.numel() + 2, dtype=torch.int8)
    padded[1:-1] = flat
    edges = padded.diff().nonzero().flatten()
    if edges.numel() > 2 * most:
        return None
    found = values.reshape(-1)
    return [(first, found[first:end]) for first, end in edges.view(-1, 2).tolist()]


# --- the record in a manifest -------------------------------------------------------------------


def record_of(
    layout: FileLayout, tensors: Mapping[str, SavedTensor], *, in_files: bool
) -> dict[str, Any]:
    """Returns the manifest's record of a layout, by which `castor convert` writes the same files.

    Args:
        layout: Layout of the model's files.
        tensors: Tensors by the names that they are written under.
        in_files: Whether these are the names of save_pretrained's files; if not, the model's own.
    """
    return {
        "names": "files" if in_files else "model",
        "transforms": _transforms_recorded(layout.transforms),
        "num_parameters": layout.num_parameters,
        "left_out": list(layout.left_out),
        "order": list(tensors),
    }


def _transforms_recorded(transforms: Sequence[Any] | None) -> Any:
    """Returns transforms as JSON.

    They are recorded because the files that a model was read from decide the names that
    save_pretrained writes: see transformers' `_weight_conversions`.

    Returns:
        A list; None where there are no transforms; or the name of a class that is not
        transformers' and so cannot be found again.
    """
    if transforms is None:
        return None
    try:
        return [_recorded(one) for one in transforms]
    except _UnknownClassError as error:
        return str(error)


class _UnknownClassError(Exception):
    """A class that is not of transformers.core_model_loading."""


def _recorded(thing: Any) -> Any:
    loading: Any = sys.modules[LOADING]
    kind = type(thing)
    if not isinstance(thing, loading.WeightTransform | loading.ConversionOps):
        return thing
    if getattr(loading, kind.__name__, None) is not kind:
        raise _UnknownClassError(kind.__qualname__)
    if isinstance(thing, loading.ConversionOps):
        return {"class": kind.__name__, "state": {k: _recorded(v) for k, v in vars(thing).items()}}
    arguments = {
        name: [_recorded(one) for one in thing.operations]
        if name == "operations"
        else getattr(thing, f"_original_{name}" if name.endswith("_patterns") else name)
        for name in inspect.signature(kind).parameters
    }
    scope = {"scope_prefix": thing.scope_prefix, "base_model_prefix": thing.base_model_prefix}
    return {"class": kind.__name__, "arguments": arguments, "scope": scope}


def transforms_from(record: Any) -> list[Any] | None:
    """Makes the transforms of a record. Requires that transformers has been imported.

    Raises:
        CheckpointError: The record names a class that is not transformers', or that this version
            of transformers lacks.
    """
    if record is None:
        return None
    if isinstance(record, str):
        raise CheckpointError(
            f"the model was read by conversions of a class of its own, {record}, which a "
            "checkpoint cannot name: write its files with booster.save_model"
        )
    return [_from_record(one) for one in record]


def _from_record(record: Any) -> Any:
    if not isinstance(record, dict):
        return record
    loading: Any = sys.modules[LOADING]
    kind: Any = getattr(loading, record["class"], None)
    if not isinstance(kind, type) or not issubclass(
        kind, loading.WeightTransform | loading.ConversionOps
    ):
        raise CheckpointError(
            f"the checkpoint was written with a transformers whose weight conversions have a "
            f"class {record['class']}, which this one lacks; use that version or a later one"
        )
    if "state" in record:
        operation: Any = object.__new__(kind)
        vars(operation).update({key: _from_record(one) for key, one in record["state"].items()})
        return operation
    arguments = dict(record["arguments"])
    if "operations" in arguments:
        arguments["operations"] = [_from_record(one) for one in arguments["operations"]]
    transform = kind(**arguments)
    for name, value in record["scope"].items():
        setattr(transform, name, value)
    return transform
