"""Transforms of logits that look at nothing but the logits.

A transform maps logits [B V] to float32 logits in which ruled-out tokens are -inf; at least one token stays. Its second
argument, the `History`, is not read here; see `penalties`.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.history import History

Transform = Callable[..., Array]
"""A function of logits and History, or of logits alone."""


def transform(*leaves: str, static: tuple[str, ...] = ()) -> Callable[[type], type]:
    """Registers a dataclass whose numbers are leaves, so that changing them recompiles nothing."""
    return partial(jax.tree_util.register_dataclass, data_fields=list(leaves), meta_fields=list(static))


def numbers(value: Any) -> list[float]:
    """Returns the numbers to be checked; none inside a trace, where they are not known."""
    return [] if isinstance(value, jax.core.Tracer) else np.ravel(value).astype(float).tolist()


def _only(logits: Array, ids: Array) -> Array:
    """Keeps the logits of these ids [B k] and rules the others out."""
    kept = jnp.take_along_axis(logits, ids, axis=-1)
    return jnp.put_along_axis(jnp.full_like(logits, -jnp.inf), ids, kept, axis=-1, inplace=False)


@transform()
@dataclasses.dataclass(frozen=True)
class Greedy:
    """Keeps the likeliest token (the lowest id of equals); no randomness is left."""

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        return _only(logits, logits.argmax(axis=-1, keepdims=True))


@transform("t")
@dataclasses.dataclass(frozen=True)
class Temperature:
    """Divides the logits, less their largest, by t, which may be one number or one a row; t = 0 is greedy."""

    t: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        t, logits = jnp.asarray(self.t, jnp.float32)[..., None], logits.astype(jnp.float32)
        cold = t < jnp.finfo(jnp.float32).tiny
        # Less their largest: a small t would make several logits inf, and the first of them the winner.
        largest = logits.max(axis=-1, keepdims=True)
        below = logits - jnp.where(jnp.isfinite(largest), largest, 0)
        return jnp.where(cold, greedy(logits), below / jnp.where(cold, 1, t))


@transform(static=("k",))
@dataclasses.dataclass(frozen=True)
class TopK:
    """Keeps the k likeliest tokens, exactly k also among equals (lower ids first); k is static."""

    k: int

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        # To lax.top_k -0.0 is less than 0.0.
        ranked = jnp.where(logits == 0, 0.0, logits)
        return _only(logits, jax.lax.top_k(ranked, min(self.k, logits.shape[-1]))[1])


@transform("p")
@dataclasses.dataclass(frozen=True)
class TopP:
    """Keeps the smallest set of likeliest tokens whose probability reaches p, and at least one."""

    p: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        return _until(logits, jnp.argsort(-logits, axis=-1, stable=True), self.p)


@transform("p")
@dataclasses.dataclass(frozen=True)
class MinP:
    """Keeps the tokens that are at least p times as likely as the likeliest."""

    p: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        p, logits = jnp.asarray(self.p, jnp.float32)[..., None], logits.astype(jnp.float32)
        largest = logits.max(axis=-1, keepdims=True)
        return jnp.where(logits >= largest + jnp.log(p), logits, -jnp.inf)


@transform("p")
@dataclasses.dataclass(frozen=True)
class Typical:
    """Keeps the smallest set of tokens, nearest to the expected surprise first, whose probability reaches p."""

    p: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        surprise = -jax.nn.log_softmax(logits, axis=-1)
        expected = jnp.where(jnp.isinf(surprise), 0, jnp.exp(-surprise) * surprise).sum(axis=-1, keepdims=True)
        return _until(logits, jnp.argsort(jnp.abs(surprise - expected), axis=-1, stable=True), self.p)


def _until(logits: Array, order: Array, p: Any) -> Array:
    """Keeps the first tokens of an order until their probability reaches p, and at least one."""
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    mass = jax.nn.softmax(ranked, axis=-1)
    before, p = jnp.cumsum(mass, axis=-1) - mass, jnp.asarray(p, jnp.float32)[..., None]
    # A rounded sum may reach 1 before the last token, and p = 1 keeps all.
    kept = ((before < p) | (p == 1)).at[..., 0].set(True)
    return jnp.put_along_axis(logits, order, jnp.where(kept, ranked, -jnp.inf), axis=-1, inplace=False)


greedy = Greedy()


def temperature(t: Any) -> Temperature:
    """Makes logits / t; above 1 flatter, below 1 sharper, 0 greedy. An array [B] gives each row its own.

    Raises:
      ValueError: a negative or non-finite t.
    """
    for value in numbers(t):
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
    return TopP(_probability("top_p", p))


def min_p(p: Any) -> MinP:
    """Makes the transform that keeps tokens of at least p times the largest probability; 0 keeps all.

    Raises:
      ValueError: p outside of [0, 1].

    References:
      Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs", section 3.
    """
    return MinP(_probability("min_p", p))


def typical(p: Any) -> Typical:
    """Makes the transform that keeps the locally typical set of probability p; 0 keeps one token, 1 keeps all.

    Raises:
      ValueError: p outside of [0, 1].

    References:
      Meister et al. 2023, "Locally Typical Sampling", section 3, equation 10.
    """
    return Typical(_probability("typical", p))


def _probability(name: str, p: Any) -> Array:
    for value in numbers(p):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is not a probability; it must be from 0 to 1")
    return jnp.asarray(p, jnp.float32)
