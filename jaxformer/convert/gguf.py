"""The GGUF format: typed metadata, a table of tensors, then their data, most of it quantised in blocks.

    file   = "GGUF", version, number of tensors, number of pairs, pairs (key, type, value), table, padding, data
    tensor = name, number of sizes, sizes (the innermost first), type, offset in the data

A block of 32 or 256 weights shares a scale d (and a minimum m): w = d q, or w = d q + m. The `gguf` package makes
float32 of blocks; what the file says is checked here before that.

References:
  https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxformer.convert.files import map_file

Value = bool | int | float | str | list[str] | NDArray[Any]

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
"""Types of tensors that `GGUFFile.tensor` reads; each is tested against the definition of its blocks."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class TensorInfo(NamedTuple):
    """Where a tensor lies in a file.

    Args:
      shape: as in NumPy, the outermost size first (the file has them the other way round).
      type: the name of its type, such as "Q4_1".
      start: its first byte in the file.
      size: its bytes.
    """

    shape: tuple[int, ...]
    type: str
    start: int
    size: int


class GGUFFile:
    """A mapped file: its metadata and its table are read at once, a tensor when it is asked for.

    Args:
      path: the file, of version 2 or 3, little-endian.

    Attributes:
      metadata: values by key; numbers, strings, and arrays: lists of strings, or NumPy arrays of numbers.
      tensors: the table, by name, in the order of the file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: anything in it that is not as the format says.
      ImportError: the `gguf` package is not installed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._gguf = _library()
        self._mapped = map_file(self.path)
        cursor = _Cursor(self.path, self._mapped)
        if (magic := cursor.take(4, "the magic number")) != b"GGUF":
            raise ValueError(f"{path} starts with {magic!r} and not with b'GGUF'")
        if (version := cursor.number("I", "the version")) not in (2, 3):
            raise ValueError(f"{path} is of version {version} (or big-endian); convert it to version 3, little-endian")
        # The least that one takes in the file: its name's length, its type, and one byte of value or one offset.
        num_tensors = cursor.count("the number of tensors", 24)
        num_pairs = cursor.count("the number of metadata", 13)
        self.metadata: Mapping[str, Value] = cursor.pairs(num_pairs)
        self.tensors: Mapping[str, TensorInfo] = self._table(cursor, num_tensors)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor in float32; read-only if the file holds it so.

        Raises:
          KeyError: there is no such tensor.
          ValueError: its type is not one of TYPES.
        """
        if name not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {name!r}; it has {', '.join(list(self.tensors)[:5])}, ...")
        info = self.tensors[name]
        if info.type not in TYPES:
            raise ValueError(f"{self.path}: tensor {name!r} is {info.type}; requantise it to {', '.join(TYPES)}")
        rows = prod(info.shape[:-1])
        blocks = np.frombuffer(self._mapped, np.uint8, info.size, info.start).reshape(rows, info.size // rows)
        # In a scale that is infinite or NaN the file holds no weights, but no error of this reader either.
        with np.errstate(invalid="ignore", over="ignore"):
            weights = self._gguf.dequantize(blocks, self._gguf.GGMLQuantizationType[info.type])
        return weights.reshape(info.shape)

    def _table(self, cursor: "_Cursor", number: int) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{self.path}: general.alignment is {alignment!r} and not a power of two")
        tensors: dict[str, TensorInfo] = {}
        end = 0  # Each tensor starts where the one before it ends, up to alignment.
        for _ in range(number):
            name = cursor.string("a tensor's name")
            if name in tensors:
                raise ValueError(f"{self.path}: tensor {name!r} stands twice in the table")
            info = self._entry(cursor, f"{self.path}: tensor {name!r}")
            if info.start != end:
                raise ValueError(f"{self.path}: tensor {name!r} is at byte {info.start} of the data, not at {end}")
            end = _aligned(end + info.size, alignment)
            tensors[name] = info
        start = _aligned(cursor.at, alignment)
        for name, info in tensors.items():
            tensors[name] = info._replace(start=start + info.start)
            if start + info.start + info.size > len(self._mapped):
                raise ValueError(f"{self.path}: tensor {name!r} ends after byte {len(self._mapped)}; it is cut short")
        return tensors

    def _entry(self, cursor: "_Cursor", what: str) -> TensorInfo:
        """Read a line of the table; its start is still counted from the data's."""
        rank = cursor.number("I", f"{what}: the number of sizes")
        if rank > 4:
            raise ValueError(f"{what} has {rank} sizes; the format has at most 4")
        shape = tuple(cursor.number("Q", f"{what}: a size") for _ in range(rank))[::-1]
        number = cursor.number("I", f"{what}: the type")
        start = cursor.number("Q", f"{what}: the offset")
        try:
            kind = self._gguf.GGMLQuantizationType(number)
        except ValueError as error:
            raise ValueError(f"{what} has a type with the number {number}, which gguf does not know") from error
        if not all(shape):
            raise ValueError(f"{what} has shape {shape}, without any element")
        weights, size = self._gguf.GGML_QUANT_SIZES[kind]
        row = shape[-1] if shape else 1
        if row % weights:
            raise ValueError(f"{what} has rows of {row}, which are no whole {kind.name} blocks of {weights}")
        return TensorInfo(shape, kind.name, start, prod(shape) // weights * size)


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ImportError('GGUF files need the gguf package: pip install "jaxformer[gguf]"') from error
    return gguf


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class _Cursor:
    """Reads values one after the other and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int, what: str) -> bytes:
        left = len(self.data) - self.at
        if size > left:
            raise ValueError(f"{self.path}: {what} takes {size} bytes, but {left} are left; the file is cut short")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str, what: str) -> Any:
        if code == "?":
            return bool(self.booleans(1, what)[0])
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0]

    def count(self, what: str, least: int) -> int:
        """Read how many things of at least so many bytes follow; no more than fit, so that lists stay small."""
        number = self.number("Q", what)
        if number * least > len(self.data) - self.at:
            raise ValueError(f"{self.path}: {what} is {number}, too many for the file; it is cut short or damaged")
        return number

    def booleans(self, number: int, what: str) -> NDArray[np.bool_]:
        content = np.frombuffer(self.take(number, what), np.uint8)
        if content.max(initial=0) > 1:
            raise ValueError(f"{self.path}: {what} is boolean, but holds bytes other than 0 and 1")
        return content.view(np.bool_)

    def string(self, what: str) -> str:
        content = self.take(self.count(f"the length of {what}", 1), what)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} at byte {self.at - len(content)} is not UTF-8") from error

    def pairs(self, number: int) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for _ in range(number):
            key = self.string("a key of the metadata")
            if key in found:
                raise ValueError(f"{self.path}: {key!r} stands twice in the metadata")
            kind = self.number("I", f"the type of {key!r}")
            found[key] = self.array(repr(key)) if kind == _ARRAY else self.value(kind, repr(key))
        return found

    def value(self, kind: int, what: str) -> Value:
        if kind == _STRING:
            return self.string(what)
        return self.number(self.code(kind, what), what)

    def array(self, what: str) -> Value:
        kind = self.number("I", f"the type in {what}")
        if kind == _STRING:
            return [self.string(what) for _ in range(self.count(f"the length of {what}", 8))]
        code = self.code(kind, what)
        length = self.count(f"the length of {what}", struct.calcsize(f"<{code}"))
        if kind == _BOOL:
            return self.booleans(length, what)
        dtype = np.dtype(f"<{code}")
        return np.frombuffer(self.take(length * dtype.itemsize, what), dtype)

    def code(self, kind: int, what: str) -> str:
        if kind not in _NUMBERS:
            raise ValueError(f"{self.path}: {what} has type {kind}, but a number, string or array of those is known")
        return _NUMBERS[kind]
