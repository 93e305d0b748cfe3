"""The command line: `jaxformer generate RUN_FOLDER "prompt"` and `jaxformer inspect PATH`."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
import tyro
from rich.markup import escape
from rich.table import Table

from jaxformer import sampling
from jaxformer.checkpoint import Checkpointer
from jaxformer.config import Config
from jaxformer.generate import stream
from jaxformer.inspection import Inspection, inspect
from jaxformer.models import Decoder
from jaxformer.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue a text with a model that was trained here."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder that experiments/train_lm.py wrote."""
    prompt: Annotated[str, tyro.conf.Positional]
    """The text to continue."""
    max_new_tokens: int | None = None
    """Most tokens to add. None: as many as the model's context has room for."""
    temperature: float = 0.8
    """Below 1 sharper, above 1 flatter, 0 takes the likeliest token."""
    top_p: float = 0.95
    """Mass of the nucleus that tokens are drawn from."""
    seed: int = 0
    """The same seed gives the same text."""

    def __call__(self) -> None:
        """Prints the prompt and, as they come, the tokens after it."""
        model, params, tokenizer = load_run(self.run)
        ids = [tokenizer.end_id, *tokenizer.encode(self.prompt)]
        room = model.config.max_len - len(ids)
        if room < 1:
            raise ValueError(
                f"the prompt is {len(ids)} tokens long, and the model's context is {model.config.max_len}; shorten it"
            )
        tokens = stream(
            model,
            params,
            np.array([ids], np.int32),
            max_new_tokens=room if self.max_new_tokens is None else self.max_new_tokens,
            sampler=sampling.chain(sampling.temperature(self.temperature), sampling.top_p(self.top_p)),
            key=jax.random.key(self.seed),
            eos_id=tokenizer.end_id,
        )
        text = tokenizer.stream()
        print(self.prompt, end="", flush=True)
        for token in tokens:
            print(text.push(int(token[0])), end="", flush=True)
        print(text.flush())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Say what a published model's files hold; no weights are read. Status 1 if they do not fit each other."""

    path: Annotated[Path, tyro.conf.Positional]
    """Folder with config.json and weights, or a .gguf file."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __call__(self) -> None:
        """Prints the config, the parameters, and what does not fit them."""
        found = inspect(self.path)
        if self.json:
            print(json.dumps(_as_json(found), indent=2))
        else:
            _print_tables(found)
        if found.problems:
            sys.exit(1)


def _as_json(found: Inspection) -> dict[str, Any]:
    content = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return content | {
        "path": str(found.path),
        "config": None if found.config is None else found.config.to_dict(),
        "tensors": {name: header._asdict() for name, header in found.tensors.items()},
        "parameters": [dataclasses.asdict(parameter) for parameter in found.parameters],
        "count": found.count,
        "bytes_on_disk": found.bytes_on_disk,
        "bytes_in_memory": {dtype: found.bytes_in_memory(dtype) for dtype in ("float32", "bfloat16")},
    }


def _print_tables(found: Inspection) -> None:
    if found.parameters:
        table = Table("parameter", "shape", "type in the file", "numbers")
        table.columns[3].justify = "right"
        for one in found.parameters:
            table.add_row(one.path, str(one.shape), one.dtype or ("0" if one.tensor is None else "?"), f"{one.count:,}")
    else:
        table = Table("tensor", "shape", "type")
        for name, header in found.tensors.items():
            table.add_row(escape(name), str(header.shape), header.dtype)
    rich.print(table)
    rich.print({"family": found.family, "tokenizer": found.tokenizer, **found.changes})
    sizes = ", ".join(f"{found.bytes_in_memory(dtype):,} as {dtype}" for dtype in ("float32", "bfloat16"))
    print(f"{found.count:,} parameters; bytes: {found.bytes_on_disk:,} on disk, {sizes}")
    for name in found.ignored:
        print(f"ignored: {name!r}")
    for problem in found.problems:
        print(f"problem: {problem}")


def load_run(folder: Path) -> tuple[Decoder, Any, Tokenizer]:
    """Returns model, parameters and tokenizer of a run's newest checkpoint.

    Raises:
      FileNotFoundError: no run there, or none that has saved yet.
      ValueError: a damaged checkpoint.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; give the one that experiments/train_lm.py wrote")
    with Checkpointer(folder / "checkpoints") as checkpointer:
        meta = checkpointer.read_meta()
        for name, kind in {"config": dict, "tokenizer": str}.items():
            if not isinstance(meta.get(name), kind):
                raise ValueError(f"the checkpoint in {folder} is damaged: its meta holds no {name}")
        config, tokenizer = Config.from_dict(meta["config"]), Tokenizer.from_json(meta["tokenizer"])
        if config.architecture != "decoder":
            raise ValueError(f"{folder} holds an {config.architecture}; only a decoder can continue a text")
        model = Decoder(config)
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
        return model, checkpointer.restore_params(shapes), tokenizer


COMMANDS: dict[str, Callable[..., Generate | Inspect]] = {"generate": Generate, "inspect": Inspect}


def main() -> None:
    """Runs the command that the arguments name."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, description=__doc__)()
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"error: {error.args[0] if isinstance(error, KeyError) else error}")
    except KeyboardInterrupt:
        sys.exit(130)
