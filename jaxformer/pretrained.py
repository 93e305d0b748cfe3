"""Published models in and out: a folder of config.json and safetensors <-> config, parameters and tokenizer.

A GGUF file comes in by the same way: `convert/from_gguf.py` says what it holds as if it were such a folder.

What differs between families stands in `convert/`: one table each of keys and of tensors, which says both directions.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxformer import sharding
from jaxformer.config import Config
from jaxformer.convert import safetensors
from jaxformer.convert.families import family_for, family_of
from jaxformer.convert.family import Family
from jaxformer.convert.files import json_object, map_file, replace_file
from jaxformer.convert.from_gguf import as_folder
from jaxformer.convert.gguf import GGUFFile
from jaxformer.convert.shards import is_there, load_folder
from jaxformer.convert.special import SpecialIds, read_special
from jaxformer.convert.tensors import shapes, to_params, to_tensors
from jaxformer.convert.torch_file import TORCH, load_torch
from jaxformer.models import Model, build

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
_SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """What a checkpoint holds.

    Attributes:
      config: it computes in float32; `build(dataclasses.replace(config, dtype="bfloat16"))` does in bfloat16.
      model: `build(config)`.
      params: its parameters, in the layout of a loop over layers.
      tokenizer: a `tokenizers.Tokenizer`; None where the checkpoint has none.
      special: the tokens that begin, end and fill a text, as `generate` wants them.
    """

    config: Config
    model: Model
    params: dict[str, Any]
    tokenizer: Any
    special: SpecialIds


def load(
    path: str | Path,
    *,
    dtype: str | None = None,
    head: str | None = None,
    mesh: Mesh | None = None,
    tokenizer: bool = True,
    torch_files: bool = False,
) -> Pretrained:
    """Read a published model.

    The files are mapped and turned into parameters leaf by leaf, so that no second copy of the model is in memory.

    Args:
      path: a folder with config.json, model.safetensors (or its index and shards) and perhaps tokenizer.json; or a
        file that ends in .gguf, whose quantised tensors become float32.
      dtype: type of all parameters, "float32", "bfloat16" or "float16". None: each keeps the type of its tensor, but
        float64 becomes float32, and so do scales that are stored as w for 1 + w, which bfloat16 would round.
      head: of an encoder, such as "none" for its hidden states; the tensors of other heads are left out. None: the one
        of the class that config.json names.
      tokenizer: False leaves the tokenizer out, for a model whose tokenizer is refused.
      torch_files: read pytorch_model.bin where there are no safetensors. It is a program, of which nothing is executed;
        a file that needs more than a table of tensors is refused.
      mesh: where parameters are laid out as `sharding.shardings` says. None: on the default device.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: files that are not as they should be, or a model that this package does not have; the message names
        the file and the key or tensor.
    """
    path = Path(path)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} is not one of {sorted(_DTYPES)}")
    if path.suffix == ".gguf" and not path.is_dir():
        return _load_gguf(path, head, dtype, mesh, tokenizer)
    if not path.is_dir():
        what = "does not exist" if not path.exists() else "is a file"
        raise FileNotFoundError(f"{path} {what}; give a folder with config.json and weights, or a .gguf file")
    return _load_folder(path, head, dtype, mesh, tokenizer, torch_files)


def save(
    path: str | Path,
    config: Config,
    params: Any,
    *,
    tokenizer: Any = None,
    special: SpecialIds | None = None,
    family: str | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a model as a folder that `transformers` opens and that `load` reads back bit by bit.

    How a model is run (`dtype`, `param_dtype`, `attention`, `scan_layers`) is not written, nor is dropout where the
    family has no key for it.

    Args:
      path: the folder, new or not.
      params: of the config's model, stacked if it scans its layers.
      tokenizer: a `tokenizers.Tokenizer` or a `jaxformer.tokenizers.Tokenizer`, kept as tokenizer.json.
      special: tokens that begin, end and fill a text, such as those of the model that was loaded. None: only what the
        classes of the family cannot do without.
      family: name in config.json of the family to write, such as "gpt2"; None: the first that can be this config.
      max_shard_bytes: bytes of tensors in one file; a larger model is spread over several.

    Raises:
      ValueError: a config that no family, or not this one, can be; parameters that are not the config's; values that
        the family's files cannot hold; files in the folder that would contradict the new ones.
    """
    path = Path(path)
    written = family_for(config, family)
    tensors = to_tensors(written.names, config, params)
    safetensors.save(path / "model.safetensors", tensors, {"format": "pt"}, max_shard_bytes=max_shard_bytes)
    source = written.source(config) | {"dtype": str(next(iter(tensors.values())).dtype)}
    source |= {} if special is None else special.source()
    replace_file(path / "config.json", [json.dumps(source, indent=2, sort_keys=True).encode() + b"\n"])
    if tokenizer is not None:
        text = tokenizer.to_json() if hasattr(tokenizer, "to_json") else tokenizer.to_str(pretty=True)
        replace_file(path / "tokenizer.json", [text.encode()])


