"""Time and peak memory of attention against length, ours and PyTorch's `scaled_dot_product_attention` in one run.

    python benchmarks/attention.py

The mask is causal, made of positions that are known before tracing; one row of 8 heads of width 64. Backward takes a
random cotangent, because a constant one lets XLA drop products. Each library gets its own order of axes: ours B T N H,
torch's B N T H.

Each case runs in a process of its own, which makes its inputs, compiles, calls once, and then times a repetition
whenever it is asked to. Those of one length and pass are asked in turn, so that what disturbs the machine disturbs all
of them; one works while the others wait. A repetition is the mean of as many calls as, by the first, fill 0.2 s;
compiling is never in it.

Peak memory is that of the first call of the compiled program: its outputs and what it needs on the way, above what was
there just before it (libraries, inputs, the program). On a CPU it is VmHWM of /proc/self/status, reset before the call,
minus VmRSS before the call; heap that compiling left behind is given back to the system first. The kernel counts it to
some tenths of a MB, and threads that begin to work in the call add some MB. On a GPU or TPU it is peak_bytes_in_use of
the device minus bytes_in_use before the call; that peak cannot be reset, so that what compiling tried out on the device
may hide a smaller one.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any, Literal

import tyro
from attention_results import (
    HEADS,
    PASSES,
    PEAK_FLOPS,
    WINDOW,
    Case,
    Row,
    derive,
    draw,
    say,
    terminal_table,
    write_json,
    write_markdown,
)
from attention_worker import cores, serve
from rich.console import Console

from jaxformer.attention import IMPLEMENTATIONS

FUSED = {"flash": ("gpu", "tpu"), "splash": ("tpu",), "cudnn": ("gpu",)}
"""Where a fused kernel runs; elsewhere it is interpreted, if anything, and that is no measurement."""
SCORES_HELD = {False: 2.2, True: 7.0}
"""Peak memory of einsum, measured in [B N T T] arrays of float32: forward, and forward + backward."""
PACKAGES = ("jaxformer", "jax", "jaxlib", "numpy")

# A file has no width of its own, and the table needs some.
console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 140)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure time and peak memory of attention against length."""

    out: Path = Path("runs/benchmarks/attention")
    """Folder for attention.json, attention.md and attention.png; what is there is replaced."""
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Tokens in the row."""
    long: int | None = 100_000
    """Tokens of one more forward pass, of chunked alone; None leaves it out."""
    repetitions: int = 3
    """Timed repetitions of each case."""
    budget: float = 60.0
    """Seconds; a case whose first call takes longer is timed once."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of q, k and v; None: float32 on a CPU and bfloat16 elsewhere."""
    memory_share: float = 0.6
    """Share of the memory free at the start that a case may need; one that needs more is listed and not run."""
    torch: bool = True
    """Measure torch too, where it is installed and has this device."""

    def __post_init__(self) -> None:
        counts = {
            "lengths": min(self.lengths, default=0),
            "long": 1 if self.long is None else self.long,
            "repetitions": self.repetitions,
        }
        for name, least in counts.items():
            if least < 1:
                raise ValueError(f"{name} must be at least 1, and this is {getattr(self, name)}")
        for name in ("budget", "memory_share"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a positive finite number")


@contextlib.contextmanager
def worker(argument: str) -> Iterator[Callable[[], Any]]:
    """Starts a process that serves a case, and ends it; yields a function that asks it and returns its answer.

    The function raises RuntimeError if the process has ended, with the end of what that wrote to stderr.

    Args:
      argument: see `attention_worker.serve`.
    """
    command = [sys.executable, __file__, "--worker", argument]
    # Ctrl-C reaches the parent alone; the workers of a GPU share its memory; a pipe for stderr would fill up.
    how: dict[str, Any] = {"start_new_session": True, "env": os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=errors, text=True, **how) as process,
    ):

        def ask() -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            # A worker that is gone is found out by its answer.
            with contextlib.suppress(BrokenPipeError):
                print(file=process.stdin, flush=True)
            line = process.stdout.readline()
            if line:
                return json.loads(line)
            status = process.wait()
            errors.seek(0)
            tail = "".join(errors.readlines()[-20:])
            hint = " (killed; if for want of memory, lower --memory-share)" if status == -signal.SIGKILL else ""
            raise RuntimeError(f"the worker of {argument} ended with status {status}{hint}; its last words:\n{tail}")

        try:
            yield ask
        finally:
            process.kill()


def choose(settings: Settings, machine: dict[str, Any], dtype: str) -> tuple[list[str], list[str]]:
    """Returns the implementations that this machine can run, and a note on each that it cannot."""
    backend, names, notes = machine["backend"], [], []
    for name in IMPLEMENTATIONS:
        kernel = FUSED.get(name, (backend,))
        if backend not in kernel:
            kinds = " and ".join(kind.upper() for kind in kernel)
            notes.append(f"{name} is not measured: its kernel is for {kinds}, not {backend}.")
        elif name == "cudnn" and dtype == "float32":
            notes.append("cudnn is not measured: it takes no float32.")
        else:
            names.append(name)
    if not settings.torch:
        notes.append("torch is not measured: --no-torch.")
    elif not machine["torch"]:
        notes.append("torch is not measured: it is not installed (pip install torch).")
    elif backend != "cpu" and not machine["cuda"]:
        notes.append(f"torch is not measured: the one installed has no {backend}.")
    else:
        names.append("torch")
    return names, notes


