"""Corpora come back whole, split without leaks, and depend on nothing but their files."""

import inspect
import json
import sysconfig
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer import corpus
from jaxformer.corpus import fingerprint, python_prose, python_source, read_documents, split_documents

documents = st.lists(st.text(alphabet="ab\né", max_size=12), max_size=12)
SMALL = st.lists(st.text(alphabet="ab", max_size=2), max_size=3)


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write files below a folder and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_folder_is_read_in_order_and_hidden_files_are_not(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "b.txt": "second",
            "a/z.md": "first",
            "c.TEX": "third\r\n",
            "d.py": b"\xef\xbb\xbffourth",
            "empty.txt": " \n",
            "picture.png": b"\x89PNG\0",
            ".hidden.txt": "no",
            ".git/x.txt": "no",
            "a/.cache/y.txt": "no",
        },
    )
    assert read_documents([tmp_path]) == ["first", "second", "third\r\n", "fourth"]
    assert read_documents([str(tmp_path / "b.txt"), tmp_path / "a"]) == ["second", "first"]
    assert read_documents(tmp_path / "b.txt") == ["second"]


def test_a_file_named_explicitly_may_have_any_name(tmp_path: Path) -> None:
    write(tmp_path, {".notes": "hidden", "log.2024": "no suffix"})
    assert read_documents([tmp_path / ".notes", tmp_path / "log.2024"]) == ["hidden", "no suffix"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", r"file\.txt is empty; remove it"),
        (b" \n\t\n", r"file\.txt is empty; remove it"),
        (b"abc\0def", r"file\.txt is binary \(a NUL at byte 3\)"),
        ("déjà".encode("latin-1"), r"file\.txt is not UTF-8 \(byte 1 is 0xe9\)"),
        (b"\xef\xbb\xbfab\xff", r"file\.txt is not UTF-8 \(byte 5 is 0xff\)"),
    ],
)
def test_files_that_are_not_text_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    write(tmp_path, {"file.txt": content, "other.txt": "fine"})
    with pytest.raises(ValueError, match=said):
        read_documents([tmp_path / "file.txt"])
    if content.strip():
        with pytest.raises(ValueError, match=said):
            read_documents([tmp_path])


def test_paths_without_text_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"picture.png": b"\x89PNG\0", "empty.md": ""})
    with pytest.raises(ValueError, match=r"no text under .*wanted files that end in \.txt"):
        read_documents([tmp_path])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt does not exist"):
        read_documents([tmp_path / "nowhere.txt"])


@given(
    text=st.text(alphabet="ab \n\r", min_size=1).map(lambda text: text + "a"),
    limit=st.integers(1, 12),
)
def test_pieces_of_a_long_file_join_to_its_text(text: str, limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(corpus, "DOCUMENT_LIMIT", limit):
        pieces = read_documents([write(Path(folder), {"file.txt": text}) / "file.txt"])
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("one\n\ntwo\nthree\nfour", ["one\n\n", "two\nthree\n", "four"]),  # the blank line wins over later lines
        ("one\ntwo\nthree\nfour", ["one\ntwo\n", "three\nfour"]),
        ("one two three four", ["one two th", "ree four"]),
        ("1\n\n2\n \n3\n4\n5\n", ["1\n\n2\n \n", "3\n4\n5\n"]),
        ("0123456789", ["0123456789"]),
    ],
)
def test_long_files_are_cut_at_blank_lines_then_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, pieces: list[str]
) -> None:
    monkeypatch.setattr(corpus, "DOCUMENT_LIMIT", 10)
    assert read_documents([write(tmp_path, {"file.txt": text})]) == pieces


@given(texts=documents, fraction=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_a_split_has_each_distinct_document_once(texts: list[str], fraction: float, seed: int) -> None:
    distinct = [text for text in dict.fromkeys(texts) if text]
    if len(distinct) < 2:
        with pytest.raises(ValueError, match=rf"{len(distinct)} distinct documents cannot be split"):
            split_documents(texts, fraction, seed)
        return
    train, validation = split_documents(texts, fraction, seed)
    assert train
    assert validation
    assert sorted(train + validation) == sorted(distinct)
    for side in (train, validation):
        assert side == [text for text in distinct if text in set(side)]
    sizes = [len(text.encode()) for text in distinct]
    assert abs(sum(len(text.encode()) for text in validation) - fraction * sum(sizes)) < max(sizes)
    assert split_documents(texts, fraction, seed) == (train, validation)


def test_the_seed_chooses_the_validation_documents() -> None:
    texts = [f"document {i:03}" for i in range(100)]
    chosen = {tuple(split_documents(texts, 0.1, seed)[1]) for seed in range(5)}
    assert len(chosen) == 5
    assert all(len(validation) == 10 for validation in chosen)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 10.0, float("nan")])
def test_fractions_outside_zero_and_one_are_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"fraction={fraction} is not between 0 and 1"):
        split_documents(["a", "b"], fraction, 0)


@given(
    left=st.lists(st.text(alphabet="ab", max_size=2), max_size=3), right=st.lists(st.text("ab", max_size=2), max_size=3)
)
def test_fingerprints_tell_corpora_apart(left: list[str], right: list[str]) -> None:
    assert (fingerprint(left) == fingerprint(right)) == (left == right)
    assert len(fingerprint(left)) == 64


LIBRARY: dict[str, str | bytes] = {
    "b.py": '''"""Module b."""
if True:
    def late():
        """Late."""
class C:
    """Class C.

        Indented.
    """
    async def m(self):
        "Method m."
def bare(): pass
''',
    "a/__init__.py": "",
    "a/latin.py": b"# -*- coding: latin-1 -*-\n'''d\xe9j\xe0'''\n",
    "a/code.py": "x = 1\n",
    "bad_syntax.py": "print 'no'\n",
    "bad_bytes.py": b"'''\xff'''\n",
    "nul.py": "x = 1\0\n",
    "warns.py": "'''Escapes.'''\nx = '\\d'\n",
    "notes.txt": "not a module",
    "_sysconfigdata__linux.py": "'''Generated.'''",
    "config-3.11/python-config.py": "'''Generated.'''",
    "test/x.py": "'''Test.'''",
    "a/tests/x.py": "'''Test.'''",
    "a/idle_test/x.py": "'''Test.'''",
    "site-packages/x.py": "'''Installed.'''",
}


def test_a_library_gives_its_docstrings_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(write(tmp_path, LIBRARY))}.__getitem__)
    prose = python_prose()
    assert prose[-3:] == ["déjà", "Module b.\n\nLate.\n\nClass C.\n\nIndented.\n\nMethod m.", "Escapes."]
    assert python_source() == python_source()
    assert python_source() == [
        "x = 1\n",
        "# -*- coding: latin-1 -*-\n'''déjà'''\n",
        LIBRARY["b.py"],
        LIBRARY["bad_syntax.py"],
        LIBRARY["nul.py"],
        LIBRARY["warns.py"],
    ]


def test_a_python_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    for read in (python_prose, python_source):
        with pytest.raises(FileNotFoundError, match=r"no Python source under .*read_documents"):
            read()


def test_this_python_has_megabytes_of_prose_and_source() -> None:
    from pydoc_data.topics import topics

    prose = python_prose()
    assert prose[: len(topics)] == [topics[name] for name in sorted(topics)]
    assert sum(inspect.cleandoc(textwrap.dedent.__doc__ or "") in text for text in prose) == 1
    assert sum(map(len, prose)) > 1_500_000
    source = python_source()
    assert Path(json.__file__).read_text(encoding="utf-8") in source
    assert sum(map(len, source)) > 8_000_000
