"""What a published model's files say, read from their headers alone: no tensor is read.

`load` stops at the first thing that is wrong; this lists all of them that the headers show.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.config import Config
from jaxformer.convert import gguf, safetensors
from jaxformer.convert.families import family_of
from jaxformer.convert.family import Family
from jaxformer.convert.files import Header, json_object, map_file
from jaxformer.convert.from_gguf import headers as gguf_headers
from jaxformer.convert.gguf_config import read_config
from jaxformer.convert.keys import check_refused
from jaxformer.convert.shards import is_there, load_folder
from jaxformer.convert.tensors import FLOATS, check_sizes, match_names, shapes
from jaxformer.convert.torch_file import TORCH, headers_torch
from jaxformer.pretrained import load_tokenizer

_WEIGHTS = {*(dtype.name for dtype in FLOATS), *gguf.TYPES}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model that the config says.

    Attributes:
      path: as in the parameters that `load` returns.
      shape: of the parameter; a tensor that holds several, or turned, has another.
      dtype: the file's name for the type of its tensor; None: there is no tensor.
      tensor: name of its tensor in the words of the family; None: the parameter is 0 and has none.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str | None
    tensor: str | None

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What the headers of a model's files say.

    Attributes:
      path: the folder or file.
      family: its name in config.json; None: it names none that is known.
      config: None where it cannot be read; `problems` says why.
      tensors: what is said of each tensor, by its name in the words of the family.
      parameters: of the config's model, in its order; none without a config.
      tokenizer: its kind and the size of its vocabulary; None: there is none that is read.
      ignored: names of tensors that hold no weights, such as masks.
      missing: names of tensors that the config asks for, with the shapes that they must have.
      unexpected: names of tensors that a model of the config has no place for.
      misshapen: names of tensors, with the shapes that they have and that the config says.
      problems: a sentence for each thing for which `load` refuses the files; it may refuse values too (NaN), and a head
        unlike the embedding to which it is tied.
    """

    path: Path
    family: str | None = None
    config: Config | None = None
    tensors: Mapping[str, Header] = dataclasses.field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    tokenizer: tuple[str, int] | None = None
    ignored: tuple[str, ...] = ()
    missing: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    misshapen: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many numbers the parameters hold; each shared one counts once."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all tensors in the files, ignored ones among them."""
        return sum(header.size for header in self.tensors.values())

    @property
    def changes(self) -> dict[str, Any]:
        """The config's fields that are not at their defaults."""
        if self.config is None:
            return {}
        fields = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(Config)}
        defaults = {field.name: field.default for field in dataclasses.fields(Config)}
        return {name: value for name, value in fields.items() if value != defaults[name]}

    def bytes_in_memory(self, dtype: str) -> int:
        """Return the bytes of the parameters in a type, "float32" or "bfloat16".

        Raises:
          KeyError: another type.
        """
        return self.count * {"float32": 4, "bfloat16": 2}[dtype]


def inspect(path: str | Path) -> Inspection:
    """Say what a model's files hold without reading a tensor or executing anything.

    Args:
      path: a folder with config.json and weights (safetensors, or PyTorch's .bin), or a .gguf file.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: a damaged file. What is wrong in a config, or does not fit it, is told of in the result instead.
    """
    path = Path(path)
    problems: list[str] = []
    if path.suffix == ".gguf" and not path.is_dir():
        source, tensors, tokenizer = _gguf(path, problems)
    elif path.is_dir():
        source, tensors, tokenizer = _folder(path, problems)
    else:
        what = "is a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; give a folder with config.json and weights, or a .gguf file")
    family = None
    if source is not None:
        try:
            family = family_of(source)
        except ValueError as error:
            problems.append(str(error))
    found = Inspection(path, family.model_type if family else None, None, tensors, tokenizer=tokenizer)
    if source is not None and family is not None and (config := _config(family, source, problems)) is not None:
        found = _matched(dataclasses.replace(found, config=config), family, config, problems)
    return dataclasses.replace(found, problems=tuple(problems))


