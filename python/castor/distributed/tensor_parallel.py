"""Tensor parallelism of a model's layers, on plain local tensors.

Source: Shoeybi et al. 2019 (Megatron-LM, section 3). Parameters stay the same objects, so ties and
optimizers keep them. Modules stay the same objects too, with another `forward`.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from castor import _C
from castor.distributed import styles
from castor.distributed.adapters import with_adapters
from castor.distributed.collectives import all_reduce, gather_columns
from castor.distributed.expert_exchange import ExpertExchange
from castor.distributed.inputs import asked_of, check_inputs
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.distributed.rank_rng import Generators, digest_of, give_rank_rng
from castor.distributed.sequence_shards import SequenceShards
from castor.distributed.shard_spec import ShardSpec, check_reader, local_shard
from castor.distributed.vocabulary_loss import VocabularyLoss
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook
from castor.runtime.model_shards import Runs, Segments
from castor.runtime.packed import is_packed
from castor.runtime.rank_group import RankGroup

# --- Check that tensor-parallel ranks compute equal gradients of full parameters ------------------

_ALIKE = 1e-2
"""Largest relative difference between two ranks' sums of squares of one gradient."""
_ROUNDING = 1e-10
"""Sum of squares that may come from rounding alone, relative to that of all gradients."""


def check_full_gradients(
    model: nn.Module,
    params: Sequence[torch.Tensor],
    squares: Sequence[Sequence[float]],
    total: float,
) -> None:
    """Checks, in a step, that ranks have equal gradients of the parameters that all have in full.

    A gradient differs if the plan leaves out a parameter that acts on shards of heads or hidden
    units.

    Args:
        model: The tensor-parallel model.
        params: Parameters that every rank has in full.
        squares: For each rank, the sum of squares of the gradient of each of `params`.
        total: Sum of squares of all gradients of the model.

    Raises:
        UsageError: A gradient differs between ranks; every rank raises it.
    """
    for rank, theirs in enumerate(squares):
        for param, one, other in zip(params, squares[0], theirs, strict=True):
            most, finite = max(one, other), math.isfinite(one) and math.isfinite(other)
            if finite and most > _ROUNDING * total and abs(one - other) > _ALIKE * most:
                name = next(name for name, known in model.named_parameters() if known is param)
                raise UsageError(
                    f"all {len(squares)} tensor-parallel ranks have the full parameter '{name}', "
                    f"and its gradient is another on rank {rank} than on rank 0: it is computed "
                    "with shards of heads or hidden units, which the plan does not say: give a "
                    f"tp_plan that has it, as {{**model.tp_plan, '{name}': "
                    "'replicated_with_grad_allreduce'}"
                )


# --- Tensor parallelism of a model's layers, on plain local tensors -------------------------------

_PARTIAL = "replicated_with_grad_allreduce"


