"""Text to ids and back: bytes, or byte-level BPE on top of them.

A text is its UTF-8 bytes. Ids 0..255 are the bytes, id 256 is END, and each id above joins two earlier ids (Sennrich et
al. 2016, https://arxiv.org/abs/1508.07909, over bytes as in GPT-2). A byte tokenizer is the case without joins. So

    decode(encode(text)) == text    and    decode(ids) == b"".join(token_bytes(i) for i in ids).decode(errors="replace")
"""

import builtins
import codecs
import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
"""The one special token: it opens every document and closes the one before."""

# What normalizers touch (space at both ends, a decomposed letter, a ligature, controls), END as text, and a text that
# an added prefix space would change.
_PROBES = (f"  Two  spaces, A\r\n\te\u0301 \ufb01 \u00a0\u3000\x00\x7f \U0001f600 {END} ", "a")


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = itertools.count(256)
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tokenizer:
    """Turn text into ids and back without loss.

    END written in a text is ordinary text: only `end_id` is the special token, and it decodes to nothing.

    Make one with `Tokenizer.bytes()`, `Tokenizer.train(documents, vocab_size)` or `Tokenizer.from_json(text)`.
    """

    _raw: tokenizers.Tokenizer
    _pieces: tuple[builtins.bytes, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._raw.no_truncation()
        self._raw.no_padding()
        self._raw.encode_special_tokens = True  # the JSON does not keep it
        object.__setattr__(self, "_pieces", _pieces(self._raw))
        for probe in _PROBES:
            if (decoded := self.decode(self.encode(probe))) != probe:
                raise ValueError(
                    f"the tokenizer changes text: {probe!r} comes back as {decoded!r}; it must be byte-level without a "
                    "normalizer and without a prefix space; use the `tokenizers` library directly for this file"
                )

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn byte-level BPE; the same documents give the same tokenizer.

        Pairs that occur only once are not joined, so a corpus that is too small gives a smaller vocabulary than asked:
        read `vocab_size` of the result.

        Args:
          documents: texts; no token spans two of them.
          vocab_size: largest number of ids, at least 257 (the bytes and END).

        Raises:
          ValueError: vocab_size below 257.
          TypeError: documents is one string.
        """
        if vocab_size < 257:
            raise ValueError(f"vocab_size={vocab_size} is below 257, the bytes and {END}; ask for 257 or more")
        if isinstance(documents, str):
            raise TypeError("documents is one string, and would be read as one document per character; pass [text]")
        trainee = tokenizers.Tokenizer(models.BPE())
        trainee.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,  # END is added afterwards
            min_frequency=2,
            show_progress=False,
            initial_alphabet=_byte_characters(),
        )
        trainee.train_from_iterator(documents, trainer)
        merges = json.loads(trainee.to_str())["model"]["merges"]
        return cls(_byte_level([(left, right) for left, right in merges]))

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Read the JSON that `to_json` wrote, or a byte-level `tokenizer.json` that has END.

        Truncation and padding settings of the file are dropped.

        Raises:
          ValueError: not JSON, not a tokenizer, not byte-level, a tokenizer that changes text, or one without END.
        """
        try:
            raw = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"not the JSON of a tokenizer: {error}; write it with Tokenizer.to_json") from error
        return cls(raw)

    def to_json(self) -> str:
        """Return the tokenizer as JSON in the format of the `tokenizers` library (`tokenizer.json`)."""
        return self._raw.to_str()

    @property
    def vocab_size(self) -> int:
        """Number of ids, END included."""
        return len(self._pieces)

    @property
    def end_id(self) -> int:
        """Id of END."""
        return _end_id(self._raw)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without END.

        Raises:
          ValueError: the text holds a lone surrogate, which has no UTF-8 form.
        """
        _check_text(text)
        return self._raw.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, on all cores.

        Raises:
          ValueError: a text holds a lone surrogate, which has no UTF-8 form.
        """
        for text in texts:
            _check_text(text)
        return [encoding.ids for encoding in self._raw.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; END is dropped and bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        return b"".join(_look_up(self._pieces, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> builtins.bytes:
        """Return the bytes of one id, which may be part of a character; END has none.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        return _look_up(self._pieces, [token_id])[0]

    def stream(self) -> "TextStream":
        """Return a decoder that takes one id at a time."""
        return TextStream(self)

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """Return the byte tokenizer: the id of a byte is its value, and END is 256."""
        return cls(_byte_level([]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, end_id={self.end_id})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return type(self).from_json, (self.to_json(),)


class TextStream:
    """Decode ids one at a time; the pieces together are `decode` of all ids.

    A character is held back until its last byte is there, so `push` often returns an empty string.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this id completes.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return what is held back: U+FFFD for a character without its end, else nothing. The stream starts anew."""
        return self._decoder.decode(b"", final=True)


def _byte_level(merges: Sequence[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer with bytes at 0..255, END at 256 and then one id for each new join."""
    tokens = dict.fromkeys([*_byte_characters(), END, *(left + right for left, right in merges)])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END])
    return raw


def _end_id(raw: tokenizers.Tokenizer) -> int:
    for number, token in raw.get_added_tokens_decoder().items():
        if token.content == END and token.special:
            return number
    raise ValueError(f"the tokenizer has no special token {END}; add it, or use the `tokenizers` library directly")


def _pieces(raw: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """Return the bytes of each id.

    Raises:
      ValueError: a token that is not byte-level, a byte without a token, or ids with holes.
    """
    _end_id(raw)
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    added = raw.get_added_tokens_decoder()
    pieces = {}
    for token, number in raw.get_vocab(with_added_tokens=True).items():
        if number in added:
            pieces[number] = b"" if added[number].special else added[number].content.encode()
        elif strange := set(token) - byte_of.keys():
            raise ValueError(f"token {token!r} (id {number}) is not byte-level: no byte for {min(strange)!r}")
        else:
            pieces[number] = bytes(byte_of[character] for character in token)
    if missing := set(range(256)) - {piece[0] for piece in pieces.values() if len(piece) == 1}:
        raise ValueError(f"no token for byte {min(missing)}; a byte-level vocabulary holds all 256 bytes")
    if holes := set(range(len(pieces))) - pieces.keys():
        raise ValueError(f"no token has id {min(holes)} although there are {len(pieces)} tokens; number them 0, 1, ...")
    return tuple(pieces[number] for number in range(len(pieces)))


def _look_up(pieces: tuple[bytes, ...], ids: Iterable[int]) -> list[bytes]:
    found = []
    for token_id in ids:
        if not 0 <= token_id < len(pieces):
            raise ValueError(
                f"id {token_id} is outside the vocabulary of {len(pieces)} ids; decode with the tokenizer that the ids "
                "come from, and check that the model's vocab_size is not larger"
            )
        found.append(pieces[token_id])
    return found


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds the lone surrogate {text[error.start]!r} at character {error.start}, which has no UTF-8 "
            "form; replace it, for example by text.encode(errors='replace').decode()"
        ) from error
