"""Dynamic loss scaling for fp16."""

from __future__ import annotations

from castor.config import LossScalerConfig


class LossScaler:
    """A loss scale that keeps small fp16 gradients nonzero (Micikevicius et al. 2018, section 3.2).

    The scale falls after `hysteresis` overflows and grows after `growth_interval` good steps in a
    row.
    """

    def __init__(self, config: LossScalerConfig) -> None:
        self.scale = config.initial_scale
        self._config = config
        self._good_steps = 0
        self._overflows_left = config.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Adapts the scale after a step."""
        config = self._config
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(config.min_scale, self.scale * config.backoff_factor)
            return
        self._good_steps += 1
        if self._good_steps == config.growth_interval:
            self._good_steps = 0
            self._overflows_left = config.hysteresis
            self.scale = min(config.max_scale, self.scale * config.growth_factor)

    def state_dict(self) -> dict[str, float | int]:
        """Returns the scale, and the counts that its next change depends on."""
        return {
            "scale": self.scale,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restores the scale and counts of `state_dict`."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._overflows_left = int(state["overflows_left"])
