"""The tokenizer of a GGUF file, as the `tokenizers` library builds it.

    gpt2:   text -> split at marked tokens -> split by a pattern -> bytes -> merges, in the order of the file -> ids
    llama:  text -> split at marked tokens -> spaces become \u2581 -> merges, by the score of the joined token -> ids

Of the splitting pattern a file holds only the name that llama.cpp gave it (`tokenizer.ggml.pre`). Each name here stands
for what the published tokenizer.json of that model does.

References:
  Sennrich et al. 2016, https://arxiv.org/abs/1508.07909; Radford et al. 2019, section 2.2, for merges of bytes;
  Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226, for merges by scores.
  https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxformer.convert.gguf import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer(file: GGUFFile) -> Tokenizer:
    """Rebuilds the tokenizer that a file holds: byte-level BPE (`gpt2`), or SentencePiece's BPE (`llama`).

    Encoding adds the tokens at the beginning and the end that the file asks for; `add_special_tokens=False` leaves them
    out. Special tokens written in a text become their ids. A byte without a token (rare ones, in some byte-level
    vocabularies) encodes to nothing, as in the published tokenizers. A chat template is not read.

    Raises:
      ValueError: a kind of tokenizer or a splitting pattern that is not known, or metadata that are missing or wrong.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _error(file, "model", f"is {kind!r}; known are {', '.join(_KINDS)}; use the model's tokenizer.json")
    return _KINDS[kind](file)


# Byte-level BPE -------------------------------------------------------------------------------------------------------


def _by_merges(file: GGUFFile) -> Tokenizer:
    pre = file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _SPLITTERS:
        raise _error(file, "pre", f"is {pre!r}; known are {', '.join(_SPLITTERS)}; use the model's tokenizer.json")
    vocabulary = _vocabulary(file)
    kinds = _kinds(file, len(vocabulary), {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED})
    ignore_merges = pre == "llama-bpe"  # a word that is a token is that token, even where merges lead elsewhere
    built = Tokenizer(models.BPE(vocabulary, _merges(file, vocabulary), ignore_merges=ignore_merges))
    built.pre_tokenizer = _SPLITTERS[pre]()
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    _add_marked(built, list(vocabulary), kinds, normalized=False)
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


# SentencePiece's BPE --------------------------------------------------------------------------------------------------


def _by_scores(file: GGUFFile) -> Tokenizer:
    """The pair whose joined token has the best score is merged first, wherever it was split."""
    vocabulary = _vocabulary(file)
    tokens = list(vocabulary)
    kinds = _kinds(file, len(tokens), {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE})
    if odd := [tokens[i] for i in np.flatnonzero(kinds == _UNUSED) if not re.fullmatch(r"\[PAD\d+\]", tokens[i])]:
        raise _error(file, "token_type", f"says that {odd[0]!r} is unused, which merges would have to split again")
    prefix = _flag(file, "add_space_prefix", True)
    if prefix and (kinds == _USER_DEFINED).any():
        raise _error(file, "add_space_prefix", "puts a space before texts, but not after tokens that users defined")
    built = Tokenizer(
        models.BPE(
            vocabulary,
            _scored_merges(file, tokens, kinds),
            unk_token=tokens[_id(file, "unknown_token_id", len(tokens))],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    from_spaces = normalizers.Replace(" ", _SPACE)
    if prefix:
        built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), from_spaces])
        built.decoder = decoders.Sequence([*to_spaces, decoders.Strip(" ", 1, 0)])
    else:
        built.normalizer, built.decoder = from_spaces, decoders.Sequence(to_spaces)
    _add_marked(built, tokens, kinds, normalized=True)
    _add_ends(file, built, tokens, bos=True)
    return built


def _scored_merges(file: GGUFFile, tokens: list[str], kinds: NDArray[Any]) -> list[tuple[str, str]]:
    """Returns every way to join two normal tokens to a third, the best joined token first."""
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise _error(file, "scores", f"is not one number for each of the {len(tokens)} tokens")
    normal = np.flatnonzero(kinds == _NORMAL)
    if not np.isfinite(scores[normal]).all() or len(np.unique(scores[normal])) < len(normal):
        raise _error(file, "scores", "is not a different number for each normal token, so that no order follows")
    number = {tokens[i]: i for i in normal.tolist()}
    merges = []
    for token in (tokens[i] for i in normal[np.argsort(-scores[normal])]):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += sorted(
            (pair for pair in halves if pair[0] in number and pair[1] in number),
            key=lambda pair: (number[pair[0]], number[pair[1]]),
        )
    return merges


_KINDS: dict[str, Callable[[GGUFFile], Tokenizer]] = {"gpt2": _by_merges, "llama": _by_scores}


# Both -----------------------------------------------------------------------------------------------------------------


def _kinds(file: GGUFFile, number: int, known: set[int]) -> NDArray[Any]:
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != number:
        raise _error(file, "token_type", f"is not one number for each of the {number} tokens")
    if strange := set(kinds.tolist()) - known:
        raise _error(file, "token_type", f"holds {min(strange)}, which such a tokenizer has no use for")
    return kinds


def _add_marked(built: Tokenizer, tokens: list[str], kinds: NDArray[Any], *, normalized: bool) -> None:
    """Adds the tokens that are found in a text before it is split; those of users in the normalized text, or not."""
    for kind, add in ((_CONTROL, built.add_special_tokens), (_USER_DEFINED, built.add_tokens)):
        special = kind == _CONTROL
        marked = [tokens[number] for number in np.flatnonzero(kinds == kind)]
        add([AddedToken(token, special=special, normalized=normalized and not special) for token in marked])


def _add_ends(file: GGUFFile, built: Tokenizer, tokens: list[str], *, bos: bool) -> None:
    """Adds the token at the beginning (whether the file says so, or `bos`) and at the end of what is encoded."""
    template, used = ["$A"], []
    for end, default, place in (("bos", bos, 0), ("eos", False, 1)):
        if _flag(file, f"add_{end}_token", default):
            number = _id(file, f"{end}_token_id", len(tokens))
            template.insert(place * len(template), tokens[number])
            used.append((tokens[number], number))
    if used:
        built.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if type(value) is not bool:
        raise _error(file, name, f"is {value!r} and not true or false")
    return value


def _id(file: GGUFFile, name: str, number: int) -> int:
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if type(value) is not int or not 0 <= value < number:
        raise _error(file, name, f"is {value!r} and not the id of a token")
    return value


def _strings(file: GGUFFile, name: str) -> list[str]:
    values = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise _error(file, name, "is not a list of strings")
    return values


def _error(file: GGUFFile, name: str, what: str) -> ValueError:
    return ValueError(f"{file.path}: tokenizer.ggml.{name} {what}")
