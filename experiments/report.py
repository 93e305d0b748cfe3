"""What a training run leaves behind: a line for each step, a picture of the loss, and one page that sums it up."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PACKAGES = ("jaxformer", "jax", "jaxlib", "flax", "optax")


class Recorder:
    """Shows the progress of a run and writes metrics.jsonl; a context manager around the training loop.

    A resumed run keeps the lines up to the step that it goes on from, and goes on from there.
    """

    def __init__(self, folder: Path, first_step: int, num_steps: int, console: Console):
        self.records: list[dict[str, float]] = []
        self.tokens, self.seconds = 0.0, 0.0
        self._first_step, self._since = first_step, 0.0
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
        self._path = folder / "metrics.jsonl"
        self._console = console
        columns = (
            "step {task.completed}/{task.total}",
            "loss {task.fields[loss]:.3f}",
            "{task.fields[speed]:,.0f} tokens/s",
        )
        self._progress = Progress(BarColumn(), *map(TextColumn, columns), TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("", total=num_steps, completed=first_step, loss=float("nan"), speed=0.0)
        folder.mkdir(parents=True, exist_ok=True)
        if first_step and self._path.exists():
            lines = [json.loads(line) for line in self._path.read_text().splitlines() if line.endswith("}")]
            # The last validation is made again when a finished run is resumed for its report.
            self.records = [r for r in lines if r["step"] <= first_step and ("loss" in r or r["step"] < num_steps)]
        self._path.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step and writes those of the step before, so that the device need not wait."""
        self._flush()
        self._pending = (step, metrics)

    def _flush(self) -> None:
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        record = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(record[name]):
                raise ValueError(
                    f"the {name} of step {step} is {record[name]}: training has diverged. The newest checkpoint is "
                    "from before; start again with a lower learning_rate or a longer warm-up"
                )
        now = time.perf_counter()
        # The first step compiles.
        if step > self._first_step + 1:
            self.tokens, self.seconds = self.tokens + record["weight"], self.seconds + now - self._since
        self._since = now
        self._write(record)
        self._progress.update(self._task, completed=step, loss=record["loss"], speed=self.tokens_per_second)

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on per second of training, compilation and validation left out."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def validation(self, step: int, nats_per_byte: float) -> None:
        """Takes and shows a validation loss."""
        self._write({"step": step, "validation_nats_per_byte": nats_per_byte})
        self._console.print(f"step {step}: validation {nats_per_byte:.4f} nats/byte")

    def _write(self, record: dict[str, float]) -> None:
        self.records.append(record)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock of tokens per second."""
        self._flush()
        yield
        self._since = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        self._progress.stop()


def draw_loss(path: Path, records: list[dict[str, float]], baseline: float) -> None:
    """Draws the training loss over the steps, and the validation loss beside the 5-gram's."""
    import matplotlib.pyplot as plt

    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["validation_nats_per_byte"]) for r in records if "validation_nats_per_byte" in r]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(*zip(*train, strict=True), color="#0072B2", linewidth=1)
    left.set(xlabel="step", ylabel="training loss (nats per token)")
    right.plot(*zip(*validation, strict=True), color="#0072B2", marker="o", label="this model")
    right.axhline(baseline, color="#D55E00", linestyle="--")
    right.annotate("byte-level 5-gram", (validation[0][0], baseline), color="#D55E00", va="bottom")
    right.set(xlabel="step", ylabel="validation loss (nats per byte)")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_report(
    folder: Path, recorder: Recorder, baseline: float, samples: list[tuple[str, str]], facts: Mapping[str, str]
) -> None:
    """Writes loss.png and summary.md."""
    draw_loss(folder / "loss.png", recorder.records, baseline)
    loss = recorder.records[-1]["validation_nats_per_byte"]
    # A finished run that is resumed for its report trains nothing.
    speed = f"{recorder.tokens_per_second:,.0f} tokens/s" if recorder.tokens else "tokens/s not measured"
    rows = {
        "validation loss": f"**{loss:.4f} nats per byte**",
        "byte-level 5-gram (Kneser-Ney), same split": f"{baseline:.4f} nats per byte",
        "difference": f"{loss - baseline:+.4f} nats per byte",
        **facts,
        "speed": f"{speed} on {jax.device_count()} {jax.devices()[0].device_kind}",
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{p} {importlib.metadata.version(p)}" for p in PACKAGES)]
        ),
        "date": datetime.date.today().isoformat(),
    }
    lines = ["# A language model of text", "", f"    python {shlex.join(sys.argv)}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    lines += ["", "![loss](loss.png)", "", "## Samples", ""]
    for prompt, text in samples:
        lines += ["```text", f"{prompt}|{text}", "```", ""]
    (folder / "summary.md").write_text("\n".join(lines))
