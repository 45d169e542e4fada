"""Models that take no memory until they are boosted."""

from castor.lazy.context import LazyInitContext, check_inactive
from castor.lazy.materialise import Materialisation, is_lazy, random_states
from castor.lazy.replay import in_own_pages

__all__ = [
    "LazyInitContext",
    "Materialisation",
    "check_inactive",
    "in_own_pages",
    "is_lazy",
    "random_states",
]
