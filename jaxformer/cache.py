"""The keys and values of the tokens so far, as a plain pytree that is passed in and returned.

    Cache(layers = LayerCache(self_kv = KV(k [L B K S H], v [L B K S H]), cross_kv), positions [B S], length [])

The layers of one array are written by `dynamic_update_slice` of the new tokens only and carried through the loops: in
that form XLA updates the buffer in place, whatever its size. `positions` and `length` exist once, not per layer. A slot
whose position is -1 is empty (or holds padding) and is never seen.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int

from jaxformer.config import Config
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class KV:
    """Keys and values: [B S K H] for one layer's tokens, [L B K S H] inside a cache."""

    k: Leaf
    v: Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["self_kv", "cross_kv"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What the layers keep: keys and values of self-attention, and of cross-attention to a source if there is one."""

    self_kv: KV
    cross_kv: KV | None = None


@partial(
    jax.tree_util.register_dataclass, data_fields=["layers", "positions", "length", "source_positions"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """The decode state.

    Attributes:
      layers: keys and values of every layer.
      positions: [B S] int32, the position of the token in each slot; -1 where there is none.
      length: [] int32, the number of slots in use; the next token is written here, in every row.
      source_positions: [B S'] int32, the positions of the source's tokens; None: there is no source.
    """

    layers: LayerCache
    positions: Leaf
    length: Leaf
    source_positions: Leaf = None

    @property
    def capacity(self) -> int:
        """The number of slots S."""
        return self.positions.shape[1]


def _dense(config: Config, batch: int, capacity: int, dtype: DTypeLike) -> KV:
    size = config.of_decoder.sizes
    shape = (size["L"], batch, size["K"], capacity, size["H"])
    return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


@dataclasses.dataclass(frozen=True)
class LayerView:
    """One layer of a cache where it lies: `kv` holds all layers, `length` slots of which are in use."""

    kv: KV
    layer: Leaf
    length: Leaf


KINDS = {"dense": _dense}
"""Name of a cache kind -> the function that makes its empty layers."""


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
      kind: key of `KINDS`; dense keeps every token.
      source_len: tokens of the source, for a decoder with cross-attention and only for one.

    Raises:
      ValueError: a batch, capacity or source below 1, a type that is not floating, or a source where there is none.
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
    empty = jnp.full((batch, capacity), -1, jnp.int32), jnp.zeros((), jnp.int32)
    self_kv = KINDS[kind](config, batch, capacity, dtype)
    if source_len is None:
        return Cache(LayerCache(self_kv), *empty)
    layers = LayerCache(self_kv, _dense(config, batch, source_len, dtype))
    return Cache(layers, *empty, jnp.full((batch, source_len), -1, jnp.int32))


def append_positions(cache: Cache, positions: Int[Array, "B T"]) -> Cache:
    """Takes the next T slots for tokens at these positions; the layers' keys and values are written by `store`.

    Raises:
      ValueError: more tokens than free slots. Under jit, where the length is not known, the keys and values that do
        not fit become NaN (see `store`), so that an overflow cannot pass for a result.
    """
    T = positions.shape[1]
    if not isinstance(cache.length, jax.core.Tracer) and int(cache.length) + T > cache.capacity:
        raise ValueError(
            f"the cache holds {int(cache.length)} tokens; {T} more are {int(cache.length) + T}, over its capacity of "
            f"{cache.capacity}; make it larger with init_cache"
        )
    if cache.capacity < T:
        raise ValueError(f"{T} tokens are over the cache's capacity of {cache.capacity}; make it larger")
    at = (0, cache.length)
    slots = jax.lax.dynamic_update_slice(cache.positions, positions.astype(jnp.int32), at)
    return dataclasses.replace(cache, positions=slots, length=cache.length + T)


def store(cache: Cache, layer: Int[Array, ""] | int, new: KV) -> tuple[Cache, LayerView]:
    """Writes one layer's new keys and values [B T K H] into the slots that `append_positions` took for them."""
    old = cache.layers.self_kv
    kv = KV(_write(old.k, new.k, layer, cache.length), _write(old.v, new.v, layer, cache.length))
    layers = dataclasses.replace(cache.layers, self_kv=kv)
    return dataclasses.replace(cache, layers=layers), LayerView(kv, layer, cache.length)


def store_source(cache: Cache, layer: Int[Array, ""] | int, source: KV | None) -> tuple[Cache, LayerView]:
    """Writes one layer's keys and values of the source [B S' K H], or leaves those that are there if it is None."""
    kv = cache.layers.cross_kv
    assert kv is not None  # the model checks it
    length = kv.k.shape[3]
    if source is not None:
        kv = KV(*(_write(old, new, layer, length) for old, new in ((kv.k, source.k), (kv.v, source.v))))
        cache = dataclasses.replace(cache, layers=dataclasses.replace(cache.layers, cross_kv=kv))
    return cache, LayerView(kv, layer, length)


def _write(
    stored: Float[Array, "L B K S H"],
    new: Float[Array, "B T K H"],
    layer: Int[Array, ""] | int,
    end: Int[Array, ""] | int,
) -> Float[Array, "L B K S H"]:
    # dynamic_update_slice would clamp a start beyond the end and overwrite older tokens in silence: tokens that do not
    # fit become NaN instead.
    T, S = new.shape[1], stored.shape[3]
    update = jnp.where(end > S, jnp.nan, new).astype(stored.dtype)
    update = jnp.einsum("BTKH->BKTH", update)[None]
    return jax.lax.dynamic_update_slice(stored, update, (layer, 0, 0, end - T, 0))
