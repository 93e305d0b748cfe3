"""A model's tensors in one file of its folder, or in several with an index beside them.

folder/NAME, or folder/NAME.index.json = {"weight_map": {tensor: file}} and those files
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxformer.convert.files import json_object, map_file, strings

_PLAIN = re.compile(r"\w[\w.-]{0,199}", re.ASCII)
_T = TypeVar("_T")


def is_there(folder: Path, name: str) -> bool:
    """Say whether the folder holds a file of this name or its index."""
    return (folder / name).exists() or (folder / f"{name}.index.json").exists()


def load_folder(folder: Path, name: str, read: Callable[[Path], dict[str, _T]]) -> dict[str, _T]:
    """Return what `read` makes of the folder's files, in one dictionary.

    Args:
      name: of the file, where there is one; that of the index follows from it.
      read: makes something of each tensor of a file, by the tensors' names.

    Raises:
      FileNotFoundError: neither file nor index, or a file that the index names, is there.
      ValueError: both are; an index and files that contradict each other; or a link that leads out of the folder (other
        than into the store of the Hugging Face cache).
    """
    single, index = folder / name, folder / f"{name}.index.json"
    if single.exists() and index.exists():
        raise ValueError(f"{folder} holds both {single.name} and {index.name}; remove the one that is out of date")
    if index.exists():
        return _read_shards(folder, index, read)
    if not single.exists():
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}")
    return read(_inside(folder, single))


def _read_shards(folder: Path, index: Path, read: Callable[[Path], dict[str, _T]]) -> dict[str, _T]:
    content = json_object(str(index), bytes(map_file(_inside(folder, index))))
    weight_map = strings(f"{index}: weight_map", content.get("weight_map"))
    tensors: dict[str, _T] = {}
    for file in sorted(set(weight_map.values())):
        if not _PLAIN.fullmatch(file):
            raise ValueError(f"{index}: {file!r} is not a plain file name")
        for name, tensor in read(_inside(folder, folder / file)).items():
            if name in tensors:
                raise ValueError(f"{folder}: tensor {name!r} is both in {file} and in {weight_map[name]}")
            if weight_map.get(name) != file:
                raise ValueError(f"{index} does not say that tensor {name!r} is in {file}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{index}: tensor {name!r} is not in {file}")
    return tensors


def _inside(folder: Path, file: Path) -> Path:
    """Return the file if it lies in the folder, links followed; the Hugging Face cache links to its store of blobs."""
    folder, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    stores = [folder] + [folder.parent.parent / "blobs"] * (folder.parent.name == "snapshots")
    if not any(target.is_relative_to(store) for store in stores):
        raise ValueError(f"{file} leads out of its folder, to {target}; put the file itself there")
    return file
