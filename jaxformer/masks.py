"""Who may attend to whom, said by positions and not by array indices.

    allowed[b, t, s] = low <= kv <= high  and  same segment         kv = kv_positions[b, s] >= 0

where [low, high] is the interval of positions that query t may see (`Mask.interval`): it ends at the query's own
position if the mask is causal, or at the end of the prefix, and begins where the window begins. Position -1 means: no
token here. Left padding, right padding, packing, the empty slots of a cache and decoding one token at a time are
therefore all the same case. Implementations of attention take the intervals, or the boolean `dense()` array; masks are
never 0/-inf floats outside of a kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

FAR = 2**30
"""Beyond every position, and small enough that a position and a window add up to an int32."""


@jax.tree_util.register_pytree_node_class
class Mask:
    """The attention mask of q_positions [B T] against kv_positions [B S]; a pytree.

    B may be 1 where every row is alike. `causal`, `ordered` and a window that is an int are static: changing one
    recompiles. The flag that was given as `causal` reads as `is_causal`, because `Mask.causal(T)` makes the usual mask.

    Args:
      q_positions: position of each query token; -1 is padding.
      kv_positions: position of each key; -1 is padding, or an empty cache slot.
      q_segments: document number of each query token, for packed rows; None: every row is one document.
      kv_segments: document number of each key; given together with q_segments.
      causal: keys after the query are hidden.
      window: keys further than this are hidden; the token itself counts, so 1 sees only itself. Without `causal`, and
        within a prefix, the window reaches to both sides. An int, or an int32 scalar that may be traced (layers of one
        scan).
      ordered: the caller promises that positions count up one by one within each document, in q and kv alike, so that
        differences of indices are differences of positions; for kernels that know only indices.
      prefix: number of first positions that every query of the row (or each query, [B T]) sees although they come
        after it: the two-sided part of a prefix language model (Raffel et al. 2020, section 3.2.1). Needs `causal`.

    Raises:
      ValueError: shapes that do not fit, segments on one side only, a window below 1, or a prefix without `causal`.
    """

    def __init__(
        self,
        q_positions: Int[Array, "#B T"],
        kv_positions: Int[Array, "#B S"],
        q_segments: Int[Array, "#B T"] | None = None,
        kv_segments: Int[Array, "#B S"] | None = None,
        causal: bool = False,
        window: int | Int[Array, ""] | None = None,
        ordered: bool = False,
        *,
        prefix: Int[Array, "#B #T"] | None = None,
    ):
        if (q_segments is None) != (kv_segments is None):
            raise ValueError("q_segments and kv_segments belong together; give both or neither")
        if prefix is not None and not causal:
            raise ValueError("a prefix lifts the causal order from the first positions; give causal=True with it")
        for name, segments, positions in (
            ("q", q_segments, q_positions),
            ("kv", kv_segments, kv_positions),
        ):
            if positions.ndim != 2:
                raise ValueError(f"{name}_positions has shape {positions.shape}; it must be [batch, tokens]")
            if segments is not None and segments.shape[-1] != positions.shape[-1]:
                raise ValueError(f"{name}_segments {segments.shape} do not match {name}_positions {positions.shape}")
        if prefix is not None and (prefix.ndim != 2 or prefix.shape[1] not in (1, q_positions.shape[1])):
            raise ValueError(f"prefix has shape {prefix.shape}; it must be [batch, 1] or [batch, queries]")
        q, kv = _int32(q_positions), _int32(kv_positions)
        kv = q if kv_positions is q_positions else kv
        q_numbers, kv_numbers = _int32(q_segments), _int32(kv_segments)
        kv_numbers = q_numbers if kv_segments is q_segments else kv_numbers
        leaves = (q, kv, q_numbers, kv_numbers, _int32(prefix))
        rows = {leaf.shape[0] for leaf in leaves if leaf is not None} - {1}
        if len(rows) > 1:
            raise ValueError(f"positions and segments have {sorted(rows)} rows; each must have the batch's, or 1")
        width: Any = int(window) if isinstance(window, np.integer) else window
        is_static = width is None or isinstance(width, int)
        if not is_static and (width.ndim or not jnp.issubdtype(width.dtype, jnp.integer)):
            raise ValueError(f"a window that is an array must be one integer, not {width.dtype}{list(width.shape)}")
        if isinstance(width, int) and width < 1:
            raise ValueError(f"window={width} hides every key; it counts the token itself, so it must be at least 1")
        self._leaves = (*leaves, None if is_static else width)
        self._static = (causal, width if is_static else None, ordered)

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
    def prefix(self) -> Array | None:
        return self._leaves[4]

    @property
    def is_causal(self) -> bool:
        return self._static[0]

    @property
    def window(self) -> int | Array | None:
        return self._static[1] if self._leaves[5] is None else self._leaves[5]

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

    @classmethod
    def prefix_lm(cls, prefix: Int[Array, " B"], T: int) -> "Mask":
        """Returns the mask of T tokens, the first `prefix[b]` of which see each other and all others what is before."""
        positions = jnp.arange(T)[None]
        return cls(positions, positions, causal=True, ordered=True, prefix=jnp.asarray(prefix)[:, None])

    def interval(self) -> tuple[Int[Array, "#B T"], Int[Array, "#B T"]]:
        """Returns the first and the last position that each query may see; nothing where the last is below the first.

        A query of padding sees nothing in a causal mask.
        """
        q = self.q_positions
        low, high = jnp.zeros_like(q), jnp.full_like(q, FAR)
        if self.is_causal:
            high = q if self.prefix is None else jnp.where(q < 0, q, jnp.maximum(q, self.prefix - 1))
        if self.window is not None:
            reach = (min if isinstance(self.window, int) else jnp.minimum)(self.window, FAR) - 1
            low = jnp.maximum(low, q - reach)
            high = jnp.minimum(high, q + reach)
        low, high = jnp.broadcast_arrays(low, high)
        return low, high

    def dense(self) -> Bool[Array, "B 1 T S"]:
        """Returns the mask as a boolean array; True = may attend."""
        kv = self.kv_positions[:, None, :]
        low, high = (bound[:, :, None] for bound in self.interval())
        allowed = (low <= kv) & (kv <= high)
        if self.q_segments is not None and self.kv_segments is not None:
            allowed &= self.q_segments[:, :, None] == self.kv_segments[:, None, :]
        return allowed[:, None]

    def narrowed(self, window: int | Int[Array, ""] | None) -> "Mask":
        """Returns this mask with a window, or with the narrower of its own and this one; None changes nothing."""
        if window is None:
            return self
        if self.window is not None:
            both = (self.window, window)
            window = min(both) if all(isinstance(w, int) for w in both) else jnp.minimum(*both)
        return self._with(window=window)

    def with_keys(self, kv_positions: Int[Array, "#B S"], kv_segments: Int[Array, "#B S"] | None) -> "Mask":
        """Returns the mask of the same queries against other keys, or against some of them."""
        return self._with(kv_positions=kv_positions, kv_segments=kv_segments)

    def _with(self, **changes: Any) -> "Mask":
        fields = ("q_positions", "kv_positions", "q_segments", "kv_segments", "window", "ordered", "prefix")
        return Mask(**{name: getattr(self, name) for name in fields} | {"causal": self.is_causal} | changes)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        # What q and kv share is one leaf, so that after a transformation too they are known to be the same.
        q, kv, q_segments, kv_segments, *rest = self._leaves
        shared = (kv is q, kv_segments is q_segments)
        leaves = (q, None if shared[0] else kv, q_segments, None if shared[1] else kv_segments, *rest)
        return leaves, (self._static, shared)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> "Mask":
        # Not through __init__: transformations rebuild the mask with leaves that are not arrays.
        mask = object.__new__(cls)
        mask._static, shared = static
        q, kv, q_segments, kv_segments, *rest = leaves
        kv, kv_segments = q if shared[0] else kv, q_segments if shared[1] else kv_segments
        mask._leaves = (q, kv, q_segments, kv_segments, *rest)
        return mask

    def __repr__(self) -> str:
        names = ("q_positions", "kv_positions", "q_segments", "kv_segments", "is_causal", "window", "ordered", "prefix")
        return f"Mask({', '.join(f'{name}={getattr(self, name)}' for name in names)})"


def _int32(x: Any) -> Any:
    """Returns x in the one type in which no position wraps around, or None."""
    if x is None or x.dtype == jnp.int32:
        return x
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"positions and segments of a mask are integers, not {x.dtype}")
    return x.astype(jnp.int32)


def documents(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Numbers each run of one segment number 1, 2, ... along the row; segment 0 is padding and stays 0."""
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jnp.where(segments == 0, 0, jnp.cumsum(starts, axis=1))


def positions_from_segments(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Counts 0, 1, 2, ... within each run of one segment number; segment 0 is padding and gets -1."""
    index = jnp.arange(segments.shape[1])[None]
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.where(segments == 0, -1, index - start)
