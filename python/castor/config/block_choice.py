"""The choices for the activations of a block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from castor.config.names import Activations

_KIND = re.compile(r"(keep|recompute|offload)(?::(.+))?")
_TILES = re.compile(r"tile:(\d+)(?::(.+))?")
_ASKED = (
    "choose 'auto', 'keep', 'recompute', 'offload', 'recompute:PART' or 'offload:PART' with a part "
    "of each block such as 'mlp', 'tile:N' for its MLP in N pieces, 2 or more, 'tile:N:PART' for "
    "another part in pieces, both as in 'recompute+tile:N', or a mapping from patterns of block "
    "names to all of these but 'auto'"
)


@dataclass(frozen=True, kw_only=True)
class BlockChoice:
    """One choice, taken apart: "recompute:self_attn+tile:4:mlp" has all there is."""

    kind: str = "keep"
    """"keep", "recompute" or "offload"."""
    part: str = ""
    """Name of the part of the block that `kind` is about; "": the block."""
    tiles: int = 0
    """Pieces of the rows that a part runs on, one after the other; 0: on all at once."""
    tiled_submodule: str = ""
    """Name of the part; "": the block's MLP."""

    @classmethod
    def parse(cls, text: str) -> BlockChoice:
        """Reads what a user wrote, which is not "auto".

        Raises:
            ValueError: It is no choice.
        """
        kind, plus, tiles = ("keep", "+", text) if text[:5] == "tile:" else text.partition("+")
        of_kind, of_tiles = _KIND.fullmatch(kind), _TILES.fullmatch(tiles)
        choice = cls(
            kind=of_kind[1] if of_kind else "",
            part=of_kind[2] or "" if of_kind else "",
            tiles=int(of_tiles[1]) if of_tiles else 0,
            tiled_submodule=of_tiles[2] or "" if of_tiles else "",
        )
        part_of_none = choice.kind == "keep" and choice.part
        if not choice.kind or part_of_none or (plus and choice.tiles < 2):
            raise ValueError(f"activations has {text!r}; {_ASKED}")
        return choice


def offloads(activations: Activations) -> bool:
    """Whether some blocks' activations leave the device, or may."""
    choices = [activations] if isinstance(activations, str) else activations.values()
    return any(text == "auto" or BlockChoice.parse(text).kind == "offload" for text in choices)


def check_activations(value: object, name: str) -> None:
    """Raises TypeError or ValueError unless `value` is something for GeminiPlugin's activations."""
    patterns = value if isinstance(value, Mapping) else {"*": value}
    if not patterns or not all(isinstance(part, str) for item in patterns.items() for part in item):
        raise TypeError(f"{name} is {value!r}; {_ASKED}")
    for choice in map(str, patterns.values()):
        if value != "auto":
            BlockChoice.parse(choice)
