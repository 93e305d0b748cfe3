"""Puts what the README's commands print into the README: the figures there are never written by hand.

python docs/update_readme.py        (after: python experiments/train_lm.py)
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN = "runs/train_lm"
GENERATE = ["jaxformer", "generate", RUN, "The function returns"]


def replace(text: str, name: str, new: str) -> str:
    """Returns the text with what stands between the two marks of this name replaced."""
    marked = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"the README has no marks for {name}")
    return marked.sub(lambda match: f"{match[1]}{new}{match[2]}", text)


def main() -> None:
    """Rewrites README.md."""
    summary = (ROOT / RUN / "summary.md").read_text()
    shown = summary.replace("![loss](loss.png)\n\n", "").split("\n", 2)[2].replace("## Samples", "Samples:")
    generated = subprocess.run(GENERATE, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    readme = replace((ROOT / "README.md").read_text(), "summary", shown)
    (ROOT / "README.md").write_text(replace(readme, "generate", f"```text\n{generated.rstrip()}\n```\n"))


if __name__ == "__main__":
    main()
