"""The keys and values of the tokens so far, as a plain pytree that is passed in and returned.

    Cache(layers = LayerCache(self_kv = KV(k [L B K S H], v [L B K S H]), cross_kv), positions [B S], length [])

A line of slots is filled from left to right, by all rows alike. A ring serves models whose every layer has a window:
row b keeps the token at position p in slot p mod S, so that it holds the last S positions, whatever the text's length.

The layers of one array are written at the new tokens' slots only and carried through the loops: in that form XLA
updates the buffer in place, whatever its size. `positions` and `length` exist once, not per layer. A slot whose
position is -1 is empty (or holds padding) and is never seen.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Int, Shaped

from jaxformer.config import Config
from jaxformer.storage import KV, Int8KV, Storage
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["self_kv", "cross_kv"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What the layers keep: keys and values of self-attention, and of cross-attention to a source if there is one."""

    self_kv: Storage
    cross_kv: Storage | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["layers", "positions", "length", "source_positions"],
    meta_fields=["is_ring"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The decode state.

    Attributes:
      layers: keys and values of every layer.
      positions: [B S] int32, the position of the token in each slot; -1 where there is none.
      length: [] int32, the number of tokens that were appended to each row, padding among them; in a line the next
        token is written here, in every row.
      source_positions: [B S'] int32, the positions of the source's tokens; None: there is no source.
      is_ring: new tokens take the slots of those that no window reaches any more.
    """

    layers: LayerCache
    positions: Leaf
    length: Leaf
    source_positions: Leaf = None
    is_ring: bool = False

    @property
    def capacity(self) -> int:
        """The number of slots S; a ring takes any number of tokens."""
        return self.positions.shape[1]


@partial(jax.tree_util.register_dataclass, data_fields=["kv", "layer", "length", "fresh"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerView:
    """One layer of a cache where it lies, and perhaps keys and values that are not in it.

    Attributes:
      kv: those of all layers.
      length: [] number of the first slots that may hold tokens.
      fresh: those of the new tokens [B T K H], which follow the slots; None: they are in the slots.
    """

    kv: Storage
    layer: Leaf
    length: Leaf
    fresh: KV | None = None


class Kind(NamedTuple):
    """A kind of cache: how numbers are stored, and whether slots are used again."""

    empty: Callable[[tuple[int, ...], DTypeLike], Storage]
    ring: bool


KINDS = {
    "dense": Kind(KV.empty, ring=False),
    "ring": Kind(KV.empty, ring=True),
    "int8": Kind(Int8KV.empty, ring=False),
    "int8_ring": Kind(Int8KV.empty, ring=True),
}


def init_cache(
    config: Config,
    batch: int,
    capacity: int,
    *,
    dtype: DTypeLike | None = None,
    kind: str = "dense",
    source_len: int | None = None,
) -> Cache:
    """Makes an empty cache for `batch` rows of up to `capacity` tokens.

    Args:
      dtype: type of keys and values; None: the config's compute type. On a CPU float32 is the fast one.
      kind: key of `KINDS`. dense keeps every token; ring the last tokens that a window reaches, so that it is no larger
        than the widest window and takes texts of any length; int8 and int8_ring keep them in 8 bits and a scale.
      source_len: tokens of the source, for a decoder with cross-attention and only for one.

    Raises:
      ValueError: a batch, capacity or source below 1, a type that is not floating, a source where there is none, or a
        ring for layers without a window.
      KeyError: an unknown kind.
    """
    if min(batch, capacity, source_len or 1) < 1:
        raise ValueError(f"a cache of batch={batch} and capacity={capacity} holds nothing; both must be at least 1")
    if kind not in KINDS:
        raise KeyError(f"cache kind {kind!r} is unknown; choose one of {list(KINDS)}")
    dtype = jnp.dtype(dtype or config.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"cache type {dtype} would truncate keys and values; it must be a floating type")
    if (source_len is not None) != (config.architecture == "encoder_decoder"):
        raise ValueError(
            f"source_len={source_len} with architecture={config.architecture!r}: the length of the source belongs to "
            "encoder_decoder, and only to it"
        )
    empty, ring = KINDS[kind]
    reach = _reach(config) if ring else capacity
    is_ring, capacity = reach < capacity, min(reach, capacity)
    size = config.of_decoder.sizes

    def stored(slots: int) -> Storage:
        return empty((size["L"], batch, size["K"], slots, size["H"]), dtype)

    layers = LayerCache(stored(capacity), None if source_len is None else stored(source_len))
    source = None if source_len is None else jnp.full((batch, source_len), -1, jnp.int32)
    return Cache(layers, jnp.full((batch, capacity), -1, jnp.int32), jnp.zeros((), jnp.int32), source, is_ring)


def _reach(config: Config) -> int:
    """Returns how many tokens back the widest window sees."""
    windows = config.of_decoder.windows
    if None in windows:
        raise ValueError(
            f"a ring forgets what no window reaches, but window={config.window} lets a layer see every token; set a "
            "window, or choose a dense or int8 cache"
        )
    return max(window for window in windows if window is not None)


def cache_bytes(
    config: Config,
    batch: int,
    capacity: int,
    kind: str = "dense",
    *,
    dtype: DTypeLike | None = None,
    source_len: int | None = None,
) -> int:
    """Returns the bytes that `init_cache` of these arguments takes, without making anything."""
    make = partial(init_cache, config, batch, capacity, dtype=dtype, kind=kind, source_len=source_len)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))


# Appending ------------------------------------------------------------------------------------------------------------


def append_positions(cache: Cache, positions: Int[Array, "B T"]) -> Cache:
    """Takes the slots of T more tokens at these positions; the layers' keys and values are written by `store`.

    Raises:
      ValueError: more tokens than free slots. Under jit, where the length is not known, the keys and values that do
        not fit become NaN (see `store`), so that an overflow cannot pass for a result. A ring has room for all.
    """
    T, positions = positions.shape[1], positions.astype(jnp.int32)
    length = cache.length + T
    if cache.is_ring:
        rows, slots = _ring_slots(cache, positions)
        taken = cache.positions.at[rows, slots].set(positions, mode="drop")
        return dataclasses.replace(cache, positions=taken, length=length)
    if not isinstance(cache.length, jax.core.Tracer) and int(cache.length) + T > cache.capacity:
        raise ValueError(
            f"the cache holds {int(cache.length)} tokens; {T} more are {int(cache.length) + T}, over its capacity of "
            f"{cache.capacity}; make it larger with init_cache"
        )
    if cache.capacity < T:
        raise ValueError(f"{T} tokens are over the cache's capacity of {cache.capacity}; make it larger")
    taken = jax.lax.dynamic_update_slice(cache.positions, positions, (0, cache.length))
    return dataclasses.replace(cache, positions=taken, length=length)


def key_positions(old: Cache, new: Cache, positions: Int[Array, "B T"]) -> Int[Array, "B S"]:
    """Returns the positions of the keys that a view shows after `append_positions` made `new` of `old`."""
    if new.is_ring and positions.shape[1] > 1:
        return jnp.concatenate([old.positions, positions.astype(jnp.int32)], axis=1)
    return new.positions


def store(cache: Cache, layer: Int[Array, ""] | int, new: KV, positions: Int[Array, "B T"]) -> tuple[Cache, LayerView]:
    """Writes one layer's new keys and values [B T K H] into the slots that `append_positions` took for them.

    Several tokens at once overwrite in a ring what the first of them must still see: the view then shows the slots as
    they were, followed by the new tokens.
    """
    old = cache.layers.self_kv
    if cache.is_ring:
        kv = _write_ring(old, old.encoded(new), layer, *_ring_slots(cache, positions))
        view = (
            LayerView(old, layer, cache.capacity, new)
            if positions.shape[1] > 1
            else LayerView(kv, layer, cache.capacity)
        )
    else:
        kv = _write_line(old, new, layer, cache.length)
        view = LayerView(kv, layer, cache.length)
    layers = dataclasses.replace(cache.layers, self_kv=kv)
    return dataclasses.replace(cache, layers=layers), view


def store_source(cache: Cache, layer: Int[Array, ""] | int, source: KV | None) -> tuple[Cache, LayerView]:
    """Writes one layer's keys and values of the source [B S' K H], or leaves those that are there if it is None."""
    kv = cache.layers.cross_kv
    assert kv is not None  # the model checks it
    length = kv.k.shape[3]
    if source is not None:
        kv = _write_line(kv, source, layer, length)
        cache = dataclasses.replace(cache, layers=dataclasses.replace(cache.layers, cross_kv=kv))
    return cache, LayerView(kv, layer, length)


def _write_line(stored: Storage, new: KV, layer: Int[Array, ""] | int, end: Int[Array, ""] | int) -> Storage:
    T, S = new.k.shape[1], stored.k.shape[3]
    # dynamic_update_slice would clamp a start beyond the end and overwrite older tokens in silence: tokens that do not
    # fit become NaN instead.
    new = jax.tree.map(lambda x: jnp.where(end > S, jnp.nan, x), new)

    def write(leaf: Shaped[Array, "L B K S *H"], x: Shaped[Array, "B T K *H"]) -> Array:
        at = (layer, 0, 0, end - T, *[0] * (leaf.ndim - 4))
        return jax.lax.dynamic_update_slice(leaf, jnp.swapaxes(x, 1, 2)[None], at)

    return jax.tree.map(write, stored, stored.encoded(new))


def _write_ring(stored: Storage, new: Storage, layer: Int[Array, ""] | int, rows: Array, slots: Array) -> Storage:
    return jax.tree.map(lambda leaf, x: leaf.at[layer, rows, :, slots].set(x, mode="drop"), stored, new)


def _ring_slots(cache: Cache, positions: Int[Array, "B T"]) -> tuple[Int[Array, "B 1"], Int[Array, "B T"]]:
    """Returns row and slot of each token; the slot S, which is none, of padding and of what later tokens replace."""
    S = cache.capacity
    last = positions.max(axis=1, keepdims=True)
    stays = (positions >= 0) & (positions > last - S)
    return jnp.arange(positions.shape[0])[:, None], jnp.where(stays, positions % S, S)


# Between calls --------------------------------------------------------------------------------------------------------


def crop(cache: Cache, length: int | Int[Array, ""]) -> Cache:
    """Returns the cache as it was when it held `length` tokens: what was appended after them is forgotten.

    Raises:
      ValueError: a ring, which has overwritten what it would have to bring back, or a length that it never had.
    """
    if cache.is_ring:
        raise ValueError("a ring has overwritten older tokens and cannot go back; use a dense or int8 cache")
    known = not isinstance(length, jax.core.Tracer) and not isinstance(cache.length, jax.core.Tracer)
    if known and not 0 <= int(length) <= int(cache.length):
        raise ValueError(f"length={int(length)} must be from 0 to {int(cache.length)}, the tokens that the cache holds")
    kept = jnp.where(jnp.arange(cache.capacity) < length, cache.positions, -1)
    return dataclasses.replace(cache, positions=kept, length=jnp.asarray(length, jnp.int32))


def take_rows(cache: Cache, rows: Int[Array, " b"]) -> Cache:
    """Returns the cache of these rows, in this order; one may stand there several times, or not at all."""
    layers = jax.tree.map(lambda leaf: leaf[:, rows], cache.layers)
    source = None if cache.source_positions is None else cache.source_positions[rows]
    return dataclasses.replace(cache, layers=layers, positions=cache.positions[rows], source_positions=source)


def keep(cache: Cache, length: Int[Array, ""], counts: Int[Array, " B"]) -> Cache:
    """Returns the cache with `counts` of the tokens that each row was given after it held `length`.

    The line ends with the row that keeps most; the others have empty slots there. It must not be a ring.
    """
    kept = jnp.arange(cache.capacity) < length + counts[:, None]
    positions = jnp.where(kept, cache.positions, -1)
    return dataclasses.replace(cache, positions=positions, length=length + counts.max())
