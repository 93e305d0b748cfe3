"""The safetensors format: JSON that says where each tensor lies, then the bytes of all tensors.

    file   = n (8 bytes, little-endian), header (n bytes of JSON), data
    header = {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__": {str: str}}

The tensors fill the data from its first byte to its last, without overlap and without holes. A model is one file, or
several (shards) with an index beside them: {"weight_map": {name: file}}.

References:
  https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxformer.convert.files import Header, json_object, map_file, replace_file, strings
from jaxformer.convert.shards import load_folder

SINGLE = "model.safetensors"
"""Name of a model's file, where there is one."""
HEADER_LIMIT = 100_000_000
"""Bytes above which a header is refused, as in the reference implementation."""

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"),
}
"""The format's names of types."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")


def load(path: str | Path) -> dict[str, NDArray[Any]]:
    """Open a model's tensors as read-only views of the mapped files; a tensor is read when it is first used.

    Args:
      path: a file, or a folder that holds either model.safetensors or model.safetensors.index.json and its shards.

    Returns:
      the tensors by name, in the order in which they lie in the files.

    Raises:
      FileNotFoundError: the file, or one that the index names, is not there.
      ValueError: anything in a file or the index that is not as the format says, by the names of file and tensor; or a
        link that leads out of the folder (other than into the store of the Hugging Face cache).
    """
    return _load(Path(path), _view)


def headers(path: str | Path) -> dict[str, Header]:
    """Return what the files say of their tensors, of which none is read; see `load` for what is raised."""
    return _load(Path(path), lambda what, data, entry: Header(entry.shape, entry.dtype.name, entry.end - entry.begin))


def load_metadata(path: str | Path) -> dict[str, str]:
    """Return the strings that a file carries beside its tensors; see `load` for what is raised."""
    return _read(Path(path), _view)[1]


def save(
    path: str | Path,
    tensors: Mapping[str, ArrayLike],
    metadata: Mapping[str, str] | None = None,
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Write tensors bit by bit, in the order of the mapping; each file appears only when it is complete.

    Where an element would come to lie across a multiple of its size, the tensors of larger elements go first (readers
    that map the file need it). So the data of a saved `load(path)` are the bytes of the file, if it was aligned.

    Args:
      path: the file; `model.safetensors` is the name that other libraries look for.
      tensors: arrays whose types are in DTYPES.
      metadata: strings to keep with them; transformers wants {"format": "pt"}.
      max_shard_bytes: bytes of tensors above which they are spread over files model-00001-of-00002.safetensors and so
        on, with an index named `path` + ".index.json" (a tensor that is larger gets a file of its own).

    Raises:
      ValueError: a type or name that the format does not have, metadata that are not strings, or a file that would be
        taken for a second form of this model.
    """
    path, metadata = Path(path), strings("metadata", dict(metadata or {}))
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is less than 1; leave it out for one file")
    arrays = {name: _little_endian(name, np.asarray(tensor)) for name, tensor in tensors.items()}
    shards = _split(arrays, max_shard_bytes)
    index = path.with_name(f"{path.name}.index.json")
    other = index if len(shards) == 1 else path
    if other.exists():
        raise ValueError(f"{other} is there already and would contradict the new files; remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(shards) == 1:
        _write(path, arrays, metadata)
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = path.with_name(f"{path.stem}-{i:05d}-of-{len(shards):05d}{path.suffix}")
        _write(file, shard, metadata)
        weight_map.update(dict.fromkeys(shard, file.name))
    total = sum(array.nbytes for array in arrays.values())
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    replace_file(index, [json.dumps(content, indent=2).encode()])


# Reading --------------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


_T = TypeVar("_T")
_Make = Callable[[str, NDArray[np.uint8], _Entry], _T]
"""Makes of a tensor's name for errors, the data and its entry what the caller asked for."""


def _load(path: Path, make: _Make[_T]) -> dict[str, _T]:
    def read(file: Path) -> dict[str, _T]:
        return _read(file, make)[0]

    return load_folder(path, SINGLE, read) if path.is_dir() else read(path)


def _read(path: Path, make: _Make[_T]) -> tuple[dict[str, _T], dict[str, str]]:
    mapped = map_file(path)
    size = int.from_bytes(mapped[:8], "little")
    if size > HEADER_LIMIT:
        raise ValueError(f"{path}: a header of {size} bytes is over the limit of {HEADER_LIMIT}; not safetensors?")
    if size > len(mapped) - 8:
        raise ValueError(f"{path}: a header of {size} bytes does not fit in {len(mapped)}; the file is cut short")
    header = json_object(f"{path}: the header", mapped[8 : 8 + size])
    metadata = strings(f"{path}: {_METADATA}", header.pop(_METADATA, {}))
    entries = {name: _entry(f"{path}: tensor {name!r}", fields) for name, fields in header.items()}
    data = np.frombuffer(mapped, np.uint8)[8 + size :]
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    _check_cover(path, entries, len(data))
    return {name: make(f"{path}: tensor {name!r}", data, entry) for name, entry in entries.items()}, metadata


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _entry(what: str, fields: Any) -> _Entry:
    """Check what the header says of one tensor, alone."""
    if not isinstance(fields, dict) or fields.keys() != set(_FIELDS):
        raise ValueError(f"{what} must be described by {', '.join(_FIELDS)} and nothing else")
    dtype, shape, offsets = (fields[name] for name in _FIELDS)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{what} has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    # NumPy holds 64 dimensions; it counts the bytes of an empty array as if its zeros were ones.
    if not _are_sizes(shape) or len(shape) > 64:
        raise ValueError(f"{what} has a shape that is not a list of at most 64 sizes >= 0")
    if math.prod(size for size in shape if size) * DTYPES[dtype].itemsize >= 2**63:
        raise ValueError(f"{what} has shape {shape}, which no array can have")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{what} has data_offsets that are not two numbers >= 0")
    begin, end = offsets
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != wanted:
        raise ValueError(f"{what} has data_offsets {offsets}, but {dtype} {shape} takes {wanted} bytes")
    return _Entry(DTYPES[dtype], tuple(shape), begin, end)


def _check_cover(path: Path, entries: dict[str, _Entry], size: int) -> None:
    """Check that the entries, in order, fill the data exactly."""
    filled = 0
    for name, entry in entries.items():
        if entry.end > size:
            raise ValueError(f"{path}: tensor {name!r} ends at byte {entry.end} of {size}; the file is cut short")
        if entry.begin < filled:
            raise ValueError(f"{path}: tensor {name!r} overlaps the one before it at byte {entry.begin} of the data")
        if entry.begin > filled:
            raise ValueError(f"{path}: bytes {filled} to {entry.begin} before tensor {name!r} belong to no tensor")
        filled = entry.end
    if filled < size:
        raise ValueError(f"{path}: bytes {filled} to {size} at the end of the data belong to no tensor")


def _view(what: str, data: NDArray[np.uint8], entry: _Entry) -> NDArray[Any]:
    content = data[entry.begin : entry.end]
    if entry.dtype == np.bool_ and content.max(initial=0) > 1:
        raise ValueError(f"{what} is BOOL, but holds bytes other than 0 and 1")
    return content.view(entry.dtype).reshape(entry.shape)


# Writing --------------------------------------------------------------------------------------------------------------


def _little_endian(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if name == _METADATA:
        raise ValueError(f"a tensor cannot be named {_METADATA}; that name holds the metadata")
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _NAMES:
        raise ValueError(f"tensor {name!r} has dtype {array.dtype}; known are {', '.join(map(str, _NAMES))}")
    return array.astype(dtype, copy=False)


def _split(arrays: dict[str, NDArray[Any]], limit: int | None) -> list[dict[str, NDArray[Any]]]:
    shards: list[dict[str, NDArray[Any]]] = [{}]
    size = 0
    for name, array in arrays.items():
        if limit is not None and shards[-1] and size + array.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    return shards


def _write(path: Path, arrays: dict[str, NDArray[Any]], metadata: dict[str, str]) -> None:
    ends = np.cumsum([array.nbytes for array in arrays.values()])
    if any(end % array.itemsize for end, array in zip(ends, arrays.values(), strict=True)):
        arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = dict(zip(_FIELDS, (_NAMES[array.dtype], list(array.shape), [begin, end]), strict=True))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    contents = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays.values())
    replace_file(path, chain([len(text).to_bytes(8, "little"), text], contents))
