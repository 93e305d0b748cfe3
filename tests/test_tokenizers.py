"""Tokenizers lose nothing, keep END apart from text that spells it, and stream what they decode."""

import copy
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from jaxformer.tokenizers import END, Tokenizer

DOCUMENTS = [
    "the theatre of the other: there they gather, then scatter; he then said that the rest is theirs",
    "déjà vu, naïve café, Ελληνικά γράμματα, 我喜欢自然语言处理。 😀😀",
    f"a text may say {END} and {END} again",
    "def forward(x):\n    return x @ w + b\n\n\ndef backward(g):\n    return g @ w.T\n",
]
BYTES = Tokenizer.bytes()
BPE = Tokenizer.train(DOCUMENTS, 300)
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])

texts = st.lists(st.text(max_size=20) | st.sampled_from([END, "the other", "déjà 我喜欢 😀"]), max_size=4).map("".join)


def library_json(edit: Callable[[Any], None], tokenizer: Tokenizer = BYTES) -> str:
    """Return a tokenizer's JSON after an edit of its dictionary."""
    fields = json.loads(tokenizer.to_json())
    edit(fields)
    return json.dumps(fields)


@BOTH
@given(text=texts)
def test_decoding_undoes_encoding(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(text=texts)
def test_the_id_of_a_byte_is_its_value(text: str) -> None:
    assert BYTES.encode(text) == list(text.encode())


@given(batch=st.lists(texts))
def test_a_batch_is_encoded_as_each_text_alone(batch: list[str]) -> None:
    assert BPE.encode_batch(batch) == [BPE.encode(text) for text in batch]


@BOTH
def test_ids_have_one_layout(tokenizer: Tokenizer) -> None:
    pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert pieces[:256] == [bytes([value]) for value in range(256)]
    assert tokenizer.end_id == 256
    assert pieces[256] == b""
    for i in range(257, tokenizer.vocab_size):
        earlier = {piece for piece in pieces[:i] if piece}
        assert any(pieces[i][:cut] in earlier and pieces[i][cut:] in earlier for cut in range(1, len(pieces[i])))


@pytest.mark.parametrize(
    "remake",
    [
        lambda tokenizer: tokenizer,
        lambda tokenizer: Tokenizer.from_json(tokenizer.to_json()),
        lambda tokenizer: pickle.loads(pickle.dumps(tokenizer)),
        copy.deepcopy,
    ],
    ids=["made", "json", "pickle", "deepcopy"],
)
@BOTH
def test_end_in_a_text_is_ordinary_text(tokenizer: Tokenizer, remake: Callable[[Tokenizer], Tokenizer]) -> None:
    text = f"{END}a{END}{END}"
    again = remake(tokenizer)
    assert again == tokenizer
    assert hash(again) == hash(tokenizer)
    for ids in (again.encode(text), *again.encode_batch([text])):
        assert again.end_id not in ids
        assert again.decode(ids) == text
    assert again.decode([again.end_id, *again.encode("ab"), again.end_id]) == "ab"


def test_training_depends_on_the_documents_alone() -> None:
    shuffled = DOCUMENTS.copy()
    random.Random(1).shuffle(shuffled)
    assert shuffled != DOCUMENTS
    assert Tokenizer.train(DOCUMENTS, 300) == Tokenizer.train(shuffled, 300) == BPE
    assert BPE != BYTES


def test_training_stops_at_vocab_size_or_where_no_pair_repeats() -> None:
    assert BPE.vocab_size == 300
    assert Tokenizer.train(DOCUMENTS, 257) == BYTES
    assert [Tokenizer.train(["abab abab"], size).vocab_size for size in (257, 258, 259, 300)] == [257, 258, 259, 259]
    assert Tokenizer.train(["no pair is seen twice"[:7]], 300) == BYTES


def test_joins_shorten_text() -> None:
    assert len(BPE.encode(DOCUMENTS[0])) < 0.6 * len(BYTES.encode(DOCUMENTS[0]))


@pytest.mark.parametrize("size", [256, 0, -1])
def test_a_vocabulary_smaller_than_the_bytes_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"vocab_size={size} is below 257"):
        Tokenizer.train(DOCUMENTS, size)


