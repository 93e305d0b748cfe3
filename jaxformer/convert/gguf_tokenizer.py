"""The tokenizer of a GGUF file, as the `tokenizers` library builds it.

    text -> split at special tokens -> split by a pattern -> bytes -> merges, in their order -> ids

A GGUF file holds tokens, merges and the kind of each token, but of the splitting pattern only the name that llama.cpp
gave it (`tokenizer.ggml.pre`). Each name here stands for what the published tokenizer.json of that model does.

References:
  Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al. 2019, section 2.2, for merges of bytes.
  https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.convert.gguf import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer(file: GGUFFile) -> Tokenizer:
    """Rebuilds the tokenizer that a file holds: byte-level BPE, the kind that the file calls `gpt2`.

    Encoding adds the tokens at the beginning and the end that the file asks for; `add_special_tokens=False` leaves them
    out. A byte without a token (rare ones, in some vocabularies) encodes to nothing, as in the published tokenizers.
    Special tokens written in a text become their ids. A chat template is not read.

    Raises:
      ValueError: a kind of tokenizer or a splitting pattern that is not known, or metadata that are missing or wrong.
    """
    if (kind := file.metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise _error(file, "model", f"is {kind!r}; only 'gpt2' (byte-level BPE) can be rebuilt; use tokenizer.json")
    pre = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _SPLITTERS:
        raise _error(file, "pre", f"is {pre!r}; known patterns are {', '.join(_SPLITTERS)}; use tokenizer.json")
    vocabulary = _vocabulary(file)
    ignore_merges = pre == "llama-bpe"  # a word that is a token is that token, even where merges lead elsewhere
    built = Tokenizer(models.BPE(vocabulary, _merges(file, vocabulary), ignore_merges=ignore_merges))
    built.pre_tokenizer = _SPLITTERS[pre]()
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    _add_marked(file, built, list(vocabulary))
    _add_ends(file, built, list(vocabulary), bos=pre == "llama-bpe")
    return built


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _by_words(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITTERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "llama-bpe": lambda: _by_words("{1,3}"),
    "qwen2": lambda: _by_words(""),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
}
"""By the name in the file. `default` is not among them: it means that the pattern was not known."""


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(_strings(file, "tokens"))}
    if len(vocabulary) != len(_strings(file, "tokens")):
        raise _error(file, "tokens", "holds a token twice")
    return vocabulary


def _merges(file: GGUFFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(file, "merges"):
        left, _, right = merge.partition(" ")
        if not all(token in vocabulary for token in (left, right, left + right)):
            raise _error(file, "merges", f"holds {merge!r}, which does not join two tokens to a token")
        merges.append((left, right))
    return merges


def _add_marked(file: GGUFFile, built: Tokenizer, tokens: list[str]) -> None:
    """Adds the tokens that are found in a text before it is split."""
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise _error(file, "token_type", f"is not one number for each of the {len(tokens)} tokens")
    if strange := set(kinds.tolist()) - {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED}:
        raise _error(file, "token_type", f"holds {min(strange)}, which byte-level BPE has no use for")
    for kind, add in ((_CONTROL, built.add_special_tokens), (_USER_DEFINED, built.add_tokens)):
        marked = [tokens[number] for number in np.flatnonzero(kinds == kind)]
        add([AddedToken(token, special=kind == _CONTROL, normalized=False) for token in marked])


def _add_ends(file: GGUFFile, built: Tokenizer, tokens: list[str], *, bos: bool) -> None:
    """Adds the token at the beginning (whether the file says so, or `bos`) and at the end of what is encoded."""
    template, used = ["$A"], []
    for end, default, place in (("bos", bos, 0), ("eos", False, 1)):
        wanted = file.metadata.get(f"tokenizer.ggml.add_{end}_token", default)
        if type(wanted) is not bool:
            raise _error(file, f"add_{end}_token", f"is {wanted!r} and not true or false")
        if wanted:
            number = file.metadata.get(f"tokenizer.ggml.{end}_token_id")
            if type(number) is not int or not 0 <= number < len(tokens):
                raise _error(file, f"{end}_token_id", f"is {number!r} and not the id of a token")
            template.insert(place * len(template), tokens[number])
            used.append((tokens[number], number))
    if used:
        built.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _strings(file: GGUFFile, name: str) -> list[str]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise _error(file, name, "is not a list of strings")
    return values


def _error(file: GGUFFile, name: str, what: str) -> ValueError:
    return ValueError(f"{file.path}: tokenizer.ggml.{name} {what}")
