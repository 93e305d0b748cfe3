"""The benchmark of attention: what it counts, what it derives, and a tiny run from the command line to the files."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import attention
import jax
import numpy as np
import pytest
from attention_results import Case, Row, derive, pairs, ratio, share_of_peak
from attention_worker import follow_memory
from tyro import cli as parse

SCRIPT = Path(attention.__file__)
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent), "JAX_PLATFORMS": "cpu"}
CPU = {"backend": "cpu", "device": "cpu", "free_bytes": 10**10, "torch": False, "cuda": False}


def case(implementation, T, backward=False, window=None):
    return Case(implementation=implementation, T=T, backward=backward, window=window, dtype="float32", backend="cpu")


def settings(*flags):
    return parse(attention.Settings, args=list(flags))


# Counts and laws ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "window"), [(1, None), (7, None), (7, 1), (7, 3), (7, 7), (7, 9)])
def test_pairs_and_flops_are_those_of_a_count(T, window):
    count = sum(0 <= t - s < (window or T) for t in range(T) for s in range(T))
    assert pairs(T, window) == count
    product = 8 * count * 64 * 2
    assert case("chunked", T, window=window).flops == 2 * product
    # q k^T, p v; and again q k^T, dz v^T, da k, da^T q, p^T dz.
    assert case("chunked", T, backward=True, window=window).flops == (2 + 5) * product


def power_law_rows():
    """Times of 1 us * T^2 for einsum and half of it for chunked, T * window; memory of 1 kB * T for chunked."""
    for T in (512, 1024, 4096, 8192, 16384):
        for backward in (False, True):
            square = 1e-6 * T**2
            yield Row(case=case("einsum", T, backward), seconds=(square,), peak_bytes=T**2)
            # Below 4096 a floor, which must not count.
            memory = 1000 * T if T >= 4096 else 10**7
            yield Row(
                case=case("chunked", T, backward), seconds=(0.5 * square, 0.4 * square, square), peak_bytes=memory
            )
            yield Row(case=case("chunked", T, backward, 256), seconds=(1e-6 * T**1.25,), peak_bytes=memory)


def test_derived_lines_find_the_laws_behind_the_numbers():
    lines = derive(list(power_law_rows()))
    for passes in ("forward", "forward + backward"):
        assert math.isclose(lines[f"{passes}: exponent of T in chunked's peak memory, from T = 4096"], 1)
        windowed = lines[f"{passes}: exponent of T in chunked's time with a window of 256, from T = 4096"]
        assert math.isclose(windowed, 1.25)
        assert math.isclose(lines[f"{passes}: chunked's time over einsum's at T = 1024"], 0.5)
        assert lines[f"{passes}: chunked's peak memory at T = 16384 (MB)"] == 16.384
        assert lines[f"{passes}: einsum's peak memory at T = 16384 (MB)"] == 16384**2 / 1e6
    assert lines["scores per head that chunked did not store at T = 16384"] == 16384**2


def test_what_was_not_measured_is_not_derived():
    rows = [Row(case=case("einsum", 1024), needs_bytes=1.0), Row(case=case("chunked", 1024), seconds=(1.0,))]
    assert ratio(rows, rows[1], "einsum") is None
    assert ratio(rows, rows[0], "chunked") is None
    assert ratio(rows, Row(case=case("chunked", 1024, window=256), seconds=(1.0,)), "chunked") is None
    lines = derive(rows)
    assert lines.pop("scores per head that chunked did not store at T = 1024") == 2**20
    assert set(lines.values()) == {None}


def test_the_share_of_the_peak_is_flops_over_time_over_peak():
    row = Row(case=case("chunked", 1000), seconds=(0.5,))
    assert math.isclose(share_of_peak(row, 1e12), 4 * 1000 * 1001 / 2 * 8 * 64 / 0.5 / 1e12)
    assert share_of_peak(row, None) is None


# What is measured -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "measured"),
    [
        ({"torch": True}, ["einsum", "chunked", "torch"]),
        ({"backend": "gpu"}, ["einsum", "chunked", "flash", "cudnn"]),
        ({"backend": "gpu", "torch": True}, ["einsum", "chunked", "flash", "cudnn"]),
        ({"backend": "gpu", "torch": True, "cuda": True}, ["einsum", "chunked", "flash", "cudnn", "torch"]),
        ({"backend": "tpu", "device": "TPU v4"}, ["einsum", "chunked", "flash", "splash"]),
    ],
)
def test_a_kernel_is_measured_where_it_runs_and_named_where_it_does_not(monkeypatch, machine, measured):
    for name in ("flash", "splash", "cudnn"):
        monkeypatch.setitem(attention.IMPLEMENTATIONS, name, None)
    groups, notes = attention.plan(settings("--lengths", "512", "256"), CPU | machine)
    cases = [case for group in groups for case in group]
    expected = [(name, T, b, None) for T in (256, 512) for b in (False, True) for name in measured]
    expected += [("chunked", T, b, 256) for T in (256, 512) for b in (False, True)] + [
        ("chunked", 100_000, False, None)
    ]
    assert {(c.implementation, c.T, c.backward, c.window) for c in cases} == set(expected)
    assert len(cases) == len(expected)
    named = " ".join(notes)
    assert all((name in measured) == (f"{name} is not measured" not in named) for name in ("splash", "cudnn", "torch"))
    assert {case.dtype for case in cases} == {"float32" if CPU | machine == CPU | {"torch": True} else "bfloat16"}
    for group in groups:
        assert len({(case.T, case.backward) for case in group}) == 1
        assert len(group) == 1 or machine.get("backend") != "tpu"
    assert ("share of the peak" in named) == (machine.get("backend") == "gpu")


def test_a_slow_case_is_timed_once_and_cases_take_turns(monkeypatch):
    asked = []

    def worker(argument):
        name = json.loads(argument)["implementation"]
        first = {"first_seconds": 61.0 if name == "einsum" else 1.0, "calls": 1, "peak_bytes": 5, "compile_seconds": 0}
        answers = iter([first, 3.0, 4.0, 5.0])

        def ask():
            asked.append(name)
            return next(answers)

        return attention.contextlib.nullcontext(ask)

    monkeypatch.setattr(attention, "worker", worker)
    rows = attention.measure([case("einsum", 64), case("chunked", 64)], settings(), 10**9)
    assert [row.seconds for row in rows] == [(3.0,), (3.0, 4.0, 5.0)]
    assert asked == ["einsum", "chunked"] * 2 + ["chunked"] * 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured on Linux")
def test_the_peak_is_of_what_comes_after_and_above_what_is_there():
    kept = np.ones(10**7)
    before = np.ones(4 * 10**7)
    del before
    peak = follow_memory(case("chunked", 8))
    during = np.ones(10**7)
    del during
    # The kernel counts pages on each core and adds them up late: 32 pages a core, and three kinds of them.
    assert math.isclose(peak(), 8e7, abs_tol=3 * 32 * 4096 * os.cpu_count() + 10**6)
    assert kept.nbytes == 8e7


@pytest.mark.slow
def test_the_memory_for_which_einsum_is_left_out_is_what_it_takes():
    cases = [case("einsum", 1024), case("einsum", 1024, backward=True)]
    for row in attention.measure(cases, settings("--repetitions", "1"), 10**12):
        assert math.isclose(row.peak_bytes, attention.needed_bytes(row.case), rel_tol=0.3)


@pytest.mark.parametrize(
    "values", [{"lengths": (8, 0)}, {"lengths": ()}, {"long": 0}, {"repetitions": 0}, {"memory_share": math.nan}]
)
def test_settings_that_make_no_sense_are_refused(values):
    with pytest.raises(ValueError, match=f"{next(iter(values))}.* must be"):
        attention.Settings(**values)


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in which einsum does not fit at 512 tokens; its folder, and what it printed."""
    out = tmp_path_factory.mktemp("benchmark")
    with attention.worker("probe") as ask:
        free = ask()["free_bytes"]
    # Between what einsum needs for 64 tokens backward and for 512 forward, far from both.
    fits, does_not = (attention.needed_bytes(c) for c in (case("einsum", 64, True), case("einsum", 512)))
    share = math.sqrt(fits * does_not) / free
    flags = f"--lengths 64 512 --long 600 --repetitions 2 --no-torch --memory-share {share} --out {out}"
    command = [sys.executable, str(SCRIPT), *flags.split()]
    # What was compiled in an earlier run of the tests need not be again.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(command, env=ENVIRONMENT | cache, capture_output=True, text=True, check=True)
    return out, done.stdout


