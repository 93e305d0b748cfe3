"""Puts the table of support and the last benchmark into docs/attention.md: neither is ever written by hand.

python docs/update_attention.py        (after: python benchmarks/attention.py)
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from update_readme import replace

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "attention.md"
BENCHMARK = ROOT / "runs" / "benchmarks" / "attention" / "attention.md"


def support() -> Iterator[str]:
    """Yields the lines of the table, from the data of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    import attention_grid

    names = attention_grid.IMPLEMENTATIONS
    yield "| | " + " | ".join(f"`{name}`" for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for name, found in attention_grid.support():
        yield f"| {name} | " + " | ".join("yes" if yes else "no" for yes in found) + " |"


def main() -> None:
    """Rewrites docs/attention.md."""
    page = replace(PAGE.read_text(), "support", "\n".join(support()) + "\n")
    if BENCHMARK.exists():
        page = replace(page, "benchmark", BENCHMARK.read_text().split("\n", 2)[2])  # without its heading
        shutil.copy(BENCHMARK.with_suffix(".png"), PAGE.with_suffix(".png"))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
