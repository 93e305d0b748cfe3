"""Who may attend to whom, said by positions and not by array indices.

    allowed[b, t, s] = kv >= 0  and  (causal: kv <= q)  and  (window w: q - kv < w)  and  same segment

where q = q_positions[b, t] and kv = kv_positions[b, s]. Position -1 means: no token here. Left padding, right padding,
packing, the empty slots of a cache and decoding one token at a time are therefore all the same case. Implementations of
attention take the parts, or the boolean `dense()` array; masks are never 0/-inf floats outside of a kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_pytree_node_class
class Mask:
    """The attention mask of q_positions [B T] against kv_positions [B S]; a pytree.

    B may be 1 where every row is alike. `causal`, `window` and `ordered` are static: changing one recompiles. The flag
    that was given as `causal` reads as `is_causal`, because `Mask.causal(T)` makes the usual mask.

    Args:
      q_positions: position of each query token; -1 is padding.
      kv_positions: position of each key; -1 is padding, or an empty cache slot.
      q_segments: document number of each query token, for packed rows; None: every row is one document.
      kv_segments: document number of each key; given together with q_segments.
      causal: keys after the query are hidden.
      window: keys further than this are hidden; the token itself counts, so 1 sees only itself. Without `causal` the
        window reaches to both sides.
      ordered: the caller promises that positions rise along the row wherever they are not -1; for kernels that skip
        blocks by their place. The implementations so far need no such promise.

    Raises:
      ValueError: shapes that do not fit, segments on one side only, or a window below 1.
    """

    def __init__(
        self,
        q_positions: Int[Array, "#B T"],
        kv_positions: Int[Array, "#B S"],
        q_segments: Int[Array, "#B T"] | None = None,
        kv_segments: Int[Array, "#B S"] | None = None,
        causal: bool = False,
        window: int | None = None,
        ordered: bool = False,
    ):
        if (q_segments is None) != (kv_segments is None):
            raise ValueError("q_segments and kv_segments belong together; give both or neither")
        for name, segments, positions in (
            ("q", q_segments, q_positions),
            ("kv", kv_segments, kv_positions),
        ):
            if positions.ndim != 2:
                raise ValueError(f"{name}_positions has shape {positions.shape}; it must be [batch, tokens]")
            if segments is not None and segments.shape[-1] != positions.shape[-1]:
                raise ValueError(f"{name}_segments {segments.shape} do not match {name}_positions {positions.shape}")
        leaves = (q_positions, kv_positions, q_segments, kv_segments)
        rows = {leaf.shape[0] for leaf in leaves if leaf is not None} - {1}
        if len(rows) > 1:
            raise ValueError(f"positions and segments have {sorted(rows)} rows; each must have the batch's, or 1")
        if window is not None and window < 1:
            raise ValueError(f"window={window} hides every key; it counts the token itself, so it must be at least 1")
        self._leaves = leaves
        self._static = (causal, window, ordered)

    @property
    def q_positions(self) -> Array:
        return self._leaves[0]

    @property
    def kv_positions(self) -> Array:
        return self._leaves[1]

    @property
    def q_segments(self) -> Array | None:
        return self._leaves[2]

    @property
    def kv_segments(self) -> Array | None:
        return self._leaves[3]

    @property
    def is_causal(self) -> bool:
        return self._static[0]

    @property
    def window(self) -> int | None:
        return self._static[1]

    @property
    def ordered(self) -> bool:
        return self._static[2]

    @classmethod
    def causal(cls, T: int) -> "Mask":
        """Returns the mask of T tokens, each of which sees itself and the tokens before it; the batch axis is 1."""
        positions = jnp.arange(T)[None]
        return cls(positions, positions, causal=True, ordered=True)

    @classmethod
    def full(cls, T: int, S: int) -> "Mask":
        """Returns the mask under which T queries see all of S keys; the batch axis is 1."""
        return cls(jnp.arange(T)[None], jnp.arange(S)[None], ordered=True)

    @classmethod
    def from_lengths(cls, lengths: Int[Array, " B"], T: int) -> "Mask":
        """Returns the two-sided mask of rows whose first `lengths[b]` of T slots hold tokens (right padding)."""
        index = jnp.arange(T)[None]
        positions = jnp.where(index < jnp.asarray(lengths)[:, None], index, -1)
        return cls(positions, positions, ordered=True)

    def dense(self) -> Bool[Array, "B 1 T S"]:
        """Returns the mask as a boolean array; True = may attend."""
        q, kv = self.q_positions[:, :, None], self.kv_positions[:, None, :]
        allowed = (kv >= 0) & (q >= kv if self.is_causal else True)
        if self.window is not None:
            distance = q - kv
            allowed &= (distance if self.is_causal else abs(distance)) < self.window
        if self.q_segments is not None and self.kv_segments is not None:
            allowed &= self.q_segments[:, :, None] == self.kv_segments[:, None, :]
        return jnp.broadcast_to(allowed, jnp.broadcast_shapes(allowed.shape, q.shape))[:, None]

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[bool, int | None, bool]]:
        return self._leaves, self._static

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, int | None, bool], leaves: tuple[Any, ...]) -> "Mask":
        # Not through __init__: transformations rebuild the mask with leaves that are not arrays.
        mask = object.__new__(cls)
        mask._leaves, mask._static = leaves, static
        return mask

    def __repr__(self) -> str:
        causal, window, ordered = self._static
        return f"Mask(q={self.q_positions}, kv={self.kv_positions}, {causal=}, {window=}, {ordered=})"


def positions_from_segments(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Counts 0, 1, 2, ... within each run of one segment number; segment 0 is padding and gets -1."""
    index = jnp.arange(segments.shape[1])[None]
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.where(segments == 0, -1, index - start)
