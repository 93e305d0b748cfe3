"""One case of attention.py in a process of its own: it calls once, then times a repetition whenever asked.

Time is that of calls of a compiled program on inputs that lie ready. Peak memory is that of the first call: its outputs
and what it needs on the way, above what was there just before it (libraries, inputs, the program itself).
"""

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from attention_results import HEADS, WIDTH, Case

from jaxformer.attention import IMPLEMENTATIONS
from jaxformer.masks import Mask

REPETITION_SECONDS = 0.2
"""A repetition is as many calls as fill this if each takes as long as the first, and one at least."""


def status_bytes(field: str) -> int:
    """Returns a field of /proc/self/status, such as VmRSS, in bytes."""
    found = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def follow_memory(case: Case) -> Callable[[], int | None]:
    """Begins to watch the memory; the function returned gives the bytes between now and the peak since now."""
    if case.backend != "cpu" and case.implementation == "torch":
        cuda: Any = importlib.import_module("torch").cuda
        cuda.reset_peak_memory_stats()
        held = cuda.memory_allocated()
        return lambda: cuda.max_memory_allocated() - held
    if case.backend != "cpu":
        device = jax.local_devices()[0]
        in_use = device.memory_stats()["bytes_in_use"]
        return lambda: device.memory_stats()["peak_bytes_in_use"] - in_use
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        # Without a reset the peak may be the compiler's.
        return lambda: None
    resident = status_bytes("VmRSS")
    return lambda: status_bytes("VmHWM") - resident


def jax_call(case: Case) -> tuple[Callable[[], Any], float]:
    """Returns a function that calls the compiled program and waits for it, and the seconds of compiling."""
    inputs = [jax.device_put(x.astype(jax.numpy.dtype(case.dtype))) for x in draws((1, case.T, HEADS, WIDTH))]
    mask = Mask.causal(case.T).narrowed(case.window)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return IMPLEMENTATIONS[case.implementation](q, k, v, mask, None, scale=WIDTH**-0.5)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dz: jax.Array) -> tuple[jax.Array, ...]:
        z, pull = jax.vjp(forward, q, k, v)
        return z, *pull(dz)

    jax.block_until_ready(inputs)
    if not case.backward:
        inputs.pop()
    start = time.perf_counter()
    program = jax.jit(both if case.backward else forward).lower(*inputs).compile()
    return lambda: jax.block_until_ready(program(*inputs)), time.perf_counter() - start


def torch_call(case: Case) -> tuple[Callable[[], Any], None]:
    """Returns a function that calls PyTorch and waits for it."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(cores())
    kind, device = getattr(torch, case.dtype), "cpu" if case.backend == "cpu" else "cuda"
    q, k, v, dz = (torch.from_numpy(x).to(kind).to(device) for x in draws((1, HEADS, case.T, WIDTH)))

    def call() -> Any:
        z = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        results = (z, *torch.autograd.grad(z, (q, k, v), dz)) if case.backward else z
        if device == "cuda":
            torch.cuda.synchronize()
        return results

    for x in (q, k, v):
        x.requires_grad_(case.backward)
    return call, None


def draws(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Returns q, k, v and the cotangent of z."""
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape, np.float32) for _ in range(4)]


def time_case(case: Case) -> Iterator[Any]:
    """Yields the facts of the first call, and then the seconds per call of one repetition after the other."""
    call, compile_seconds = torch_call(case) if case.implementation == "torch" else jax_call(case)
    peak = follow_memory(case)
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    calls = max(1, round(REPETITION_SECONDS / first))
    yield {"peak_bytes": peak(), "compile_seconds": compile_seconds, "first_seconds": first, "calls": calls}
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        yield (time.perf_counter() - start) / calls


def cores() -> int:
    """Counts the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_bytes() -> int:
    """Returns the memory that is free on the accelerator, or in a machine without one."""
    if jax.default_backend() != "cpu":
        stats = jax.local_devices()[0].memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"]
    info = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", info.read_text(), re.MULTILINE) if info.exists() else None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def probe() -> Iterator[Any]:
    """Yields what the machine is; not found out by the parent, because a process that asks an accelerator holds it."""
    has_torch = importlib.util.find_spec("torch") is not None
    yield {
        "backend": jax.default_backend(),
        "device": jax.local_devices()[0].device_kind,
        "free_bytes": free_bytes(),
        "torch": has_torch,
        "cuda": has_torch and importlib.import_module("torch").cuda.is_available(),
    }


def serve(argument: str) -> None:
    """Answers each line of stdin with a line of JSON on stdout, of a case given as JSON or of the "probe"."""
    answers = probe() if argument == "probe" else time_case(Case(**json.loads(argument)))
    # What a library prints goes to stderr.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for _ in sys.stdin:
            print(json.dumps(next(answers)), file=out, flush=True)
