"""What is made of the measurements of attention.py: counts, ratios, growth, a table, a page and a picture.

pairs(T, w) = w (w + 1) / 2 + (T - w) w        keys that the queries of a causal window of w see; w = T: no window
FLOPs = 4 pairs N H forward                    (q . k and p v, a multiplication and an addition each)
= 3.5 times that forward + backward      (5 such products backward for the 2 forward: one is recomputed)
"""

import dataclasses
import importlib.util
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

HEADS, WIDTH, WINDOW = 8, 64, 256
PASSES = {False: "forward", True: "forward + backward"}
GROWTH_FROM, COMPARED, LARGE = 4096, 1024, 16384
"""Lengths of the derived lines: the growth from here up, chunked against einsum, and the memory of a long text."""

PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
"""bfloat16 FLOP/s of a device by JAX's name for it."""
# Sources: NVIDIA's data sheets of the A100, H100, H200 and L4 (tensor cores; half of what is given "with sparsity");
# cloud.google.com/tpu/docs, pages of v4, v5e, v5p and v6e (peak compute per chip).


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured: one implementation at one length, forward, or forward and backward."""

    implementation: str
    T: int
    backward: bool
    dtype: str
    backend: str
    window: int | None = None

    @property
    def name(self) -> str:
        return self.implementation if self.window is None else f"{self.implementation}, window {self.window}"

    @property
    def passes(self) -> str:
        return PASSES[self.backward]

    @property
    def flops(self) -> float:
        """FLOPs of the allowed pairs; what an implementation computes besides is not counted."""
        return (3.5 if self.backward else 1) * 4 * pairs(self.T, self.window) * HEADS * WIDTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A case and what came of it.

    Args:
      seconds: of each repetition, per call; empty if the case was not run.
      calls: calls in a repetition.
      first_seconds: the untimed first call, which the peak memory is of.
      compile_seconds: tracing and compiling; None for torch, which does not compile.
      peak_bytes: see attention.py; None if it could not be measured.
      needs_bytes: estimate of the memory for which the case was not run; None if it was.
    """

    case: Case
    seconds: tuple[float, ...] = ()
    calls: int = 0
    first_seconds: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    needs_bytes: float | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def pairs(T: int, window: int | None) -> int:
    """Counts the pairs of query and key that a causal mask of T tokens allows."""
    w = T if window is None else min(window, T)
    return w * (w + 1) // 2 + (T - w) * w


def find(rows: Iterable[Row], implementation: str, T: int, backward: bool) -> Row | None:
    """Returns the row without a window, or None."""
    keys = (implementation, T, backward, None)
    found = (r for r in rows if (r.case.implementation, r.case.T, r.case.backward, r.case.window) == keys)
    return next(found, None)


def ratio(rows: list[Row], row: Row, other: str) -> float | None:
    """Returns the row's time over another implementation's; None with a window, which is another function."""
    base = None if row.case.window else find(rows, other, row.case.T, row.case.backward)
    if base is None or base.median is None or row.median is None:
        return None
    return row.median / base.median


def share_of_peak(row: Row, peak: float | None) -> float | None:
    """Returns the FLOP/s of the allowed pairs over the device's peak."""
    return None if peak is None or row.median is None else row.case.flops / row.median / peak


def growth(points: Iterable[tuple[int, float | None]]) -> float | None:
    """Returns p of the power law T^p through (T, value) from `GROWTH_FROM` up; None with fewer than two of them."""
    logs = [(math.log(T), math.log(value)) for T, value in points if T >= GROWTH_FROM and value]
    if len({x for x, _ in logs}) < 2:
        return None
    x, y = np.array(logs).T
    return float(np.polyfit(x, y, 1)[0])


def derive(rows: list[Row]) -> dict[str, float | None]:
    """Returns the derived numbers by the line that says what each is; None where what it needs was not measured."""
    lines: dict[str, float | None] = {}
    chunked = [row for row in rows if row.case.implementation == "chunked"]
    for backward, passes in PASSES.items():
        mine = [row for row in chunked if row.case.backward == backward]
        memory = growth((row.case.T, row.peak_bytes) for row in mine if row.case.window is None)
        lines[f"{passes}: exponent of T in chunked's peak memory, from T = {GROWTH_FROM}"] = memory
        time = growth((row.case.T, row.median) for row in mine if row.case.window)
        lines[f"{passes}: exponent of T in chunked's time with a window of {WINDOW}, from T = {GROWTH_FROM}"] = time
        compared = find(rows, "chunked", COMPARED, backward)
        share = None if compared is None else ratio(rows, compared, "einsum")
        lines[f"{passes}: chunked's time over einsum's at T = {COMPARED}"] = share
        for name in dict.fromkeys(row.case.implementation for row in rows):
            large = find(rows, name, LARGE, backward)
            size = None if large is None or large.peak_bytes is None else large.peak_bytes / 1e6
            lines[f"{passes}: {name}'s peak memory at T = {LARGE} (MB)"] = size
    longest = max(row.case.T for row in chunked)
    lines[f"scores per head that chunked did not store at T = {longest}"] = longest**2
    return lines


