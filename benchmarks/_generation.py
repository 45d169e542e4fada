"""What a token of generate() costs: its time, and what castor moved for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from _machine import paired, spread
from _steps import SEED, VOCAB
from transformers import StoppingCriteria

from castor import Booster, MemoryReport

LINK = 2e9
"""Bytes per second of the emulated link, each way."""


class Clock(StoppingCriteria):
    """Notes what each token costs, as it is done; stops nothing."""

    def __init__(self, booster: Booster | None) -> None:
        self.booster = booster
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.reports: list[MemoryReport] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Notes the time, and what castor has moved."""
        self.seconds.append(time.perf_counter())
        self.cpu_seconds.append(time.process_time())
        if self.booster is not None:
            self.reports.append(self.booster.report())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@dataclass(frozen=True)
class Round:
    """One call of generate(), from the first token, which is the prompt's, to the last."""

    seconds: float
    """Seconds of a token."""
    cpu_seconds: float
    """Seconds of a token that this process computed; a busy machine adds nothing to them."""
    link_seconds: float
    """Seconds that the link takes for the bytes of a token; 0: without castor."""
    tokens: list[int]
    """The prompt and what follows it."""
    reports: tuple[MemoryReport, MemoryReport] | None
    """Reports after the first token and after the last; None: without castor."""

    def grown(self, figure: str) -> int:
        """Returns by how much a figure of the report grew."""
        assert self.reports
        first, last = (getattr(report, figure) for report in self.reports)
        return int(last - first)


class Contender:
    """A model, boosted or not, and the rounds in which it generated."""

    def __init__(self, model: Any, booster: Booster | None, **settings: Any) -> None:
        """Takes a model.

        Args:
            model: The model.
            booster: Booster that boosted it; None: nobody did.
            settings: `prompt` and `tokens`, numbers of tokens; `link`, bytes per second of the
                emulated link; and what generate() takes else.
        """
        self.model = model
        self.booster = booster
        self.prompt: int = settings.pop("prompt")
        self.num_tokens: int = settings.pop("tokens")
        self.link: float = settings.pop("link", LINK)
        self.settings = settings
        self.param_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.rounds: list[Round] = []

    def run(self) -> None:
        """Runs one round."""
        generator = torch.Generator().manual_seed(SEED)
        prompt = torch.randint(VOCAB, (1, self.prompt), generator=generator)
        clock = Clock(self.booster)
        torch.manual_seed(SEED + len(self.rounds))  # for those that sample
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.num_tokens,
            min_new_tokens=self.num_tokens,
            use_cache=True,
            pad_token_id=0,
            stopping_criteria=[clock],
            **self.settings,
        )
        count = self.num_tokens - 1
        reports = (clock.reports[0], clock.reports[-1]) if self.booster else None
        moved = reports[1].h2d_bytes - reports[0].h2d_bytes if reports else 0
        self.rounds.append(
            Round(
                seconds=(clock.seconds[-1] - clock.seconds[0]) / count,
                cpu_seconds=(clock.cpu_seconds[-1] - clock.cpu_seconds[0]) / count,
                link_seconds=moved / count / self.link,
                tokens=tokens[0].tolist(),
                reports=reports,
            )
        )

    def warm_up(self) -> None:
        """Runs one round that does not count: plans are made of it, and caches filled."""
        self.run()
        self.rounds.clear()

    def seconds(self) -> list[float]:
        """Returns the seconds of a token in each round."""
        return [one.seconds for one in self.rounds]

    def figures(self) -> dict[str, Any]:
        """Returns seconds of a token and, with castor, what it copied over the link.

        Raises:
            RuntimeError: A peak passed the budget.
        """
        own = {
            "seconds": spread(self.seconds()),
            "cpu_seconds": spread([one.cpu_seconds for one in self.rounds]),
        }
        if self.booster is None:
            return own
        report = self.booster.report()
        if report.peak_device_bytes > report.device_budget_bytes:
            raise RuntimeError(f"a peak of {report.peak_device_bytes} bytes passes the budget")
        link_seconds = [one.link_seconds for one in self.rounds]
        return {
            **own,
            "link_seconds": spread(link_seconds),
            "over_link": paired(self.seconds(), link_seconds),
            "report": vars(report),
        }