@pytest.mark.slow
def test_a_run_measures_every_case_and_its_numbers_agree(run):
    report = json.loads((run[0] / "attention.json").read_text())
    rows = {(r["implementation"], r["T"], r["backward"], r["window"]): r for r in report["rows"]}
    kinds = [("einsum", None), ("chunked", None), ("chunked", 256)]
    whole = {(name, T, b, window) for T in (64, 512) for b in (False, True) for name, window in kinds}
    assert set(rows) - {key for key in rows if key[0] == "flash"} == whole | {("chunked", 600, False, None)}
    for (name, T, backward, window), row in rows.items():
        if (name, T) == ("einsum", 512):
            assert row["seconds"] == []
            assert row["needs_bytes"] == {False: 2.2, True: 7.0}[backward] * 8 * 512**2 * 4
            continue
        assert len(row["seconds"]) == 2
        assert row["median_seconds"] == statistics.median(row["seconds"]) > 0
        # The outputs are part of it, and nothing here needs as much as the libraries or the inputs of another size.
        assert (4 if backward else 1) * T * 8 * 64 * 4 <= row["peak_bytes"] < 10**8
        base = rows["einsum", T, backward, None]["median_seconds"] if T == 64 and window is None else None
        assert row["time_over_einsum"] == (base and row["median_seconds"] / base)
        assert row["time_over_torch"] is None
    assert report["derived"]["scores per head that chunked did not store at T = 600"] == 360_000
    assert report["settings"]["lengths"] == [64, 512]
    assert {"Python", "jax", "numpy"} <= set(report["versions"])


