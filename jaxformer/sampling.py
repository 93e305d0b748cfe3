"""From logits to the next token: transforms of logits, their composition, and one draw.

    token ~ softmax(transform(logits))

A transform maps logits [B V] to float32 logits in which ruled-out tokens are -inf; at least one token stays.
`chain(a, b)` applies a, then b, so `chain(temperature(0.8), top_k(40), top_p(0.95))` cuts after tempering. Transforms
are pytrees: numbers such as the temperature are leaves, and changing them recompiles nothing. Any function of logits is
a transform.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

Transform = Callable[[Array], Array]


def _transform(*leaves: str, static: tuple[str, ...] = ()) -> Callable[[type], type]:
    return partial(jax.tree_util.register_dataclass, data_fields=list(leaves), meta_fields=list(static))


def _only(logits: Array, ids: Array) -> Array:
    """Keeps the logits of these ids [B k] and rules the others out."""
    kept = jnp.take_along_axis(logits, ids, axis=-1)
    return jnp.put_along_axis(jnp.full_like(logits, -jnp.inf), ids, kept, axis=-1, inplace=False)


@_transform()
@dataclasses.dataclass(frozen=True)
class Greedy:
    """Keeps the likeliest token (the lowest id of equals); no randomness is left."""

    def __call__(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        return _only(logits, logits.argmax(axis=-1, keepdims=True))


@_transform("t")
@dataclasses.dataclass(frozen=True)
class Temperature:
    """Divides the logits, less their largest, by t, which may be one number or one a row; t = 0 is greedy."""

    t: Any

    def __call__(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        t, logits = jnp.asarray(self.t, jnp.float32)[..., None], logits.astype(jnp.float32)
        cold = t < jnp.finfo(jnp.float32).tiny
        # Less their largest: a small t would make several logits inf, and the first of them the winner.
        largest = logits.max(axis=-1, keepdims=True)
        below = logits - jnp.where(jnp.isfinite(largest), largest, 0)
        return jnp.where(cold, greedy(logits), below / jnp.where(cold, 1, t))


@_transform(static=("k",))
@dataclasses.dataclass(frozen=True)
class TopK:
    """Keeps the k likeliest tokens, exactly k also among equals (lower ids first); k is static."""

    k: int

    def __call__(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        # To lax.top_k -0.0 is less than 0.0.
        ranked = jnp.where(logits == 0, 0.0, logits)
        return _only(logits, jax.lax.top_k(ranked, min(self.k, logits.shape[-1]))[1])


@_transform("p")
@dataclasses.dataclass(frozen=True)
class TopP:
    """Keeps the smallest set of likeliest tokens whose probability reaches p, and at least one."""

    p: Any

    def __call__(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        p, logits = jnp.asarray(self.p, jnp.float32)[..., None], logits.astype(jnp.float32)
        order = jnp.argsort(-logits, axis=-1, stable=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        mass = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(mass, axis=-1) - mass
        # A rounded sum may reach 1 before the last token, and p = 1 keeps all.
        kept = ((before < p) | (p == 1)).at[..., 0].set(True)
        return jnp.put_along_axis(logits, order, jnp.where(kept, ranked, -jnp.inf), axis=-1, inplace=False)


@_transform("transforms")
@dataclasses.dataclass(frozen=True)
class Chain:
    """Applies transforms in the order given."""

    transforms: tuple[Any, ...]

    def __call__(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        for transform in self.transforms:
            logits = transform(logits)
        return logits


greedy = Greedy()


def temperature(t: Any) -> Temperature:
    """Makes logits / t; above 1 flatter, below 1 sharper, 0 greedy. An array [B] gives each row its own.

    Raises:
      ValueError: a negative or non-finite t.
    """
    for value in _numbers(t):
        if not 0 <= value < math.inf:
            raise ValueError(f"temperature {value} must be 0 (greedy) or a positive finite number")
    # One type, so that a change from 1 to 0.5 recompiles nothing.
    return Temperature(jnp.asarray(t, jnp.float32))


def top_k(k: int) -> TopK:
    """Makes the transform that keeps the k likeliest tokens; a k over the vocabulary keeps all.

    Raises:
      ValueError: k below 1.

    References:
      Fan et al. 2018, "Hierarchical Neural Story Generation", section 5.4.
    """
    if k < 1:
        raise ValueError(f"top_k={k} would keep no token; it must be at least 1")
    return TopK(k)


def top_p(p: Any) -> TopP:
    """Makes the transform that keeps the nucleus of probability p; 0 keeps one token, 1 keeps all.

    Raises:
      ValueError: p outside of [0, 1].

    References:
      Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    for value in _numbers(p):
        if not 0 <= value <= 1:
            raise ValueError(f"top_p={value} is not a probability; it must be from 0 to 1")
    return TopP(jnp.asarray(p, jnp.float32))


def chain(*transforms: Transform) -> Chain:
    """Makes the transform that applies these in order; a plain function becomes part of the compiled program."""
    return Chain(tuple(as_pytree(transform) for transform in transforms))


def as_pytree(transform: Transform) -> Any:
    """Returns a transform that can be an argument of a jitted function."""
    known = (Greedy, Temperature, TopK, TopP, Chain, jax.tree_util.Partial)
    return transform if isinstance(transform, known) else jax.tree_util.Partial(transform)


def sample(key: Key[Array, ""], logits: Float[Array, "B V"], transform: Transform = greedy) -> Int[Array, " B"]:
    """Draws one token a row. A row's draw depends on the key, its number and its logits, not on the other rows."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, transform(logits).astype(jnp.float32)).astype(jnp.int32)


def _numbers(value: Any) -> list[float]:
    # Values inside a trace are not known; they were checked when the transform was made outside of it.
    return [] if isinstance(value, jax.core.Tracer) else np.ravel(value).astype(float).tolist()
