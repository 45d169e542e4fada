"""Dynamic loss scaling for fp16."""

from __future__ import annotations

from castor.config import LossScalerConfig


class LossScaler:
    """Keeps small gradients representable in fp16 (Micikevicius et al. 2018, section 3.2).

    The scale falls after `hysteresis` overflows and grows after `growth_interval` good steps in a
    row.
    """

    def __init__(self, config: LossScalerConfig) -> None:
        self.scale = config.initial_scale
        self._config = config
        self._good_steps = 0
        self._overflows_left = config.hysteresis

    def update(self, *, overflow: bool) -> None:
        """Learns how a step went."""
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
