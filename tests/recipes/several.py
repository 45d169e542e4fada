"""Trains several recipes in one process, one after another: several.py RECIPE..."""

import sys

from castor.recipes import train
from castor.recipes.recipe import load

for name in sys.argv[1:]:
    assert train.fit(load(name)) is None
