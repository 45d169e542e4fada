"""What castor registers on the modules of a boosted model."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from castor.errors import UsageError


class ModuleHook(functools.partial[Any]):
    """A hook that belongs to one boosted model: it keeps the model's engine alive, as modules do.

    copy.deepcopy takes a module's hooks along. The copy is an ordinary module, which must neither
    run a boosted model's hooks nor keep its memory: it gets one that does nothing.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        """What a copy of the module gets."""
        return does_nothing

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refused: what is unpickled could not share the parameters' memory with the optimizer.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "a boosted model cannot be pickled, its parameters lie in castor's chunks: write it "
            "with booster.save_model or torch.save(model.state_dict(), path), or pickle "
            "copy.deepcopy(model), which is an ordinary model"
        )


def does_nothing(*_: Any, **__: Any) -> None:
    """The hook of a copy."""
