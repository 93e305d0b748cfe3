"""Which tokens begin, end and fill a text, as config.json and generation_config.json say it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "pad": "pad_token_id",
    "start": "decoder_start_token_id",
}


class SpecialIds(NamedTuple):
    """Token ids with a role, for `generate`; None, or no eos, where the files name none.

    Attributes:
      bos: begins a text.
      eos: each of them ends one.
      pad: fills rows up.
      start: begins the target text of an encoder-decoder.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    start: int | None = None

    def source(self) -> dict[str, int | list[int] | None]:
        """Return the keys of a config.json that says them."""
        eos = None if not self.eos else self.eos[0] if len(self.eos) == 1 else list(self.eos)
        said: dict[str, int | list[int] | None] = {"bos_token_id": self.bos, "eos_token_id": eos}
        if self.pad is not None:  # some classes cannot be without, and have numbers of their own
            said["pad_token_id"] = self.pad
        return said if self.start is None else said | {"decoder_start_token_id": self.start}


def read_special(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> SpecialIds:
    """Read the ids of a model; what generation_config.json says counts before config.json.

    An id that the vocabulary does not have can never be in a text and is left out; the first LLaMA files say -1.

    Raises:
      ValueError: what is no integer, or for eos no integers.
    """
    found: dict[str, Any] = {}
    for field, key in _KEYS.items():
        said = generation.get(key)
        said = config.get(key) if said is None else said
        values = said if field == "eos" and isinstance(said, list) else [] if said is None else [said]
        if not all(type(value) is int for value in values):
            raise ValueError(f"{key}={said!r} is not a token id" + (", nor a list of them" if field == "eos" else ""))
        ids = tuple(value for value in values if 0 <= value < vocab_size)
        found[field] = ids if field == "eos" else ids[0] if ids else None
    return SpecialIds(**found)
