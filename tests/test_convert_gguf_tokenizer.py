"""Tokenizers rebuilt from GGUF metadata: against the library's own, by hand, and what is refused."""

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


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "llama"}, "model is 'llama'; only 'gpt2' (byte-level BPE) can be rebuilt; use tokenizer.json"),
        ({"model": None}, "model is None; only"),
        ({"model": 3}, "model is 3; only"),
        ({"pre": "default"}, "pre is 'default'; known patterns are gpt-2, llama-bpe, qwen2, smollm"),
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
        ({"token_type": KINDS + 1}, "token_type holds 2, which byte-level BPE has no use for"),
        ({"add_bos_token": 1}, "add_bos_token is 1 and not true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is None and not the id of a token"),
        ({"add_eos_token": True, "eos_token_id": 272}, "eos_token_id is 272 and not"),
        ({"add_eos_token": True, "eos_token_id": -1}, "eos_token_id is -1 and not"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(build, more, message):
    with pytest.raises(ValueError, match=re.escape(f"model.gguf: tokenizer.ggml.{message}")):
        build(metadata(**more))


NAMES = [key.removeprefix("tokenizer.ggml.") for key in metadata()] + ["add_bos_token", "add_eos_token"]
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-1, 300)
    | st.sampled_from(["gpt2", "qwen2", "smollm"])
    | st.lists(st.text(max_size=3) | st.sampled_from(["a b", "$A", "a:1", ""]), max_size=5)
    | st.lists(st.integers(0, 6), max_size=5).map(np.int32)
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=4), st.booleans())
@settings(max_examples=300)
def test_whatever_the_metadata_say_there_is_an_error_or_a_tokenizer(tmp_path_factory, changes, small):
    if small:  # so that lists of any length fit each other
        fields = {"tokens": ["a:1", "b", "$A", "a"], "merges": [], "token_type": np.int32([3, 1, 3, 1])}
        changes = fields | {"bos_token_id": 0, "eos_token_id": 2} | changes
    path = tmp_path_factory.getbasetemp() / "tokenizer.gguf"
    path.write_bytes(whole(metadata(**changes)))
    file = GGUFFile(path)
    try:
        built = tokenizer(file)
    except ValueError:
        return
    assert isinstance(built.encode("a b").ids, list)
