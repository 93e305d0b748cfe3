"""Where a token stands, told to the model at one of two places; both read *positions*, never array indices.

    ADD     x + f(positions)            learned table; sinusoids
    ROTATE  q, k turned by f(positions) rotary

Angles are computed in float32 from integer positions whatever the model's type: bfloat16 cannot tell position 257 from
256, and an angle from rounded frequencies is wrong by whole turns at a few thousand tokens.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def _angles(positions: Int[Array, "*B"], lanes: int, base: float) -> Float[Array, "*B pairs"]:
    # The frequencies come from float64, so that only the product is rounded.
    frequencies = base ** (-np.arange(0, lanes, 2, dtype=np.float64) / lanes)
    return positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)


def sinusoidal(positions: Int[Array, "*B"], width: int) -> Float[Array, "*B D"]:
    """Returns float32 vectors of alternating sines and cosines.

    PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos(p / 10000^(2i/D))       (Vaswani et al. 2017, section 3.5)

    Raises:
      ValueError: an odd width.
    """
    if width % 2:
        raise ValueError(f"sinusoids fill pairs of lanes, but the width is {width}; make it even")
    angles = _angles(positions, width, 10000.0)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*positions.shape, width)


def rotary(x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], *, base: float) -> Float[Array, "B T N H"]:
    """Turns lane i and lane i + H/2 of each head by the angle position * base^(-2i/H).

    The pairs are the two halves of the head, as in published LLaMA-type checkpoints, and not neighbouring lanes. The
    result has the type of x; the turn is computed in float32.

    Raises:
      ValueError: an odd head width.

    References:
      Su et al. 2021, "RoFormer", equation 34.
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rotary positions turn pairs of lanes, but the head width is {width}; make it even")
    angles = _angles(positions, width, base)[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


ADD: dict[str, Callable[[Array, int], Array]] = {"sinusoidal": sinusoidal}
"""Positions -> vectors [B T D] to add to the embeddings; the learned table is a parameter and stands in models.py."""

ROTATE: dict[str, Callable[..., Array]] = {"rotary": rotary}
"""Turns q or k [B T N H] by their positions."""
