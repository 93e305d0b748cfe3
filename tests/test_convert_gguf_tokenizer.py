"""Tokenizers rebuilt from GGUF metadata: against the library's own, by hand, and what is refused."""

import itertools
import json
import re

import numpy as np
import pytest
import tokenizers
from gguf_files import whole
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from jaxformer.convert.gguf import GGUFFile
from jaxformer.convert.gguf_tokenizer import tokenizer

# A byte-level vocabulary by hand: the bytes, then merges, then marked tokens ------------------------------------------

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "Ġ 1", "b c", "a b", "ab c", "' s", "' S", "Ġ Ġ", ". Ċ", "Ċ Ċ", "Ã ©"]
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "<s>", "</s>", "<think>", "[PAD0]"]
KINDS = np.int32([1] * (len(TOKENS) - 4) + [3, 3, 4, 5])
ID = {token: number for number, token in enumerate(TOKENS)}


def metadata(pre="gpt-2", **more):
    fields = {"model": "gpt2", "pre": pre, "tokens": TOKENS, "merges": MERGES, "token_type": KINDS}
    fields |= {"bos_token_id": ID["<s>"], "eos_token_id": ID["</s>"]} | more
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


@pytest.fixture
def build(tmp_path):
    def build(fields):
        path = tmp_path / "model.gguf"
        path.write_bytes(whole(fields))
        return tokenizer(GGUFFile(path))

    return build


def tokens(built, text):
    return built.encode(text).tokens


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("gpt-2", "123 13", "123 Ġ1 3"),
        ("smollm", "123 12", "1 2 3 Ġ 1 2"),
        ("qwen2", "123 12", "1 2 3 Ġ 1 2"),
        ("llama-bpe", "1231 12", "123 1 Ġ 12"),
        ("gpt-2", "a's a'S", "a 's Ġ a ' S"),
        ("smollm", "a's a'S", "a 's Ġ a ' S"),
        ("qwen2", "a's a'S", "a 's Ġ a 'S"),
        ("llama-bpe", "a's a'S", "a 's Ġ a 'S"),
        ("gpt-2", ".\n\na", ". Ċ Ċ a"),
        ("qwen2", ".\n\na", ".Ċ Ċ a"),
        ("llama-bpe", ".\n\na", ".Ċ Ċ a"),
        ("gpt-2", "   a", "ĠĠ Ġ a"),
        ("qwen2", "   a", "ĠĠ Ġ a"),
        # A word that is a token: by its merges it is not, because "bc" comes first.
        ("gpt-2", "abc", "a bc"),
        ("qwen2", "abc", "a bc"),
        ("llama-bpe", "abc", "abc"),
        # é in two characters: Qwen's tokenizer composes them first.
        ("qwen2", "e\u0301", "Ã©"),
        ("gpt-2", "e\u0301", "e Ì ģ"),
    ],
)
def test_splits_by_hand(build, pre, text, wanted):
    found = tokens(build(metadata(pre, add_bos_token=False)), text)
    assert found == wanted.split(" ")


def test_ids_are_the_places_in_the_file(build):
    built = build(metadata())
    assert built.get_vocab(with_added_tokens=True) == ID
    assert built.encode("a<s>12").ids == [ID["a"], ID["<s>"], ID["12"]]


def test_marked_tokens(build):
    built = build(metadata())
    assert tokens(built, "a<s>b<think>c[PAD0]") == [*"a", "<s>", "b", "<think>", *"c[PAD0]"]
    ids = built.encode("a</s>b<think>c").ids
    assert built.decode(ids) == "ab<think>c"
    assert built.decode(ids, skip_special_tokens=False) == "a</s>b<think>c"


@pytest.mark.parametrize(
    ("pre", "more", "wanted"),
    [
        ("gpt-2", {}, "a"),
        ("llama-bpe", {}, "<s> a"),
        ("llama-bpe", {"add_bos_token": False}, "a"),
        ("smollm", {"add_bos_token": True}, "<s> a"),
        ("qwen2", {"add_eos_token": True}, "a </s>"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "<s> a </s>"),
    ],
)
def test_tokens_at_the_ends(build, pre, more, wanted):
    built = build(metadata(pre, **more))
    assert tokens(built, "a") == wanted.split(" ")
    assert built.encode("a", add_special_tokens=False).tokens == ["a"]


# Against the library --------------------------------------------------------------------------------------------------

TEXT = "In 2024 the keys to the 12 cabinets were lost. They're   found:\n\n\tnaïve café 東京 it's IT'S 3.14159 éé"


