"""Texts to train on: your files, or the standard library of the running Python, which every machine has.

A corpus is a list of documents, each a `str`. It is split by document, so that no text is on both sides:

    train, validation = split_documents(documents, fraction=0.1, seed=0)
"""

import ast
import hashlib
import os
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".html", ".py")
"""Files that `read_documents` takes from a folder; a file named explicitly is read whatever its suffix."""

DOCUMENT_LIMIT = 16 * 1024
"""Characters above which `read_documents` cuts a file, so that one big file still splits into train and validation."""

# Not prose or source that people wrote: tests, installed packages, and files generated for one machine.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
_GENERATED = ("_sysconfigdata", "config-")

_BLANK_LINES = re.compile(r"\n\s*\n")


def read_documents(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """Read text files, and folders of text files, as documents of at most DOCUMENT_LIMIT characters.

    Longer files are cut after the last blank line before the limit (else the last line, else anywhere); joining the
    pieces gives the text of the file, without a byte order mark. In a folder, hidden and empty files are passed over.

    Args:
      paths: files, read whatever their suffix, and folders, read recursively for TEXT_SUFFIXES in sorted order; or
        one of them.

    Raises:
      FileNotFoundError: a path that does not exist.
      ValueError: a file that is empty, binary or not UTF-8, or a folder without text.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    documents: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            texts = [text for file in _text_files(path) if (text := _read(file)).strip()]
            if not texts:
                raise ValueError(f"no text under {path}; wanted files that end in {' '.join(TEXT_SUFFIXES)}")
        elif path.exists():
            texts = [_read(path)]
            if not texts[0].strip():
                raise ValueError(f"{path} is empty; remove it from the list of files")
        else:
            raise FileNotFoundError(f"{path} does not exist; give a text file or a folder of text files")
        documents.extend(piece for text in texts for piece in _cut(text, DOCUMENT_LIMIT))
    return documents


def python_prose() -> list[str]:
    """Return the English of the running Python: the language reference, and each library module's docstrings.

    The text depends on the Python version; `fingerprint` tells corpora apart.

    Raises:
      FileNotFoundError: this Python has no source files of its standard library.
    """
    from pydoc_data.topics import topics  # 0.5 MB of text

    modules = [_docstrings(source) for source in _library()]
    return [topics[name] for name in sorted(topics)] + [text for text in modules if text]


def python_source() -> list[str]:
    """Return the source files of the running Python's standard library, without its tests.

    The text depends on the Python version; `fingerprint` tells corpora apart.

    Raises:
      FileNotFoundError: this Python has no source files of its standard library.
    """
    return list(_library())


def split_documents(documents: Iterable[str], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Split a corpus by document into train and validation, as a function of (documents, fraction, seed).

    Exact duplicates and empty documents are dropped first, so that no text is on both sides. Both keep their order.

    Args:
      documents: the texts.
      fraction: share of the bytes for validation, between 0 and 1; exceeded only where no document is that small.
      seed: chooses the documents.

    Raises:
      ValueError: fraction outside (0, 1), or fewer than two distinct documents.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction} is not between 0 and 1; 0.1 keeps a tenth of the bytes for validation")
    distinct = [document for document in dict.fromkeys(documents) if document]
    if len(distinct) < 2:
        raise ValueError(f"{len(distinct)} distinct documents cannot be split in two; give more files, or a longer one")
    sizes = [len(document.encode()) for document in distinct]
    wanted = fraction * sum(sizes)
    order = list(range(len(distinct)))
    random.Random(seed).shuffle(order)
    kept = set()
    for i in order:
        if sizes[i] <= wanted:
            kept.add(i)
            wanted -= sizes[i]
    if not kept:
        kept = {min(order, key=sizes.__getitem__)}
    train = [document for i, document in enumerate(distinct) if i not in kept]
    return train, [document for i, document in enumerate(distinct) if i in kept]


def fingerprint(documents: Iterable[str]) -> str:
    """Return the SHA-256 of a corpus in hex; order and boundaries of documents count."""
    digest = hashlib.sha256()
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _text_files(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(file for file in found if file.suffix.lower() in TEXT_SUFFIXES)


def _read(file: Path) -> str:
    data = file.read_bytes()
    if b"\0" in data:
        raise ValueError(f"{file} is binary (a NUL at byte {data.index(0)}); leave it out, or convert it to UTF-8 text")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it to UTF-8"
        ) from error


def _cut(text: str, limit: int) -> Iterator[str]:
    start = 0
    while len(text) - start > limit:
        window = text[start : start + limit]
        blank_lines = [match.end() for match in _BLANK_LINES.finditer(window)]
        size = blank_lines[-1] if blank_lines else window.rfind("\n") + 1 or limit
        yield window[:size]
        start += size
    yield text[start:]


def _library() -> Iterator[str]:
    """Yield the sources of the standard library, sorted by path, without files that cannot be decoded.

    Raises:
      FileNotFoundError: there are none.
    """
    root = sysconfig.get_path("stdlib")
    files = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(_GENERATED)]
        files += [Path(parent, name) for name in names if name.endswith(".py") and not name.startswith(_GENERATED)]
    if not files:
        raise FileNotFoundError(
            f"no Python source under {root}; use another Python, or read_documents on your own files"
        )
    for file in sorted(files):
        try:
            with tokenize.open(file) as opened:
                source = opened.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if source.strip():
            yield source


def _docstrings(source: str) -> str:
    """Return the docstrings of a module, its classes and its functions in source order, joined by blank lines.

    Source that cannot be parsed has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some files hold escapes that newer Pythons warn of
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    texts: list[str] = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append(ast.get_docstring(node) or "")
        inner = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt | ast.ExceptHandler | ast.match_case)]
        pending += reversed(inner)
    return "\n\n".join(text for text in texts if text)
