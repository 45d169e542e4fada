"""Reports of a boosted model's memory and time: a page, a trace for Perfetto, a text.

`write_html(path, booster)` writes one self-contained page, `write_trace(path, booster)` the last
step as Chrome trace events, and `summary(booster)` returns text for a terminal. Each takes a
Booster (the model it boosted last) or a boosted model, and needs one finished optimizer step.
"""

from castor.report.chrome_trace import write_trace
from castor.report.html import write_html
from castor.report.text import summary

__all__ = ["summary", "write_html", "write_trace"]
