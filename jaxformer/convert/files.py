"""Files of strangers, mapped into memory: a page is read when it is first touched, and nothing is copied.

A reader checks every number of a file against the file before it uses it. A file that is damaged, or made to do damage,
gives a ValueError that names it: no other exception, no array larger than the file warrants, no endless loop.
"""

import json
import mmap
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_POINTER = b"version https://git-lfs"


class Header(NamedTuple):
    """What a file says of a tensor, without the tensor: its shape, the name of its type, and its bytes."""

    shape: tuple[int, ...]
    dtype: str
    size: int


def map_file(path: str | Path) -> mmap.mmap:
    """Map a whole file, read-only.

    The map must not outlive the file's content: shortening the file in place while arrays of it are in use ends the
    process. Replacing it by a new file (as the writers of this package do) is safe.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a folder, a device or a pipe, an empty file, or the pointer that stands for a file in Git LFS.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; give the file that holds the weights")
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty; download it again")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if mapped[: len(_POINTER)] == _POINTER:
        raise ValueError(f"{path} is the pointer that Git LFS keeps in place of the weights; run git lfs pull")
    return mapped


def replace_file(path: Path, parts: Iterable[Any]) -> None:
    """Write bytes beside a path, then move them there: who reads it sees the old file or the whole new one.

    Args:
      path: the file, new or not, in a folder that exists.
      parts: bytes or arrays of bytes, written one after the other.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            for part in parts:
                file.write(part)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def json_object(what: str, text: bytes) -> dict[str, Any]:
    """Parse the text of one JSON object.

    Raises:
      ValueError: anything else, or a name that stands twice in one object; the message starts with `what`.
    """
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} is a JSON {type(found).__name__} and not an object")
    return found


def strings(what: str, value: Any) -> dict[str, str]:
    """Return a dictionary of strings by strings.

    Raises:
      ValueError: anything else; the message starts with `what`.
    """
    if not isinstance(value, dict) or not all(isinstance(x, str) for pair in value.items() for x in pair):
        raise ValueError(f"{what} must hold strings by strings and nothing else")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} stands twice in one object")
    return found
