"""A boosted model: its specification, hooks, guards and report."""
