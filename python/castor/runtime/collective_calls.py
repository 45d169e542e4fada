"""Collective calls of the ranks that share a boosted model, outside its passes and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from castor import _C
from castor.runtime.model_shards import ModelShards, ShardFinder
from castor.runtime.rank_group import DataParallelGroup, RankGroup, Result


class CollectiveCalls:
    """The collective calls of Engine, in which ranks serve optimizer states that one rank reads."""

    session: _C.Session
    model_shards: ModelShards | None
    ranks: DataParallelGroup | None
    """The ranks that share the model; None: this process is alone."""
    everyone: RankGroup | None = None
    """All ranks, where each has a part of the model; None: each has the full model."""
    ep_group: RankGroup | None = None
    """The expert-parallel ranks, which have other data; None: there are none."""
    cp_group: RankGroup | None = None
    """The context-parallel ranks, which compute other tokens of batches; None: there are none."""
    check_step: Callable[[], None] | None = None
    """Check by a wrapper around the model, which may refuse a step; None: there is no wrapper."""

    @property
    def shared(self) -> bool:
        """Whether other ranks train the model too, or have shards or stages of it."""
        return self.ranks is not None or self.model_shards is not None

    @property
    def savers(self) -> RankGroup | None:
        """The ranks that write checkpoints together; None: this process is alone."""
        return self.everyone or (self.ranks.saves if self.ranks else None)

    def barrier(self) -> None:
        """Returns when every rank that shares the model has called it, between passes.

        Raises:
            Error: A rank is gone.
            UsageError: A rank does something else; every rank that waits for it raises it.
        """
        if self.model_shards is not None:
            self.model_shards.barrier()
        self.gather(None)

    def check_cp_group(self, place: str) -> None:
        """Checks, before a call of all ranks, that no context-parallel rank is in a pass.

        In a pass these ranks wait for each other, and would not notice the call.

        Args:
            place: Name of the call, for a message.

        Raises:
            Error: A rank is gone.
            UsageError: A rank is in a pass; every rank raises it.
        """
        # Stages that have lost each other report the cause themselves.
        if self.cp_group and not (self.model_shards and self.model_shards.broken):
            self.cp_group.all_gather_object(None, place=place)

    def answer_first(self) -> None:
        """Serves rank 0's reads of optimizer states until rank 0 makes this call too.

        Collective: every rank calls it.

        Raises:
            Error: A rank is gone.
            UsageError: A rank does something else; every rank raises it.
        """
        if self.ranks is None:
            return
        if self.ranks.rank == 0:
            self.session.end_service()
        else:
            self.session.serve_states()

    def gather(self, value: Any) -> list[Any]:
        """Returns the picklable values of all ranks, in rank order.

        Raises:
            Error: A rank is gone.
            UsageError: A rank does something else; every rank raises it.
        """
        self.check_cp_group("a save")
        if self.ranks is None:
            return [value]
        self.answer_first()
        return self.ranks.all_gather_object(value, place="a save")

    def gather_to_load(self, value: Any) -> list[Any]:
        """Gathers as gather does, before a load, when nothing has been changed.

        Raises:
            Error: A rank is gone.
            UsageError: A rank does something else; every rank raises it.
        """
        if self.everyone is not None:
            self.barrier()
            return self.everyone.all_gather_object(value)
        self.check_cp_group("a load")
        if self.ranks is None:
            return [value]
        self.session.barrier_to_load()
        return self.ranks.all_gather_object(value)

    def on_first(self, work: Callable[[], Result], shard_finder: ShardFinder) -> Result:
        """Runs `work` on rank 0 for all; the others serve optimizer states that it reads.

        Args:
            work: Called once, on rank 0. Where ranks have shards or stages of the model, it reads
                nothing of the model.
            shard_finder: See BoostedModel.

        Returns:
            What `work` returned, on every rank.

        Raises:
            Exception: What `work` raised on rank 0.
            UsageError: A rank does something else; every rank raises it.
        """
        del shard_finder
        if self.everyone is not None:
            self.barrier()
            return self.everyone.on_first(work, serve=_nothing, end_service=_nothing)
        self.check_cp_group("a save or a load")
        if self.ranks is None:
            return work()
        self.answer_first()  # checks that all ranks save, and names one that does not
        session = self.session
        return self.ranks.on_first(
            work, serve=session.serve_states, end_service=session.end_service
        )


def _nothing() -> None:
    """Serves nothing: `work` reads nothing of other ranks."""
