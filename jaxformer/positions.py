"""Where a token stands, told to the model at one of three places; all read *positions*, never array indices.

    ADD     x + f(positions)              learned table; sinusoids
    ROTATE  q, k turned by f(positions)   rotary, with its scalings to longer contexts
    BIAS    scores + f(q, kv positions)   a slope for each head; a table of distances (in biases.py)

Angles are computed in float32 from integer positions whatever the model's type: bfloat16 cannot tell position 257 from
256, and an angle from rounded frequencies is wrong by whole turns at a few thousand tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.rotary import Rotary
from jaxformer.trees import Leaf


def _angles(positions: Int[Array, "*B"], frequencies: Float[Array | np.ndarray, " pairs"]) -> Float[Array, "*B pairs"]:
    return positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)


def _geometric(lanes: int, base: float) -> np.ndarray:
    """Returns base^(-2i/lanes) in float64, so that only the angle is rounded."""
    return base ** (-np.arange(0, lanes, 2, dtype=np.float64) / lanes)


def sinusoidal(positions: Int[Array, "*B"], width: int) -> Float[Array, "*B D"]:
    """Returns float32 vectors of alternating sines and cosines.

    PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(p / 10000^(2i/D))       (Vaswani et al. 2017, section 3.5)

    Raises:
      ValueError: an odd width.
    """
    if width % 2:
        raise ValueError(f"sinusoids fill pairs of lanes, but the width is {width}; make it even")
    angles = _angles(positions, _geometric(width, 10000.0))
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, width)


def sinusoidal_halves(positions: Int[Array, "*B"], width: int) -> Float[Array, "*B D"]:
    """Returns the lanes of `sinusoidal` in another order, all sines before all cosines.

    The layout of tensor2tensor, and of models that were trained with Marian (Junczys-Dowmunt et al. 2018).

    Raises:
      ValueError: an odd width.
    """
    by_turns = sinusoidal(positions, width)
    return jnp.concatenate([by_turns[..., 0::2], by_turns[..., 1::2]], axis=-1)


class Frequencies(NamedTuple):
    """What turns q and k: [pairs] radians a position, float32, and a factor on the turned lanes."""

    radians: Leaf
    magnitude: Leaf


def frequencies(rotary: Rotary, width: int) -> Frequencies:
    """Returns the frequencies of a head of this width as NumPy arrays; `rotary.width` may turn fewer of its lanes.

    Raises:
      ValueError: more lanes than the head has, or an odd number of them.
    """
    lanes = width if rotary.width is None else rotary.width
    if lanes > width:
        raise ValueError(f"rotary.width={lanes} lanes are to turn, but the head has {width}; make it at most that")
    if lanes % 2:
        raise ValueError(f"rotary positions turn pairs of lanes, but {lanes} lanes are to turn; make it even")
    radians = SCALINGS[rotary.scaling](_geometric(lanes, rotary.base), rotary)
    magnitude = rotary.magnitude
    if magnitude is None:
        # YaRN's temperature sqrt(1/t), on q and k each (Peng et al. 2023, equation 22).
        magnitude = 0.1 * math.log(rotary.factor) + 1 if rotary.scaling == "yarn" else 1.0
    return Frequencies(radians.astype(np.float32), np.float32(magnitude))


def rotary(
    x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], frequencies: Frequencies
) -> Float[Array, "B T N H"]:
    """Turns lane i and lane i + pairs of each head by the angle position * radians[i], and leaves lanes beyond both.

    The pairs are the two halves of the turned lanes, as in published LLaMA-type checkpoints, and not neighbours. The
    result has the type of x; the turn is computed in float32.

    References:
      Su et al. 2021, "RoFormer", equation 34.
    """
    pairs = frequencies.radians.shape[-1]
    angles = _angles(positions, frequencies.radians)[:, :, None]
    cos, sin = jnp.cos(angles) * frequencies.magnitude, jnp.sin(angles) * frequencies.magnitude
    first, second, rest = jnp.split(x, (pairs, 2 * pairs), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(y.astype(x.dtype) for y in turned), rest], axis=-1)


def _interpolated(radians: np.ndarray, rotary: Rotary) -> np.ndarray:
    """Squeezes all positions by the factor (Chen et al. 2023, "Position Interpolation", equation 3)."""
    return radians / rotary.factor


def _larger_base(radians: np.ndarray, rotary: Rotary) -> np.ndarray:
    """Raises the base so that the slowest lane is slowed by the factor and the fastest not at all ("NTK-aware").

    Peng et al. 2023, "YaRN", definition 1.
    """
    lanes = 2 * len(radians)
    return _geometric(lanes, rotary.base * rotary.factor ** (lanes / max(lanes - 2, 1)))


def _by_parts(radians: np.ndarray, rotary: Rotary) -> np.ndarray:
    """Interpolates lanes of fewer than `slow` turns in the original context, keeps those of more than `fast`.

    Between the two the share that is kept rises with the number of turns (Peng et al. 2023, "YaRN", equations 17-20;
    Grattafiori et al. 2024, "The Llama 3 Herd of Models", use it with slow=1, fast=4, factor=8).
    """
    turns = radians * _original_len(rotary) / (2 * np.pi)
    kept = np.clip((turns - rotary.slow) / (rotary.fast - rotary.slow), 0, 1)
    return kept * radians + (1 - kept) * radians / rotary.factor


def _by_lanes(radians: np.ndarray, rotary: Rotary) -> np.ndarray:
    """As `_by_parts`, but the share falls linearly from lane to lane: the form of YaRN's published code and models."""
    pairs, original_len = len(radians), _original_len(rotary)

    def lane(turns: float) -> float:
        return pairs * math.log(original_len / (turns * 2 * math.pi)) / math.log(rotary.base)

    first, last = max(math.floor(lane(rotary.fast)), 0), min(math.ceil(lane(rotary.slow)), 2 * pairs - 1)
    kept = 1 - np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
    return kept * radians + (1 - kept) * radians / rotary.factor


def _original_len(rotary: Rotary) -> int:
    assert rotary.original_len is not None  # Rotary checks it
    return rotary.original_len


ADD: dict[str, Callable[[Array, int], Array]] = {"sinusoidal": sinusoidal, "sinusoidal_halves": sinusoidal_halves}
"""Positions -> vectors [B T D] to add to the embeddings; the learned table is a parameter and stands in models.py."""

ROTATE: dict[str, Callable[[Array, Array, Frequencies], Array]] = {"rotary": rotary}
"""Turns q or k [B T N H] by their positions."""

SCALINGS: dict[str, Callable[[np.ndarray, Rotary], np.ndarray]] = {
    "none": lambda radians, rotary: radians,
    "linear": _interpolated,
    "ntk": _larger_base,
    "by_parts": _by_parts,
    "yarn": _by_lanes,
}
"""How frequencies change so that a model can go beyond the context of its training."""