# Files ----------------------------------------------------------------------------------------------------------------

_Said = tuple[dict[str, Any] | None, Mapping[str, Header], tuple[str, int] | None]


def _folder(path: Path, problems: list[str]) -> _Said:
    said = path / "config.json"
    source = json_object(str(said), bytes(map_file(said)))
    if is_there(path, safetensors.SINGLE) or not is_there(path, TORCH):
        tensors = safetensors.headers(path)
    else:
        tensors = load_folder(path, TORCH, headers_torch)
    return source, tensors, _tokenizer(lambda: load_tokenizer(path / "tokenizer.json"), problems)


def _gguf(path: Path, problems: list[str]) -> _Said:
    file = gguf.GGUFFile(path)
    from jaxformer.convert import gguf_tokenizer  # needs the `tokenizers` library

    tokenizer = _tokenizer(lambda: gguf_tokenizer.tokenizer(file), problems)
    try:
        source = read_config(file)
    except ValueError as error:
        problems.append(str(error))
        return None, {name: Header(info.shape, info.type, info.size) for name, info in file.tensors.items()}, tokenizer
    return source, gguf_headers(file, source), tokenizer


def _tokenizer(read: Any, problems: list[str]) -> tuple[str, int] | None:
    try:
        tokenizer = read()
    except ValueError as error:
        problems.append(str(error))
        return None
    return None if tokenizer is None else (type(tokenizer.model).__name__, tokenizer.get_vocab_size())


# What they say --------------------------------------------------------------------------------------------------------


def _config(family: Family, source: Mapping[str, Any], problems: list[str]) -> Config | None:
    """Return the config, or tell of all keys that stand in its way."""
    before = len(problems)
    for name, value in source.items():
        try:
            check_refused({name: value}, family.only)
        except ValueError as error:
            problems.append(str(error))
    for key in family.keys.values():
        try:
            key.get(source)
        except ValueError as error:
            problems.append(str(error))
    if len(problems) > before:
        return None
    try:
        return family.config(source)
    except ValueError as error:
        problems.append(str(error))
        return None


def _matched(found: Inspection, family: Family, config: Config, problems: list[str]) -> Inspection:
    """Add the parameters, and what in the tensors does not fit them."""
    tensors = found.tensors
    try:
        check_sizes(config, len(tensors), sum(math.prod(header.shape) for header in tensors.values()))
    except ValueError as error:
        problems.append(str(error))
        return found
    match, wanted = match_names(family.names, config, tensors), shapes(config)
    tensor_of = {path: name for name, _, paths in match.taken for path in paths}
    parameters = [_parameter(path, shape, tensor_of.get(path), tensors) for path, shape in wanted.items()]
    asked = {name: rule.shape(config) for name, rule, _ in match.taken}
    missing = {name: shape for name, shape in asked.items() if name not in tensors}
    misshapen = {
        name: (tensors[name].shape, shape)
        for name, shape in asked.items()
        if name in tensors and tensors[name].shape != shape
    }
    problems += [f"tensor {name!r} of shape {shape} is missing" for name, shape in missing.items()]
    problems += [
        f"tensor {name!r} has shape {shape}, but the config makes it {needed}"
        for name, (shape, needed) in misshapen.items()
    ]
    problems += [
        f"tensor {name!r} has type {tensors[name].dtype}, which no weights that are read have"
        for name in asked
        if name in tensors and tensors[name].dtype not in _WEIGHTS
    ]
    problems += [f"no model of this config has the tensor {name!r}" for name in match.unexpected]
    return dataclasses.replace(
        found,
        parameters=tuple(parameters),
        ignored=tuple(match.ignored),
        missing=missing,
        unexpected=tuple(match.unexpected),
        misshapen=misshapen,
    )


def _parameter(path: str, shape: tuple[int, ...], tensor: str | None, tensors: Mapping[str, Header]) -> Parameter:
    header = None if tensor is None else tensors.get(tensor)
    return Parameter(path, shape, header.dtype if header else None, tensor)
