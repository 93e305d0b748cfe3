"""Rotary positions and windows of layers, as config.json says them in its old and its new spelling.

old   "rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
new   "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, or one such object a kind of layer
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.keys import Fields, Key, number, size
from jaxformer.rotary import Rotary, Scaling

FULL, SLIDING = "full_attention", "sliding_attention"

_FIELDS: dict[str, tuple[Scaling, dict[str, Key]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": number("factor")}),
    "llama3": (
        "by_parts",
        {"factor": number("factor"), "slow": number("low_freq_factor"), "fast": number("high_freq_factor")},
    ),
    "yarn": (
        "yarn",
        {
            "factor": number("factor"),
            "slow": number("beta_slow", default=1.0),
            "fast": number("beta_fast", default=32.0),
            "magnitude": number("attention_factor", default=None),
        },
    ),
}
"""Kinds of scaling: their name here, and the keys of their numbers."""
_ORIGINAL = "original_max_position_embeddings"
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def head_width(fields: Mapping[str, Any]) -> int:
    """Return the width of a head from the fields read so far."""
    return fields.get("d_head") or max(fields["d_model"] // fields["num_heads"], 1)


def rope_object(source: Mapping[str, Any], kind: str | None = None) -> Mapping[str, Any]:
    """Return what config.json says of rotary positions in an object, of one kind of layer where they differ."""
    for name in ("rope_parameters", "rope_scaling"):
        found = source.get(name)
        if found is None:
            continue
        if isinstance(found, Mapping) and kind is not None and (FULL in found or SLIDING in found):
            found = found.get(kind) or {}
        if not isinstance(found, Mapping):
            raise ValueError(f"{name}={found!r} must be an object")
        return found
    return {}


def read_rotary(
    source: Mapping[str, Any], found: Mapping[str, Any], head: int, theta: Key, part: Key, max_len: int
) -> Rotary:
    """Return rotary positions.

    Args:
      source: config.json.
      found: its object of rotary positions, see `rope_object`.
      head: width of a head.
      theta: key of the base outside of the object.
      part: key of the share of a head's lanes that turn, outside of the object.
      max_len: the original context, where the object does not say it.

    Raises:
      ValueError: a kind of scaling, or a key of it, that is not known; a value of the wrong type.
    """
    said = {name: value for name, value in found.items() if value is not None}
    kind = said.get("rope_type", said.get("type", "default"))
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"rotary positions of rope_type={kind!r} are not supported; known are {sorted(_FIELDS)}")
    scaling, keys = _FIELDS[kind]
    known = _COMMON | {key.names[0] for key in keys.values()} | ({_ORIGINAL} if "slow" in keys else set())
    if unknown := sorted(set(said) - known):
        raise ValueError(f"rotary positions of rope_type={kind!r} have unknown keys {unknown}")
    fields: Fields = {name: key.get(said) for name, key in keys.items()}
    if "slow" in keys:
        fields["original_len"] = size(_ORIGINAL, default=max_len).get(said)
    base = number("rope_theta").get(said) if "rope_theta" in said else theta.get(source)
    share = number("partial_rotary_factor").get(said) if "partial_rotary_factor" in said else part.get(source)
    width = None if share == 1 else int(head * share)
    return Rotary(base=base, width=width, scaling=scaling, **fields)


def write_scaling(rotary: Rotary) -> Fields | None:
    """Return the object "rope_scaling" of rotary positions, or None where they are not scaled.

    Raises:
      ValueError: a scaling, or a magnitude, that config.json has no name for.
    """
    kinds = {scaling: (kind, keys) for kind, (scaling, keys) in _FIELDS.items()}
    if rotary.scaling not in kinds or (rotary.magnitude is not None and rotary.scaling != "yarn"):
        raise ValueError(f"config.json has no words for rotary positions with {rotary.scaling=}, {rotary.magnitude=}")
    kind, keys = kinds[rotary.scaling]
    if kind == "default":
        return None
    said = {key.names[0]: getattr(rotary, name) for name, key in keys.items() if getattr(rotary, name) is not None}
    return {"rope_type": kind} | said | ({_ORIGINAL: rotary.original_len} if "slow" in keys else {})


def same_rotary(config: Config) -> Rotary:
    """Return the rotary positions of all layers.

    Raises:
      ValueError: they differ between layers.
    """
    if len(set(config.rotaries)) > 1:
        raise ValueError("rotary positions differ between layers")
    return config.rotaries[0]


def write_share(rotary: Rotary, head: int) -> float:
    """Return the share of a head's lanes that turn, such that `read_rotary` finds their number again."""
    share = (rotary.width or head) / head
    while int(head * share) < (rotary.width or head):
        share = math.nextafter(share, 2)
    return share


# Kinds of layers ------------------------------------------------------------------------------------------------------


def read_layers(source: Mapping[str, Any], num_layers: int, default: Sequence[bool]) -> list[bool]:
    """Return which layers have a window.

    Args:
      default: of each layer, where config.json has no "layer_types".

    Raises:
      ValueError: kinds of layers that are not known, or not one of each layer.
    """
    kinds = source.get("layer_types")
    if kinds is None:
        return list(default)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ValueError(f"layer_types must be a list with a kind for each of the {num_layers} layers")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ValueError(f"layer_types names {kind!r}; supported are {FULL!r} and {SLIDING!r}")
    return [kind == SLIDING for kind in kinds]


def windows(source: Mapping[str, Any], sliding: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the window of each layer, all of the one size that config.json says."""
    if not any(sliding):
        return (None,)
    window = size("sliding_window").get(source)
    return tuple(window if slides else None for slides in sliding)


def write_layers(config: Config) -> Fields:
    """Return the keys of windows.

    Raises:
      ValueError: windows of several sizes.
    """
    sizes = {window for window in config.windows if window is not None}
    if len(sizes) > 1:
        raise ValueError(f"config.json has one size of windows, and this config has {sorted(sizes)}")
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    return {"layer_types": kinds, "sliding_window": max(sizes, default=None)}
