"""Writes docs/families.md from results of tests/python/model_family_cases.py.

Usage: families.py RESULTS.jsonl. A line of RESULTS is one class of models; of a class that is there
several times the last line counts. `python tests/python/model_family_cases.py RESULTS one` runs all
classes of the page.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
COLUMNS = ("keep", "recompute", "auto", "save_model", "bf16 dtypes")
HEAD = """\
# Model families

<!-- python scripts/families.py RESULTS.jsonl writes this page. -->

Each class of the auto classes of transformers {version} that builds from a small configuration was
trained for three clipped AdamW steps, with plain PyTorch and with castor. The budget was
`tight(0.5)`: the activations' peak, and half of the parameters' bytes or the largest module 2.2
times. A cell says "yes" where the result is plain PyTorch's:

| column | the result is |
|---|---|
| keep, recompute, auto | the same losses with these `activations`: bitwise at first, then to 1e-5 |
| save_model | the files of `save_pretrained`, byte for byte |
| bf16 dtypes | the dtypes of `from_pretrained(dtype=torch.bfloat16)` with `precision="bf16"` |

"refused" is an error that says why, "no peer" that transformers itself cannot, and a dash that the
column has not been run. The last column has the message of a refusal or of a failure.

`CASTOR_WHOLE_GRID=1 pytest tests/python/test_model_families.py` runs the classes of this page.

"""


def latest(path: Path) -> list[dict[str, Any]]:
    """The last result of each class, by head and name; a later line adds columns to an earlier."""
    lines: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        before = lines.get(line["class"], {})
        if "not built" in before or "not built" in line:
            before = {}
        lines[line["class"]] = before | line
    return sorted(
        lines.values(), key=lambda line: (line["head"] != "causal LM", line["head"], line["class"])
    )


def cell(line: dict[str, Any], column: str) -> str:
    """The result of a column; what stopped the class before it, or "" where it was not run."""
    before = str(line.get("ample", "ok"))
    return str(line.get(column, "")) or ("" if before.startswith("ok") else before)


def word(said: str) -> str:
    """What a cell shows of a result."""
    if not said:
        return "-"
    if said.startswith("ok"):
        return "yes"
    return {"refused": "refused", "none": "no peer"}.get(said.split(":")[0], "**no**")


def reason(line: dict[str, Any]) -> str:
    """Why a class has no "yes" somewhere, in one line."""
    said = [str(line[c]) for c in ("not built", "ample", *COLUMNS) if c in line]
    other = list(dict.fromkeys(text for text in said if not text.startswith("ok")))
    text = re.sub(r"\s+", " ", "; ".join(other)).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 300 else text[:297] + "..."


def counts(lines: list[dict[str, Any]]) -> str:
    """A table of how many classes have which result."""
    built = [line for line in lines if "not built" not in line]
    rows = [
        f"| tried | {len(lines)} | | |",
        f"| built and trained by plain PyTorch | {len(built)} | | |",
    ]
    for column in COLUMNS:
        found = Counter(word(cell(line, column)) for line in built)
        named = found["refused"] + found["no peer"]
        rows.append(f"| {column} | {found['yes']} | {named} | {found['**no**']} |")
    head = "| | classes | refused, or no peer | failed |\n|---|---|---|---|"
    return "\n".join([head, *rows]) + "\n"


def page(lines: list[dict[str, Any]], version: str) -> str:
    built = [line for line in lines if "not built" not in line]
    text = [HEAD.format(version=version), "## Counts\n", counts(lines), "## Classes\n"]
    text.append(f"| type | class | head | {' | '.join(COLUMNS)} | reason |")
    text.append("|---|---|---|" + "---|" * (len(COLUMNS) + 1))
    for line in built:
        cells = [word(cell(line, column)) for column in COLUMNS]
        text.append(
            f"| {line['type']} | {line['class']} | {line['head']} | {' | '.join(cells)} "
            f"| {reason(line)} |"
        )
    text.append("\n## Classes without a small configuration, or without inputs that train them\n")
    text.append("| type | class | head | reason |\n|---|---|---|---|")
    for line in lines:
        if "not built" in line:
            text.append(f"| {line['type']} | {line['class']} | {line['head']} | {reason(line)} |")
    return "\n".join(text) + "\n"


def main() -> None:
    from transformers import __version__

    lines = latest(Path(sys.argv[1]))
    PAGE.write_text(page(lines, __version__))
    print(counts(lines))


if __name__ == "__main__":
    main()