def test_one_string_is_not_a_list_of_documents() -> None:
    with pytest.raises(TypeError, match=r"pass \[text\]"):
        Tokenizer.train("one text", 300)


@BOTH
@pytest.mark.parametrize("bad", [-1, 300, 10**9])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, bad: int) -> None:
    said = rf"id {bad} is outside the vocabulary of {tokenizer.vocab_size} ids"
    with pytest.raises(ValueError, match=said):
        tokenizer.decode([97, bad])
    with pytest.raises(ValueError, match=said):
        tokenizer.stream().push(bad)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at character 2"):
        BPE.encode("ab\ud800")
    with pytest.raises(ValueError, match=r"lone surrogate '\\udfff' at character 0"):
        BPE.encode_batch(["fine", "\udfff"])


@BOTH
@given(parts=st.lists(texts | st.lists(st.integers(0, 10**6), max_size=20), max_size=8))
def test_a_stream_gives_what_decode_gives(tokenizer: Tokenizer, parts: list[str | list[int]]) -> None:
    # Arbitrary ids are mostly invalid UTF-8; texts make the valid sequences between them.
    ids: list[int] = []
    for part in parts:
        ids += tokenizer.encode(part) if isinstance(part, str) else [i % tokenizer.vocab_size for i in part]
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


@given(text=texts)
def test_a_stream_holds_back_half_characters(text: str) -> None:
    stream, shown = BYTES.stream(), ""
    for count, byte in enumerate(text.encode(), start=1):
        shown += stream.push(byte)
        assert shown == text.encode()[:count].decode(errors="ignore")
    assert stream.flush() == ""


def test_length_settings_of_a_file_are_dropped() -> None:
    raw = tokenizers.Tokenizer.from_str(BYTES.to_json())
    raw.enable_truncation(3)
    raw.enable_padding(length=9)
    assert Tokenizer.from_json(raw.to_str()).encode_batch(["abcdef", "a"]) == [list(b"abcdef"), list(b"a")]


def test_a_file_may_number_its_tokens_otherwise_and_add_some() -> None:
    raw = tokenizers.Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.add_special_tokens(["<s>", END])
    raw.add_tokens(["<tool>"])
    tokenizer = Tokenizer.from_json(raw.to_str())
    assert (tokenizer.vocab_size, tokenizer.end_id) == (259, 257)
    assert tokenizer.encode("!<tool>") == [0, 258]
    assert tokenizer.decode([256, 0, 258, 257]) == "!<tool>"


def without_end() -> str:
    return library_json(lambda fields: fields.update(added_tokens=[]))


def without_special_end() -> str:
    return library_json(lambda fields: fields["added_tokens"][0].update(special=False))


def with_normalizer() -> str:
    raw = tokenizers.Tokenizer.from_str(BYTES.to_json())
    raw.normalizer = normalizers.NFC()
    return raw.to_str()


def with_prefix_space() -> str:
    return library_json(lambda fields: fields["pre_tokenizer"].update(add_prefix_space=True))


def without_a_byte() -> str:
    return library_json(lambda fields: fields["model"]["vocab"].update({"AA": fields["model"]["vocab"].pop("A")}))


def with_a_foreign_token() -> str:
    return library_json(lambda fields: fields["model"]["vocab"].update({"我": 257}))


def with_a_hole() -> str:
    return library_json(lambda fields: fields["model"]["vocab"].update({"AA": 300}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the JSON of a tokenizer"),
        ("{", "not the JSON of a tokenizer"),
        ("[]", "not the JSON of a tokenizer"),
        ('{"model": {"type": "BPE"}}', "not the JSON of a tokenizer: Missing vocab/merges"),
        (without_end(), r"no special token <\|endoftext\|>"),
        (without_special_end(), r"no special token <\|endoftext\|>"),
        (with_normalizer(), "changes text: .*without a normalizer"),
        (with_prefix_space(), "changes text: .*without a prefix space"),
        (without_a_byte(), "no token for byte 65"),
        (with_a_foreign_token(), r"token '我' \(id 257\) is not byte-level"),
        (with_a_hole(), "no token has id 257 although there are 258 tokens"),
    ],
)
def test_unfit_files_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Tokenizer.from_json(text)