def plan(settings: Settings, machine: dict[str, Any]) -> tuple[list[list[Case]], list[str]]:
    """Returns the cases, those that are measured in turn together, and notes on what the table lacks."""
    dtype = settings.dtype or ("float32" if machine["backend"] == "cpu" else "bfloat16")
    names, notes = choose(settings, machine, dtype)
    case = partial(Case, dtype=dtype, backend=machine["backend"])
    groups = [
        [
            *(case(implementation=name, T=T, backward=backward) for name in names),
            case(implementation="chunked", T=T, backward=backward, window=WINDOW),
        ]
        for T in sorted(set(settings.lengths))
        for backward in PASSES
    ]
    if settings.long is not None and settings.long not in settings.lengths:
        groups.append([case(implementation="chunked", T=settings.long, backward=False)])
    if machine["backend"] == "tpu":
        notes.append("The cases were measured one after the other: a TPU serves one process.")
        groups = [[alone] for group in groups for alone in group]
    if machine["backend"] != "cpu" and peak_flops(machine, dtype) is None:
        notes.append(f"No share of the peak FLOP/s: that of {dtype} on {machine['device']} is not in the script.")
    return groups, notes


def peak_flops(machine: dict[str, Any], dtype: str) -> float | None:
    """Returns the device's peak FLOP/s, or None where it is not known."""
    return PEAK_FLOPS.get(machine["device"]) if dtype == "bfloat16" else None


def needed_bytes(case: Case) -> float:
    """Estimates the memory of a case that holds all scores; the others need little and get 0."""
    return HEADS * case.T**2 * 4 * SCORES_HELD[case.backward] if case.implementation == "einsum" else 0


def measure(group: list[Case], settings: Settings, free_bytes: int) -> list[Row]:
    """Measures cases in turn; those that need more memory than they may come back without a time."""
    limit = settings.memory_share * free_bytes
    asks: dict[Case, Callable[[], Any]] = {}
    firsts: dict[Case, dict[str, Any]] = {}
    seconds: dict[Case, list[float]] = {case: [] for case in group}
    with contextlib.ExitStack() as stack:
        for case in group:
            if needed_bytes(case) <= limit:
                asks[case] = stack.enter_context(worker(json.dumps(dataclasses.asdict(case))))
                firsts[case] = asks[case]()
        for repetition in range(settings.repetitions):
            for case, ask in asks.items():
                if repetition == 0 or firsts[case]["first_seconds"] <= settings.budget:
                    seconds[case].append(ask())
    return [
        Row(case=case, seconds=tuple(seconds[case]), **firsts[case])
        if case in asks
        else Row(case=case, needs_bytes=needed_bytes(case))
        for case in group
    ]


def describe(settings: Settings, machine: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns the facts that stand beside the numbers."""
    packages = [*PACKAGES, *(["torch"] if settings.torch and machine["torch"] else [])]
    return {
        "command": f"python {shlex.join(sys.argv)}",
        "date": datetime.date.today().isoformat(),
        "machine": machine | {"cores": cores(), "cpu": cpu_model()},
        "versions": {"Python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
        "settings": dataclasses.asdict(settings) | {"out": str(settings.out)},
        "notes": notes,
    }


def cpu_model() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def main(settings: Settings) -> None:
    """Measures everything and writes it."""
    settings.out.mkdir(parents=True, exist_ok=True)
    with worker("probe") as ask:
        machine = ask()
    groups, notes = plan(settings, machine)
    facts, peak, rows = describe(settings, machine, notes), peak_flops(machine, groups[0][0].dtype), []
    for group in groups:
        with console.status(f"T = {group[0].T}, {group[0].passes}"):
            rows += measure(group, settings, machine["free_bytes"])
        # After every group, so that a run that stops has what it measured.
        write_json(settings.out / "attention.json", rows, facts, peak)
    if any(row.seconds and row.peak_bytes is None for row in rows):
        notes.append("Peak memory is not measured: it needs Linux and the right to write /proc/self/clear_refs.")
        write_json(settings.out / "attention.json", rows, facts, peak)
    drawn = draw(settings.out / "attention.png", rows)
    write_markdown(settings.out / "attention.md", rows, facts, peak, drawn)
    console.print(terminal_table(rows, peak))
    for line, value in derive(rows).items():
        console.print(f"{line}: {say(value)}", markup=False)
    for note in notes:
        console.print(note, markup=False)
    if not drawn:
        console.print('No picture: it needs matplotlib; pip install "jaxformer[plot]"', markup=False)
    console.print(f"written: {settings.out}", markup=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(sys.argv[2])
        sys.exit()
    try:
        main(tyro.cli(Settings))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        console.print("\nStopped; attention.json has the lengths that were finished.")
        sys.exit(130)
