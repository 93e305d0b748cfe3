"""PyTorch's own files (`pytorch_model.bin`, `.pt`), read without PyTorch and without executing anything of them.

    zip    = NAME/data.pkl, a pickle of the tensors' places, and NAME/data/KEY, the bytes of each storage
    stream = pickles of a magic number, a version, the system and the places; of the KEYs; then (size, bytes) of each
    tensor = storage[offset + i . strides] for every index i below its shape

Where there is a choice, take the safetensors file of a model: it holds no program at all.
"""

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxformer.convert.files import Header, map_file
from jaxformer.convert.pickles import Interpreter, Storage, Tensor

TORCH = "pytorch_model.bin"
"""The name of such a file in a model's folder."""
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001
_STREAM = b"\x80\x02\x8a\x0a" + _MAGIC.to_bytes(10, "little") + b"."
_BAD_ZIP = (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error)


def load_torch(path: str | Path, key: str | None = None) -> dict[str, NDArray[Any]]:
    """Read a state dict as read-only views of the mapped file, executing nothing of it.

    The package calls it for nobody who does not ask for such a file to be read.

    Args:
      path: a file of `torch.save`, in the zip format or as a stream from before PyTorch 1.6.
      key: where the file holds a dictionary of which one value is the state dict, that value's key.

    Returns:
      the tensors by name, in the order of the file; some may share their memory.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: names or operations that a state dict has no need of, values that are not tensors, tensors that leave
        their storages, or a damaged file.
    """
    mapped = map_file(path)
    try:
        tensors, places = _open(Path(path), mapped, key, _start)
        data = np.frombuffer(mapped, np.uint8)
        contents = {storage.key: _content(data, start, storage) for storage, start in places}
        return {name: _view(contents[tensor.storage.key], tensor) for name, tensor in tensors.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def headers_torch(path: str | Path, key: str | None = None) -> dict[str, Header]:
    """Return what a file says of its tensors, of which none is read, nor are checksums; see `load_torch`."""
    mapped = map_file(path)
    try:
        tensors, _ = _open(Path(path), mapped, key, _unchecked_start)
        return {
            name: Header(tensor.shape, tensor.storage.dtype.name, prod(tensor.shape) * tensor.storage.dtype.itemsize)
            for name, tensor in tensors.items()
        }
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# The two formats ------------------------------------------------------------------------------------------------------


_Starts = Callable[[mmap.mmap, zipfile.ZipInfo], int]


def _open(
    path: Path, mapped: mmap.mmap, key: str | None, storage_start: _Starts
) -> tuple[dict[str, Tensor], list[tuple[Storage, int]]]:
    """Return where the tensors lie in storages, and where the storages begin.

    Args:
      storage_start: finds where the bytes of a storage begin in a zip file.
    """
    pickles = Interpreter()
    if mapped[:4] == b"PK\3\4":
        root, starts = _open_zip(path, mapped, pickles, storage_start)
    elif mapped[: len(_STREAM)] == _STREAM:
        root, starts = _open_stream(mapped, pickles)
    else:
        raise ValueError("the file is neither a zip file nor a stream of torch.save")
    return _state_dict(root, key), [(pickles.storages[key], at) for key, at in starts.items()]


def _open_zip(
    path: Path, mapped: mmap.mmap, pickles: Interpreter, storage_start: _Starts
) -> tuple[Any, dict[str, int]]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except _BAD_ZIP as error:
        raise ValueError(f"the zip file is damaged: {error}") from error
    found = {entry.filename: entry for entry in entries}
    if len(found) < len(entries):
        raise ValueError("two entries of the zip file have one name")
    if sum(entry.file_size for entry in entries) > len(mapped):  # else few bytes could take long to check
        raise ValueError("the zip file is damaged: its entries are larger than the file")
    programs = [name for name in found if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(programs) != 1:
        raise ValueError(f"the zip file holds {len(programs)} entries NAME/data.pkl and not one")
    folder = programs[0].removesuffix("data.pkl")
    if (order := found.get(folder + "byteorder")) is not None:
        start = _start(mapped, order)
        if mapped[start : start + order.file_size] != b"little":
            raise ValueError("the numbers are big-endian; save the file again on a little-endian machine")
    start = _start(mapped, found[programs[0]])
    root = pickles.run(io.BytesIO(mapped[start : start + found[programs[0]].file_size]))
    starts = {}
    for key, storage in pickles.storages.items():
        entry = found.get(f"{folder}data/{key}")
        wanted = storage.size * storage.dtype.itemsize
        if entry is None or entry.file_size != wanted:
            raise ValueError(f"storage {key!r} has no entry of {wanted} bytes in the zip file")
        starts[key] = storage_start(mapped, entry)
    return root, starts


def _start(mapped: mmap.mmap, entry: zipfile.ZipInfo) -> int:
    """Return where the bytes of an entry begin, and check them."""
    start = _unchecked_start(mapped, entry)
    if zlib.crc32(memoryview(mapped)[start : start + entry.file_size]) != entry.CRC:
        raise ValueError(f"the zip file is damaged: the checksum of entry {entry.filename!r} is wrong")
    return start


def _unchecked_start(mapped: mmap.mmap, entry: zipfile.ZipInfo) -> int:
    """Return where the bytes of an entry begin, which is after its own header."""
    name, header = entry.filename, mapped[entry.header_offset : entry.header_offset + 30]
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
        raise ValueError(f"entry {name!r} is compressed or encrypted, as torch.save never does")
    if len(header) < 30 or header[:4] != b"PK\3\4":
        raise ValueError(f"the zip file is damaged: entry {name!r} is not where its directory says")
    start = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
    if start + entry.file_size > len(mapped):
        raise ValueError(f"the zip file is damaged: entry {name!r} ends after the file")
    return start


def _open_stream(mapped: mmap.mmap, pickles: Interpreter) -> tuple[Any, dict[str, int]]:
    magic, version, system = (pickles.run(mapped) for _ in range(3))
    little_endian = isinstance(system, dict) and system.get("little_endian") is True
    if magic != _MAGIC or version != _VERSION or not little_endian:
        raise ValueError(f"the stream is not of version {_VERSION} and little-endian")
    root = pickles.run(mapped)
    keys = pickles.run(mapped)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("the storages' keys are not a list of strings")
    if sorted(keys) != sorted(pickles.storages):
        raise ValueError("the storages in the stream are not those that the tensors lie in")
    starts = {}
    for key in keys:
        storage = pickles.storages[key]
        if int.from_bytes(mapped.read(8), "little") != storage.size:
            raise ValueError(f"storage {key!r} is not of the {storage.size} elements that its tensors say")
        starts[key] = mapped.tell()
        end = starts[key] + storage.size * storage.dtype.itemsize
        if end > len(mapped):
            raise ValueError(f"storage {key!r} ends after the file; the file is cut short")
        mapped.seek(end)
    if mapped.tell() != len(mapped):
        raise ValueError(f"{len(mapped) - mapped.tell()} bytes are left over at the end of the stream")
    return root, starts


# From descriptions to arrays ------------------------------------------------------------------------------------------


def _state_dict(root: Any, key: str | None) -> dict[str, Tensor]:
    if key is not None:
        if not isinstance(root, dict) or key not in root:
            raise ValueError(f"the file does not hold a dictionary with the key {key!r}")
        root = root[key]
    if not isinstance(root, dict):
        raise ValueError(f"the file holds a {type(root).__name__} and not a dictionary of tensors")
    for name, value in root.items():
        if not isinstance(name, str):
            raise ValueError(f"the dictionary has the key {name!r}, which is no name of a tensor")
        if not isinstance(value, Tensor):
            kind = "dictionary" if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{name!r} is a {kind} and not a tensor; where one value is the state dict, give its key")
    return root


def _content(data: NDArray[np.uint8], start: int, storage: Storage) -> NDArray[Any]:
    content = data[start : start + storage.size * storage.dtype.itemsize]
    if storage.dtype == np.bool_ and content.max(initial=0) > 1:
        raise ValueError(f"storage {storage.key!r} is boolean, but holds bytes other than 0 and 1")
    return content.view(storage.dtype)


def _view(content: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, content.dtype)
    # The stride of a single element may be any number.
    steps = [stride * content.itemsize * (n > 1) for stride, n in zip(tensor.strides, tensor.shape, strict=True)]
    return np.lib.stride_tricks.as_strided(content[tensor.offset :], tensor.shape, steps, writeable=False)