def trained(pre):
    """The library's tokenizer with a published splitter, trained on a line, and the file of it."""
    original = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True), byte_level]
    original.pre_tokenizer = {"gpt-2": byte_level, "smollm": pre_tokenizers.Sequence(digits)}[pre]
    original.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
    )
    original.train_from_iterator([TEXT] * 3, trainer)
    learned = json.loads(original.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].get)
    fields = {"tokens": words, "merges": [" ".join(merge) for merge in learned["merges"]]}
    kinds = np.int32([3 if token == "<s>" else 1 for token in words])
    return original, metadata(pre, **fields, token_type=kinds, bos_token_id=None, eos_token_id=None)


@pytest.fixture(scope="module", params=["gpt-2", "smollm"])
def pairs(request, tmp_path_factory):
    original, fields = trained(request.param)
    path = tmp_path_factory.mktemp("trained") / "model.gguf"
    path.write_bytes(whole(fields))
    return original, tokenizer(GGUFFile(path))


@given(st.text(max_size=40) | st.lists(st.sampled_from(TEXT.split(" ")), max_size=8).map(" ".join) | st.just("<s>a"))
@settings(max_examples=300)
def test_a_trained_tokenizer_is_rebuilt(pairs, text):
    original, rebuilt = pairs
    ids = rebuilt.encode(text).ids
    assert ids == original.encode(text).ids
    assert rebuilt.decode(ids, skip_special_tokens=False) == text


# SentencePiece's BPE --------------------------------------------------------------------------------------------------

JOINED = ["ab", "\u2581a", "ba", "\u2581\u2581", "aab", "aba", "\u2581ab", "\u2581\u2581\u2581a", "bb", "abba", "<x>a"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "  ", "<x>", "[PAD0]"]
PIECE_KINDS = [2, 3, 3, *[6] * 256, 4, 4, 5]
PIECES, PIECE_KINDS = [*PIECES, *JOINED, *"ab<>x\u2581é"], np.int32([*PIECE_KINDS, *[1] * (len(JOINED) + 7)])
SCORES = np.float32([-1000.0] * 262 + [-i for i in range(len(JOINED) + 7)])


def scored(**more):
    fields = {"model": "llama", "tokens": PIECES, "scores": SCORES, "token_type": PIECE_KINDS}
    fields |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": False}
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | more).items() if value is not None}


def pieces(text, normal, users, prefix):
    """SentencePiece's BPE: tokens of users, from the left and the longest; then the best pair, again and again."""
    text = ("\u2581" * (prefix and text != "") + text).replace(" ", "\u2581")
    symbols = []
    while text:
        user = max((u for u in users if text.startswith(u)), key=len, default=None)
        symbols.append((user or text[0], user is not None))
        text = text[len(symbols[-1][0]) :]
    while True:
        joins = [
            (normal[a + b], -i)
            for i, ((a, user), (b, other)) in enumerate(itertools.pairwise(symbols))
            if not user and not other and a + b in normal
        ]
        if not joins:
            break
        i = -max(joins)[1]
        symbols[i : i + 2] = [(symbols[i][0] + symbols[i + 1][0], False)]
    for symbol, user in symbols:
        if user:
            yield symbol.replace("\u2581", " ")
        elif symbol in normal:
            yield symbol
        else:
            yield from (f"<0x{byte:02X}>" for byte in symbol.encode())


@pytest.fixture(scope="module", params=[False, True])
def by_scores(request, tmp_path_factory):
    """A tokenizer, its normal tokens with their scores, those of users, and whether it puts a space before a text."""
    prefix = request.param
    fields = scored(add_space_prefix=prefix)
    if prefix:  # which no file with tokens of users may
        padded = [*PIECES[:259], "[PAD1]", "[PAD2]", *PIECES[261:]]
        fields = scored(tokens=padded, token_type=np.where(PIECE_KINDS == 4, 5, PIECE_KINDS).astype("i4"))
        del fields["tokenizer.ggml.add_space_prefix"]
    path = tmp_path_factory.mktemp("scores") / "model.gguf"
    path.write_bytes(whole(fields))
    normal = {token: score for token, score, kind in zip(PIECES, SCORES, PIECE_KINDS, strict=True) if kind == 1}
    return tokenizer(GGUFFile(path)), normal, [] if prefix else ["\u2581\u2581", "<x>"], prefix


@given(st.text("ab <>x\u2581é\n", max_size=30) | st.text(max_size=10))
@settings(max_examples=400)
def test_the_best_score_is_joined_first(by_scores, text):
    built, *rest = by_scores
    found = built.encode(text, add_special_tokens=False)
    assert found.ids == [PIECES.index(piece) for piece in pieces(text, *rest)]
    assert built.decode(found.ids, skip_special_tokens=False) == text.replace("\u2581", " ")