def _load_folder(
    path: Path, head: str | None, dtype: str | None, mesh: Mesh | None, tokenizer: bool, torch_files: bool
) -> Pretrained:
    said = path / "config.json"
    source = json_object(str(said), bytes(map_file(said)))
    family, config = _read_config(said, source, head)
    special = _special(path, source, config)
    params = _read_params(path, family, config, _tensors(path, torch_files), _placed(config, dtype, mesh))
    return _pretrained(config, params, load_tokenizer(path / "tokenizer.json") if tokenizer else None, special)


def _special(path: Path, source: dict[str, Any], config: Config) -> SpecialIds:
    more = path / "generation_config.json"
    generation = json_object(str(more), bytes(map_file(more))) if more.exists() else {}
    try:
        return read_special(source, generation, config.of_decoder.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _tensors(path: Path, torch_files: bool) -> dict[str, NDArray[Any]]:
    if is_there(path, safetensors.SINGLE) or not is_there(path, TORCH):
        return safetensors.load(path)
    if not torch_files:
        raise ValueError(
            f"{path} holds no safetensors, only {TORCH}, which is a program; load(..., torch_files=True) reads it "
            "without executing anything"
        )
    return load_folder(path, TORCH, load_torch)


def _load_gguf(path: Path, head: str | None, dtype: str | None, mesh: Mesh | None, tokenizer: bool) -> Pretrained:
    file = GGUFFile(path)
    source, tensors = as_folder(file)
    family, config = _read_config(path, source, head)
    numbers = sum(math.prod(info.shape) for info in file.tensors.values())
    special = read_special(source, {}, config.vocab_size)
    params = _read_params(path, family, config, tensors, _placed(config, dtype, mesh), numbers)
    if not tokenizer:
        return _pretrained(config, params, None, special)
    from jaxformer.convert import gguf_tokenizer  # needs the `tokenizers` library

    return _pretrained(config, params, gguf_tokenizer.tokenizer(file), special)


def _read_config(path: Path, source: dict[str, Any], head: str | None) -> tuple[Family, Config]:
    try:
        family = family_of(source)
        return family, family.config(source, head)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_params(path: Path, family: Family, config: Config, *how: Any) -> dict[str, Any]:
    try:
        return to_params(family.names, config, *how)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _placed(config: Config, dtype: str | None, mesh: Mesh | None) -> Callable[[str, NDArray[Any]], jax.Array]:
    """Return what makes a parameter of a view of a file: a copy, so that the file may go."""
    places: dict[str, Any] = {}
    if mesh is not None:
        leaves = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes(config).items()}
        places = sharding.shardings(leaves, mesh)

    def put(path: str, array: NDArray[Any]) -> jax.Array:
        kind = _DTYPES[dtype] if dtype else jnp.float32 if array.dtype == np.float64 else array.dtype
        return jax.device_put(np.array(array, kind, order="C"), places.get(path))

    return put


def load_tokenizer(path: Path) -> Any:
    """Read a tokenizer.json; None where there is none.

    Raises:
      ValueError: it is there, and the `tokenizers` library refuses it.
    """
    if not path.exists():
        return None
    import tokenizers

    text = bytes(map_file(path))
    try:
        return tokenizers.Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises nothing more particular
        raise ValueError(f"{path} is no tokenizer: {error}") from error


def _pretrained(config: Config, params: dict[str, Any], tokenizer: Any, special: SpecialIds) -> Pretrained:
    """Say in the config in which type the parameters are stored, and build its model."""
    stored = params["embed"]["token"]["embedding"].dtype
    config = dataclasses.replace(config, param_dtype="bfloat16" if stored == jnp.bfloat16 else "float32")
    return Pretrained(config, build(config), params, tokenizer, special)
