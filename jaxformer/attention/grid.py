"""A mask cut into blocks of queries and keys, and the list of those blocks in which anything can be seen."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Int

from jaxformer.masks import FAR, Mask


class Grid(NamedTuple):
    """I blocks of t queries and J blocks of s keys: positions, intervals and segments are [I b t] or [J b s].

    Attributes:
      low, high: the first and last position that a query may see (`Mask.interval`).
      layout: [I J], False where a block is hidden whatever the positions; None: no block is.
    """

    q_positions: Array
    low: Array
    high: Array
    kv_positions: Array
    q_segments: Array | None
    kv_segments: Array | None
    layout: Array | None

    def allowed(self, i: Array, j: Array) -> Bool[Array, "b 1 1 t s"]:
        """Returns who may attend to whom in query block i and key block j."""
        kv = self.kv_positions[j][:, None, :]
        allowed = (self.low[i][:, :, None] <= kv) & (kv <= self.high[i][:, :, None])
        if self.q_segments is not None and self.kv_segments is not None:
            allowed &= self.q_segments[i][:, :, None] == self.kv_segments[j][:, None, :]
        return allowed[:, None, None]

    def active(self) -> Bool[Array, "I J"]:
        """Returns False where no pair of the block can be allowed in any row of the batch."""
        active = self.active_rows().any(axis=2)
        return active if self.layout is None else active & self.layout

    def active_rows(self) -> Bool[Array, "I J b"]:
        """Returns False where a row allows no pair of the block, judged by the extremes of either side."""
        valid = self.kv_positions >= 0
        first = jnp.where(valid, self.kv_positions, FAR + 1).min(axis=2)[None]
        last = self.kv_positions.max(axis=2)[None]
        seen = (first <= self.high.max(axis=2)[:, None]) & (last >= self.low.min(axis=2)[:, None])
        if self.q_segments is not None and self.kv_segments is not None:
            seen &= self.q_segments.max(axis=2)[:, None] >= self.kv_segments.min(axis=2)[None]
            seen &= self.q_segments.min(axis=2)[:, None] <= self.kv_segments.max(axis=2)[None]
        return seen


def make_grid(mask: Mask, t: int, s: int, layout: np.ndarray | None = None) -> Grid:
    """Cuts a mask into blocks of t queries and s keys; padding repeats the last query and adds empty keys."""
    low, high = mask.interval()
    return Grid(
        _rows(mask.q_positions, t, mode="edge"),
        _rows(low, t, mode="edge"),
        _rows(high, t, mode="edge"),
        _rows(mask.kv_positions, s, constant_values=-1),
        None if mask.q_segments is None else _rows(mask.q_segments, t, mode="edge"),
        None if mask.kv_segments is None else _rows(mask.kv_segments, s, mode="edge"),
        None if layout is None else jnp.asarray(layout),
    )


def worklist(active: Bool[Array, "I J"]) -> tuple[Int[Array, " I"], Int[Array, "I J"]]:
    """Returns how many blocks of each row are active, and the row's blocks with the active ones first, in order."""
    return active.sum(axis=1), jnp.argsort(~active, axis=1, stable=True)


def padded(x: Array, size: int, **how: Any) -> Array:
    """Pads axis 1 to a multiple of size."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), **how)


def _rows(x: Int[Array, "b T"], size: int, **how: Any) -> Int[Array, "I b t"]:
    return rearrange(padded(x, size, **how), "b (I t) -> I b t", t=size)