class TensorParallel:
    """A model of which this process has a shard of each layer."""

    def __init__(
        self,
        model: nn.Module,
        plan: Mapping[str, Sequence[str]],
        ranks: ModelParallelGroup,
        *,
        vocab_parallel_loss: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        """Finds out how each parameter is sharded; changes nothing.

        Args:
            model: The full model, on the CPU, lazy or not.
            plan: Styles by name; see castor.distributed.tensor_plan.
            ranks: Ranks that get the shards.
            vocab_parallel_loss: Whether the loss is computed from vocab-parallel logits.
            sequence_parallel: Whether activations between tensor-parallel layers are sharded by
                tokens (sequence parallelism).

        Raises:
            UsageError: A size or a module does not fit its style.
            NotImplementedError: A style is not known, or the loss or the tokens cannot be sharded.
        """
        self.ranks = ranks
        self.exchange = ExpertExchange(model, ranks)
        self.loss = VocabularyLoss(model, ranks) if vocab_parallel_loss else None
        self._tokens = SequenceShards(model, plan, ranks) if sequence_parallel else None
        self.shard_specs: dict[torch.Tensor, ShardSpec] = {}
        self._model = weakref.ref(model)
        self._plan = plan
        self._forwards: dict[nn.Module, styles.Part] = {}
        self._attributes: list[tuple[nn.Module, str, Any]] = []
        self._partial = self._tokens.partial() if self._tokens else []
        modules, params = dict(model.named_modules()), dict(model.named_parameters())
        for name, given in with_adapters(model, plan).items():
            for style in given:
                kind, _, argument = style.partition(":")
                if name in params:
                    self._shard_bare(name, params[name], kind)
                else:
                    self._plan_module(name, modules[name], kind, argument)
        if self.loss:
            self._shard_head(model, self.loss)

    @property
    def model(self) -> Any:
        """The model whose layers are sharded."""
        model = self._model()
        assert model is not None
        return model

    def apply(self) -> None:
        """Leaves this rank's shards of rank 0's values in the model. Collective."""
        model = self.model
        with torch.no_grad():
            for param in model.parameters():
                param.data = local_shard(param.data, self.shard_specs.get(param), self.ranks)
        for module, name, value in self._attributes:
            setattr(module, name, value)
        for module, part in self._forwards.items():
            module.forward = part
        # The model's hooks hold this: it must not hold modules.
        self._attributes.clear()
        self._forwards.clear()

    def start(self, generators: Generators, stages: Sequence[range] | None = None) -> None:
        """Installs the hooks of training, after boost. Collective.

        They check that inputs and RNG states are equal on all ranks. They sum the gradients of
        full parameters that act on shards of activations, and of elements that ranks share.

        Args:
            generators: Generators that the model draws from.
            stages: Numbers of the blocks of each of this process's pipeline stages; None: the
                process has all blocks.
        """
        model = self.model
        for param in set(model.parameters()).intersection(self._partial):
            if param.requires_grad:
                param.register_hook(self.ranks.all_reduce)
        self._partial.clear()
        for param in model.parameters():
            cut = self.shard_specs.get(param)
            if cut and cut.copies > 1 and param.requires_grad:
                param.register_hook(functools.partial(cut.sum_of_copies, ranks=self.ranks))
        generators.broadcast(self.ranks)  # dropout of replicated activations has to be the same
        model.register_forward_pre_hook(
            ModuleHook(_begin_pass, self.ranks, generators), with_kwargs=True
        )
        model.register_forward_hook(ModuleHook(_gather_attentions, self.ranks), with_kwargs=True)
        model.register_forward_hook(ModuleHook(_end_pass, self.ranks), always_call=True)
        if self.loss:
            self.loss.start()
        if self._tokens:
            self._tokens.start(stages, generators)
        else:
            give_rank_rng(model, self._plan, self.ranks.rank, generators)
        self.refuse_readers(model)

    def shard_in(self, stages: Sequence[range] | None) -> None:
        """Tells sequence parallelism, if it is used, new stages; see SequenceShards.shard_in."""
        if self._tokens:
            self._tokens.shard_in(stages)

    def refuse_readers(self, model: nn.Module) -> None:
        """Has state_dict of every module refuse to give shards as full values; see check_reader."""
        for module in model.modules():
            module.register_state_dict_pre_hook(ModuleHook(check_reader, self.ranks))

    def norm(self, params: Sequence[torch.Tensor], squares: Sequence[float]) -> float:
        """Returns the L2 norm of all gradients, each element counted once. Collective.

        Args:
            params: This rank's parameters.
            squares: Sum of squares of the gradient of each of `params`.
        """
        return math.sqrt(self.squared_norm(params, squares))

    def squared_norm(self, params: Sequence[torch.Tensor], squares: Sequence[float]) -> float:
        """Returns the square of the norm; see norm."""
        cut = sum(
            self.shard_specs[param].squared_once(param, s, self.ranks)
            for param, s in zip(params, squares, strict=True)
            if param in self.shard_specs and s
        )
        full = [
            s for param, s in zip(params, squares, strict=True) if param not in self.shard_specs
        ]
        parts = self.ranks.all_gather_object((cut, full))
        total = float(sum(parts[0][1]) + sum(of_rank for of_rank, _ in parts))
        of_all = [param for param in params if param not in self.shard_specs]
        check_full_gradients(self.model, of_all, [squares for _, squares in parts], total)
        return total

    @property
    def peers(self) -> Sequence[RankGroup]:
        """Groups of ranks with the other shards of this model; this rank is in each."""
        return (self.ranks,)

    full_model = None
    """None: every rank has a shard of every layer, so no rank lacks layers."""
    stage, broken = 0, ""
    """There is one stage, and these ranks never disconnect from each other."""

    @property
    def has_first_shard(self) -> bool:
        """Whether this is the first rank of those with equal copies of the full parameters."""
        return self.ranks.rank == 0

    def settle_gradients(self, session: _C.Session, params: Sequence[nn.Parameter]) -> None:
        """Does nothing: after backward the gradients are ready for a step."""

    def barrier(self) -> None:
        """Returns when every rank with a shard of the layers is here. Collective.

        Raises:
            UsageError: A rank is within a pass; every rank raises it.
            Error: A rank is gone.
        """
        self.ranks.all_gather_object(None)

    def full_shape(self, param: torch.Tensor) -> tuple[int, ...] | None:
        """Returns the full shape of a sharded parameter; None for one that is not sharded."""
        cut = self.shard_specs.get(param)
        return None if cut is None else cut.shape

    def local_shard(self, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of a tensor that belongs to a sharded parameter.

        Args:
            param: The sharded parameter.
            full: Full tensor; see ShardSpec.local_shard_of.
        """
        return self.shard_specs[param].local_shard_of(full, self.ranks)

    def runs(self, param: torch.Tensor) -> Runs | Segments | None:
        """Returns the runs of this rank's shard of a parameter; None if it is not sharded."""
        cut = self.shard_specs.get(param)
        return None if cut is None else cut.runs_of(self.ranks)

    def _shard_bare(self, name: str, param: nn.Parameter, kind: str) -> None:
        """Plans a parameter that the plan names itself, instead of its module."""
        if kind in ("colwise", "packed_colwise"):
            self._cut(name, param, max(param.ndim - 2, 0), 2 if kind == "packed_colwise" else 1)
        elif kind == "rowwise":
            if not name.endswith("bias"):
                self._cut(name, param, param.ndim - 1)
        elif kind == "embedding_rowwise":
            self._cut(name, param, 0)
        elif kind == _PARTIAL:
            self._partial.append(param)
        else:
            self._refuse_style(name, kind)

    def _plan_module(self, name: str, module: nn.Module, kind: str, argument: str) -> None:
        size = self.ranks.size
        if kind == "colwise_shared":
            copies, _, shared = argument.partition(",")
            sharing = int(copies), int(shared)
            width = self._shard_linear(name, module, inputs=False, sharing=sharing)
            self._replace(module, styles.columns, width)
        elif kind in ("colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"):
            pieces = int(argument or (2 if kind == "packed_colwise" else 1))
            gathers = kind in ("colwise_gather_output", "colwise_rep")
            width = self._shard_linear(name, module, inputs=False, pieces=pieces, gives_all=gathers)
            self._replace(module, styles.gathered_columns if gathers else styles.columns, width)
        elif kind in ("rowwise", "rowwise_split_input", "rowwise_rep"):
            self._shard_linear(name, module, inputs=True)
            tokens = self._tokens
            reduce = (
                tokens.reduce
                if tokens and name in tokens.rows
                else functools.partial(all_reduce, ranks=self.ranks)
            )
            self._replace(module, styles.rows if kind == "rowwise" else styles.split_rows, reduce)
        elif kind == "embedding_rowwise":
            self._shard_vocabulary(name, module)
        elif kind == "heads":
            if not isinstance(module, nn.Embedding):
                self._refuse_module(name, module, kind)
            self._cut(f"{name}.weight", module.weight, 1)
        elif kind == _PARTIAL:
            self._partial += module.parameters()
        elif kind == "moe_tp_experts":
            self._replace(module, styles.experts)
        elif kind in ("whole_experts", "exchanged_experts"):
            self._shard_experts(name, module, exchanged=kind == "exchanged_experts")
        elif kind == "all_reduce":
            self._replace(module, styles.reduced)
        elif kind == "sharded":
            for attribute in argument.split(","):
                count = getattr(module, attribute, None)
                if not isinstance(count, int) or count % size:
                    raise UsageError(
                        f"{attribute} of '{name}' is {count}, which tp_size={size} ranks cannot "
                        "share; give a tp_size that divides it"
                    )
                self._attributes.append((module, attribute, count // size))
        elif kind == "set":
            attribute, _, value = argument.partition("=")
            self._attributes.append((module, attribute, int(value)))
        elif kind == "heads_of":
            self._replace(module, styles.own_heads, argument)
        else:
            self._refuse_style(name, kind)

    def _shard_head(self, model: nn.Module, loss: VocabularyLoss) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        part = self._forwards.get(head)
        if part is None or part.forward is not styles.gathered_columns:
            raise NotImplementedError(
                f"parallel_output=True needs a vocab-parallel output embedding, and the plan "
                f"of this {type(model).__name__} leaves it unsharded"
            )
        loss.width = part.argument
        count = "nf" if styles.is_conv1d(head) else "out_features"
        self._attributes.append((head, count, len(self.ranks.shard_range(loss.width))))
        self._forwards[head] = styles.Part(head, styles.head, self.ranks, (loss.width, loss))

    def _shard_linear(
        self,
        name: str,
        module: nn.Module,
        *,
        inputs: bool,
        pieces: int = 1,
        sharing: tuple[int, int] = (1, 0),
        gives_all: bool = False,
    ) -> int:
        """Plans the shards of a linear layer; returns the full number of its inputs or outputs.

        Args:
            name: Name of the layer.
            module: The layer.
            inputs: Whether the inputs are sharded (row-parallel); otherwise the outputs are.
            pieces: Number of pieces of the outputs, one behind the other; each is sharded.
            sharing: Number of neighbouring ranks that share a group of outputs; number of outputs
                at the end of each group that all of them have.
            gives_all: Whether outputs are gathered, so the layer keeps its full output count.
        """
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        transposed = styles.is_conv1d(module)
        if not isinstance(weight, nn.Parameter) or not (
            transposed or isinstance(module, nn.Linear)
        ):
            self._refuse_module(name, module, "rowwise" if inputs else "colwise")
        dim = int(inputs) if not transposed else int(not inputs)
        width = weight.shape[dim]
        cut = self._cut(f"{name}.weight", weight, dim, pieces, sharing)
        own = cut.shape_of(self.ranks.rank, self.ranks.size)[dim]
        if not inputs and isinstance(bias, nn.Parameter):
            self._cut(f"{name}.bias", bias, 0, pieces, sharing)
        names = ("nx", "nf") if transposed else ("in_features", "out_features")
        if not gives_all:
            self._attributes.append((module, names[0] if inputs else names[1], own))
        return width

    def _shard_vocabulary(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            self._refuse_module(name, module, "embedding_rowwise")
        self._cut(f"{name}.weight", module.weight, 0)
        rows, padding = self.ranks.shard_range(module.num_embeddings), module.padding_idx
        if padding is not None:
            padding = padding - rows.start if padding in rows else None
        self._attributes.append((module, "num_embeddings", len(rows)))
        self._attributes.append((module, "padding_idx", padding))
        self._replace(module, styles.vocabulary, (rows.start, module.num_embeddings))

    def _shard_experts(self, name: str, module: nn.Module, *, exchanged: bool) -> None:
        count, params = getattr(module, "num_experts", None), dict(module.named_parameters())
        of_each = {param.shape[:1] == (count,) for param in params.values()}
        if of_each != {True} or len(inspect.signature(module.forward).parameters) != 3:
            raise NotImplementedError(
                f"'{name}' is a {type(module).__name__}, whose experts castor cannot shard: it "
                "takes modules of transformers with num_experts and parameters of all experts, "
                "called with hidden states, chosen experts and their weights"
            )
        for param_name, param in params.items():
            self._cut(f"{name}.{param_name}", param, 0)
        rows = self.ranks.shard_range(int(count))  # type: ignore[arg-type]
        self._attributes.append((module, "num_experts", len(rows)))
        if exchanged:
            self._replace(module, styles.exchanged_experts, (self.exchange, name, count))
        else:
            self._replace(module, styles.own_experts, rows.start)

    def _cut(
        self,
        name: str,
        param: torch.Tensor,
        dim: int,
        pieces: int = 1,
        sharing: tuple[int, int] = (1, 0),
    ) -> ShardSpec:
        if is_packed(param):
            raise UsageError(
                f"parameter '{name}' is quantised, and a shard of its bytes is no shard of its "
                "weights: train quantised models without tp_size and ep_size"
            )
        length, (copies, shared) = param.shape[dim], sharing
        if copies > 1:
            groups, left = divmod(self.ranks.size, copies)
            each = 0 if left or length % groups else length // groups
            if dim or not 0 < shared <= each or (each - shared) % copies:
                raise UsageError(
                    f"dimension {dim} of '{name}' has {length} elements, which 'colwise_shared:"
                    f"{copies},{shared}' cannot shard over {self.ranks.size} ranks"
                )
        elif length % pieces or length // pieces < self.ranks.size:
            raise UsageError(
                f"dimension {dim} of '{name}' has {length} elements in {pieces} pieces, too few or "
                f"uneven for {self.ranks.size} ranks"
            )
        cut = ShardSpec(
            dim=dim, shape=tuple(param.shape), pieces=pieces, copies=copies, shared=shared
        )
        if self.shard_specs.setdefault(param, cut) != cut:
            raise UsageError(
                f"'{name}' is tied to a parameter that is sharded in another way; give a tp_plan "
                "that shards both in the same way"
            )
        return cut

    def _replace(self, module: nn.Module, forward: styles.Forward, argument: Any = None) -> None:
        if module in self._forwards:
            raise UsageError(f"tp_plan gives a {type(module).__name__} two ways to compute")
        if "forward" in vars(module):
            raise UsageError(
                f"forward of a {type(module).__name__} has been replaced, and tensor parallelism "
                "needs its own: boost the model first"
            )
        self._forwards[module] = styles.Part(module, forward, self.ranks, argument)

    def _refuse_module(self, name: str, module: nn.Module, kind: str) -> NoReturn:
        raise UsageError(f"'{name}' is a {type(module).__name__}, which '{kind}' cannot shard")

    def _refuse_style(self, name: str, kind: str) -> NoReturn:
        raise NotImplementedError(
            f"the plan shards '{name}' by '{kind}', which castor does not know; give a tp_plan of "
            "your own (castor.distributed.tensor_plan lists its styles)"
        )


def _begin_pass(
    ranks: ModelParallelGroup,
    generators: Generators,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Pre-hook of the model: checks that inputs and RNG states are equal. Collective.

    RNG states that differ in training become rank 0's.

    Raises:
        UsageError: Ranks were given different inputs; see check_inputs.
    """
    drawn_from = digest_of(generators.states()) if model.training else None
    if len(set(check_inputs(ranks, model, args, kwargs, extra=drawn_from))) > 1:
        generators.broadcast(ranks)  # one has drawn alone, as a loader on that rank does


def _gather_attentions(
    ranks: ModelParallelGroup,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """Hook of the model: gathers attention weights of all heads, if asked for. Collective."""
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if heads is None or not asked_of(model, kwargs, "output_attentions"):
        return output
    if not hasattr(output, "items"):
        raise NotImplementedError(
            f"output_attentions=True with tp_size={ranks.size} gathers the heads of outputs that "
            f"have names, and this {type(model).__name__} gave a {type(output).__name__}: leave "
            "return_dict=False out"
        )
    for name, given in list(output.items()):
        if name.endswith("attentions") and isinstance(given, tuple):
            output[name] = tuple(_of_all_heads(one, heads, ranks) for one in given)
    return output


def _of_all_heads(own: Any, heads: int, ranks: ModelParallelGroup) -> Any:
    """Gathers attention weights (batch, own heads, queries, keys) of this rank to all heads."""
    if not isinstance(own, torch.Tensor) or own.ndim != 4 or own.shape[1] * ranks.size != heads:
        return own
    return gather_columns(own.transpose(1, -1), ranks, heads).transpose(1, -1)


def _end_pass(ranks: ModelParallelGroup, *_: Any) -> None:
    ranks.entered.forget()