def say(value: float | None) -> str:
    """Returns a derived number for a reader."""
    return "not measured" if value is None else f"{value:.4g}"


def _times(row: Row) -> tuple[str, str]:
    """Returns the median and the range, in one unit."""
    if row.median is None:
        return "not run", "-"
    unit, name = (1, "s") if row.median >= 0.9 else (1e-3, "ms")
    return f"{row.median / unit:.3g} {name}", f"{min(row.seconds) / unit:.3g} to {max(row.seconds) / unit:.3g}"


def _memory(size: float | None) -> str:
    if size is None:
        return "-"
    return f"{size / 1e9:.2f} GB" if size >= 0.9e9 else f"{size / 1e6:.1f} MB"


def _cells(rows: list[Row], row: Row, peak: float | None) -> list[str]:
    memory = _memory(row.peak_bytes) if row.needs_bytes is None else f"needs ~{_memory(row.needs_bytes)}"
    cells = [str(row.case.T), row.case.passes, row.case.name, *_times(row), memory]
    cells += ["-" if x is None else f"{x:.3g}" for x in (ratio(rows, row, other) for other in ("einsum", "torch"))]
    share = share_of_peak(row, peak)
    return cells if peak is None else [*cells, "-" if share is None else f"{100 * share:.1f} %"]


def _header(peak: float | None) -> list[str]:
    names = ["T", "pass", "implementation", "time", "range", "peak memory", "time / einsum", "time / torch"]
    return names if peak is None else [*names, "of the peak FLOP/s"]


def terminal_table(rows: list[Row], peak: float | None) -> Table:
    """Returns the table for a terminal; without a known peak FLOP/s it has no column for the share of it."""
    table = Table()
    for name in _header(peak):
        table.add_column(name, justify="left" if name in ("pass", "implementation") else "right")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is not None and (following.case.T, following.case.backward) != (row.case.T, row.case.backward)
        table.add_row(*_cells(rows, row, peak), end_section=ends)
    return table


def write_json(path: Path, rows: list[Row], facts: Mapping[str, Any], peak: float | None) -> None:
    """Writes every repetition, what was computed from them, and the facts of the run."""
    records = [
        {
            **dataclasses.asdict(row.case),
            **{name: value for name, value in dataclasses.asdict(row).items() if name != "case"},
            "median_seconds": row.median,
            "flops": row.case.flops,
            "time_over_einsum": ratio(rows, row, "einsum"),
            "time_over_torch": ratio(rows, row, "torch"),
            "share_of_peak_flops": share_of_peak(row, peak),
        }
        for row in rows
    ]
    path.write_text(json.dumps({**facts, "rows": records, "derived": derive(rows)}, indent=1))


def write_markdown(path: Path, rows: list[Row], facts: Mapping[str, Any], peak: float | None, drawn: bool) -> None:
    """Writes the page: how it was measured, the table, the derived lines and the notes."""
    header = _header(peak)
    right = ["---" if name in ("pass", "implementation") else "---:" for name in header]
    table = [f"| {' | '.join(cells)} |" for cells in (header, right, *(_cells(rows, row, peak) for row in rows))]
    lines = ["# Attention: time and peak memory against length", "", f"    {facts['command']}", ""]
    lines += [f"- {name}: {value}" for name, value in page_facts(facts).items()]
    lines += ["", *table, "", "Peak memory is that of the first call above what was there just before it.", ""]
    lines += [f"- {line}: {say(value)}" for line, value in derive(rows).items()]
    lines += ["", *(f"{note}\n" for note in facts["notes"])]
    path.write_text("\n".join([*lines, *(["![time and memory](attention.png)", ""] if drawn else [])]))


def page_facts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns date, machine and versions in words."""
    machine = facts["machine"]
    return {
        "date": facts["date"],
        "machine": f"{machine['device']}; {machine['cores']} cores of {machine['cpu']}; "
        f"{_memory(machine['free_bytes'])} of memory free at the start",
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }


def draw(path: Path, rows: list[Row]) -> bool:
    """Draws time and memory against T on logarithmic axes; returns False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained", sharex=True)
    names = list(dict.fromkeys(row.case.name for row in rows))
    for backward, (time, memory) in zip(PASSES, axes, strict=True):
        chosen = [row for row in rows if row.case.backward == backward]
        for number, name in enumerate(names):
            mine = [row for row in chosen if row.case.name == name]
            for axis, points in (
                (time, [(row.case.T, row.median) for row in mine]),
                (memory, [(row.case.T, row.peak_bytes and row.peak_bytes / 1e6) for row in mine]),
            ):
                measured = [point for point in points if point[1]]
                if measured:
                    axis.plot(*zip(*measured, strict=True), marker="o", color=f"C{number}", label=name)
        for axis, unit in ((time, "time (s)"), (memory, "peak memory (MB)")):
            axis.set(xscale="log", yscale="log", xlabel="T (tokens)", ylabel=unit)
            axis.set_title(PASSES[backward])
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