@pytest.mark.slow
def test_the_page_and_the_terminal_say_what_the_json_says(run):
    out, printed = run
    report, page = json.loads((out / "attention.json").read_text()), (out / "attention.md").read_text()
    head, table = page.split("| ---: |", 1)
    assert report["command"] in head
    assert report["date"] in head
    assert f"jax {report['versions']['jax']}" in head
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:] if line[:1] == "|"
    ]
    assert len(cells) == len(report["rows"])
    for row, (T, passes, name, median, _, memory, over_einsum, over_torch) in zip(report["rows"], cells, strict=True):
        assert (int(T), passes == "forward + backward") == (row["T"], row["backward"])
        assert name == row["implementation"] + (f", window {row['window']}" if row["window"] else "")
        assert over_torch == "-"
        if row["needs_bytes"]:
            assert (median, memory) == ("not run", f"needs ~{row['needs_bytes'] / 1e6:.1f} MB")
            continue
        number, unit = median.split()
        assert math.isclose(float(number) * {"ms": 1e-3, "s": 1}[unit], row["median_seconds"], rel_tol=5e-3)
        assert memory == f"{row['peak_bytes'] / 1e6:.1f} MB"
        assert over_einsum == ("-" if row["time_over_einsum"] is None else f"{row['time_over_einsum']:.3g}")
    said = [f"{line}: {'not measured' if x is None else f'{x:.4g}'}" for line, x in report["derived"].items()]
    for line in (*said, *report["notes"]):
        assert line in page
        assert line in printed
    assert "needs ~" in printed
    assert (out / "attention.png").read_bytes()[:4] == b"\x89PNG"


def test_a_worker_that_fails_is_shown_and_the_others_are_ended(monkeypatch):
    started = []

    class Remembered(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Remembered)
    with pytest.raises(RuntimeError, match=r"(?s)no such.* ended with status 1; its last words:.*KeyError"):
        attention.measure([case("chunked", 8), case("no such", 8)], settings(), 10**9)
    assert [process.returncode for process in started] == [-signal.SIGKILL, 1]


def test_ctrl_c_ends_the_workers(tmp_path):
    command = [sys.executable, str(SCRIPT), "--lengths", "4096", "--out", str(tmp_path)]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (workers := children.read_text().split()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
    assert "Stopped" in printed
    # One that was just being started ends by itself, when it finds its stdin closed.
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
