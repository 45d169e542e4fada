"""Searches layouts of ranks for a model: `castor plan` and `castor scaling`.

The planner stands on castor.estimate, which predicts one rank's step. Only the command line imports
it.
"""
