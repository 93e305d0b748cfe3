"""Puts the last benchmark of decoding into docs/generation.md: it is never written by hand.

python docs/update_generation.py        (after: python benchmarks/decode.py)
"""

from pathlib import Path

from update_readme import replace

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "generation.md"
BENCHMARK = ROOT / "runs" / "benchmarks" / "decode" / "decode.md"


def main() -> None:
    """Rewrites docs/generation.md."""
    PAGE.write_text(replace(PAGE.read_text(), "benchmark", BENCHMARK.read_text().rstrip() + "\n"))


if __name__ == "__main__":
    main()