def test_pieces_by_hand(build):
    built = build(scored())
    wanted = ["<s>", "abba", "  ", "é", "<x>"]
    assert built.encode("abba  é<x>").ids == [PIECES.index(piece) for piece in wanted]
    assert tokens(built, "\n</s>a") == ["<s>", "<0x0A>", "</s>", "a"]
    assert tokens(build(scored(add_bos_token=False)), "ab") == ["ab"]
    assert built.get_vocab(with_added_tokens=True) == {piece: number for number, piece in enumerate(PIECES)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scores": None}, "scores is not one number for each of the 280 tokens"),
        ({"scores": SCORES[:-1]}, "scores is not one number for each"),
        ({"scores": np.zeros_like(SCORES)}, "scores is not a different number for each normal token"),
        ({"scores": np.append(SCORES[:-1], np.float32(np.nan))}, "scores is not a different number"),
        ({"tokens": [*PIECES[:-1], "a"]}, "tokens holds a token twice"),
        ({"tokens": [*PIECES[:261], "<unused0>", *PIECES[262:]]}, "token_type says that '<unused0>' is unused"),
        ({"token_type": PIECE_KINDS + 1}, "token_type holds 7, which"),
        ({"unknown_token_id": None}, "unknown_token_id is None and not the id of a token"),
        ({"add_space_prefix": 0}, "add_space_prefix is 0 and not true or false"),
        ({"add_space_prefix": None}, "add_space_prefix puts a space before texts, but not after tokens that users"),
    ],
)
def test_scores_that_give_no_tokenizer_are_refused(build, more, message):
    with pytest.raises(ValueError, match=re.escape(f"model.gguf: tokenizer.ggml.{message}")):
        build(scored(**more))


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; known are gpt2, llama; use the model's tokenizer.json"),
        ({"model": None}, "model is None; known"),
        ({"model": 3}, "model is 3; known"),
        ({"pre": "default"}, "pre is 'default'; known are gpt-2, llama-bpe, qwen2, smollm; use the model's"),
        ({"pre": None}, "pre is None; known"),
        ({"pre": ["gpt-2"]}, "pre is ['gpt-2']; known"),
        ({"tokens": None}, "tokens is not a list of strings"),
        ({"tokens": np.int32([1, 2])}, "tokens is not a list of strings"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "tokens holds a token twice"),
        ({"merges": None}, "merges is not a list of strings"),
        ({"merges": ["a b c"]}, "merges holds 'a b c', which does not join two tokens"),
        ({"merges": ["ab"]}, "merges holds 'ab', which"),
        ({"merges": ["a z"]}, "merges holds 'a z', which"),
        ({"merges": ["aa bb"]}, "merges holds 'aa bb', which"),
        ({"token_type": None}, "token_type is not one number for each of the 272 tokens"),
        ({"token_type": KINDS[:-1]}, "token_type is not one number for each"),
        ({"token_type": "3"}, "token_type is not one number for each"),
        ({"token_type": KINDS + 1}, "token_type holds 2, which such a tokenizer has no use for"),
        ({"add_bos_token": 1}, "add_bos_token is 1 and not true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is None and not the id of a token"),
        ({"add_eos_token": True, "eos_token_id": 272}, "eos_token_id is 272 and not"),
        ({"add_eos_token": True, "eos_token_id": -1}, "eos_token_id is -1 and not"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(build, more, message):
    with pytest.raises(ValueError, match=re.escape(f"model.gguf: tokenizer.ggml.{message}")):
        build(metadata(**more))


NAMES = sorted({key.removeprefix("tokenizer.ggml.") for key in metadata() | scored()} | {"add_eos_token"})
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-1, 300)
    | st.sampled_from(["gpt2", "llama", "qwen2", "smollm", np.zeros(4, "f4")])
    | st.lists(st.text(max_size=3) | st.sampled_from(["a b", "$A", "a:1", ""]), max_size=5)
    | st.lists(st.integers(0, 6), max_size=5).map(np.int32)
)


@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=4),
    st.sampled_from([metadata, scored]),
    st.booleans(),
)
@settings(max_examples=300)
def test_whatever_the_metadata_say_there_is_an_error_or_a_tokenizer(tmp_path_factory, changes, fields_of, small):
    if small:  # so that lists of any length fit each other
        fields = {"tokens": ["a:1", "b", "$A", "a"], "merges": [], "token_type": np.int32([3, 1, 3, 1])}
        fields["scores"] = np.float32([0, -1, -2, -3])
        changes = fields | {"bos_token_id": 0, "eos_token_id": 2} | changes
    path = tmp_path_factory.getbasetemp() / "tokenizer.gguf"
    path.write_bytes(whole(fields_of(**changes)))
    file = GGUFFile(path)
    try:
        built = tokenizer(file)
    except ValueError:
        return
    assert isinstance(built.encode("a b").ids, list)
