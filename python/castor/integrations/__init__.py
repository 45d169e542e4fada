"""Training frameworks that run on castor, one module each. A module imports its framework."""
