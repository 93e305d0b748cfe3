"""The choices of rotary positions, which may differ between layers; `positions.py` makes angles of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from jaxformer.checks import check_choice, check_positive, check_size

Scaling = Literal["none", "linear", "ntk", "by_parts", "yarn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """How rotary positions turn queries and keys, and how they are stretched to a longer context.

    Raises:
      ValueError: a value out of range, a scaling that lacks `original_len`, or a factor without a scaling.
    """

    base: float = 10000.0
    """Wavelength base: lane pair i of `width` lanes turns by base^(-2i / width) a position."""
    width: int | None = None
    """Number of lanes of a head that turn, from the first. None: all."""
    scaling: Scaling = "none"
    """Key of `positions.SCALINGS`: what `factor` stretches."""
    factor: float = 1.0
    """How many times longer the context is made."""
    original_len: int | None = None
    """Context length of the training before, in tokens; by_parts and yarn need it."""
    slow: float = 1.0
    """by_parts and yarn: lanes that turn fewer times than this in original_len are stretched by the whole factor."""
    fast: float = 32.0
    """by_parts and yarn: lanes that turn more often than this are left as they are."""
    magnitude: float | None = None
    """Factor on the turned lanes of q and of k. None: 0.1 ln(factor) + 1 for yarn, and 1 for the others."""

    def __post_init__(self) -> None:
        check_choice("scaling", self.scaling, get_args(Scaling))
        for name in ("base", "factor", "slow", "fast", "magnitude"):
            check_positive(f"rotary.{name}", getattr(self, name), optional=name == "magnitude")
        for name in ("width", "original_len"):
            check_size(f"rotary.{name}", getattr(self, name), optional=True)
        if self.factor < 1:
            raise ValueError(f"rotary.factor={self.factor} would shorten the context; it must be at least 1")
        if self.factor != 1 and self.scaling == "none":
            raise ValueError(f"rotary.factor={self.factor} stretches nothing with scaling='none'; name the scaling")
        if self.scaling in ("by_parts", "yarn") and self.original_len is None:
            raise ValueError(f"scaling={self.scaling!r} needs original_len, the context length of the training before")
        if self.slow >= self.fast:
            raise ValueError(f"rotary.slow={self.slow} must be below rotary.fast={self.fast}")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Rotary":
        """Makes rotary positions from untrusted JSON fields.

        Raises:
          ValueError: an unknown field, or a value out of range.
        """
        unknown = set(fields) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"config field 'rotary' has unknown fields {sorted(map(str, unknown))}")
        return cls(**fields)
