"""Models that take no memory until they are boosted."""

from castor.lazy.context import LazyInitContext, check_inactive
from castor.lazy.materialise import Materialisation, give_each, is_lazy, random_states, value_of
from castor.lazy.replay import in_own_pages

__all__ = [
    "LazyInitContext",
    "Materialisation",
    "check_inactive",
    "give_each",
    "in_own_pages",
    "is_lazy",
    "random_states",
    "value_of",
]
