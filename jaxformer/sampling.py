"""From logits to the next token: transforms of logits, their composition, and one draw.

    token ~ softmax(transform(logits, history))

A transform maps logits [B V] to float32 logits in which ruled-out tokens are -inf. `chain(a, b)` applies a, then b, so
`chain(temperature(0.8), top_k(40), top_p(0.95))` cuts after tempering; the order is the caller's. Transforms are
pytrees: numbers such as the temperature are leaves, and changing them recompiles nothing. Any function of logits is a
transform, and so is `with_history(function)` of logits and `History`. Where transforms leave no token of a row, the row
becomes NaN, and so does the log-probability of what is drawn from it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxformer.history import History
from jaxformer.penalties import (
    allowed,
    frequency_penalty,
    min_new_tokens,
    no_repeat_ngram,
    presence_penalty,
    repetition_penalty,
)
from jaxformer.transforms import Greedy, Transform, greedy, min_p, temperature, top_k, top_p, transform, typical

__all__ = [
    "Chain",
    "Greedy",
    "History",
    "Transform",
    "allowed",
    "as_pytree",
    "chain",
    "frequency_penalty",
    "greedy",
    "min_new_tokens",
    "min_p",
    "needs_key",
    "no_repeat_ngram",
    "presence_penalty",
    "repetition_penalty",
    "sample",
    "temperature",
    "top_k",
    "top_p",
    "typical",
    "with_history",
]


@transform("transforms")
@dataclasses.dataclass(frozen=True)
class Chain:
    """Applies transforms in the order given."""

    transforms: tuple[Any, ...]

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        for each in self.transforms:
            logits = each(logits, history)
        return logits


@transform("function")
@dataclasses.dataclass(frozen=True)
class _OfLogits:
    """A function of logits alone."""

    function: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        return self.function(logits)


def chain(*transforms: Transform) -> Chain:
    """Makes the transform that applies these in order; a plain function becomes part of the compiled program."""
    return Chain(tuple(as_pytree(each) for each in transforms))


def with_history(function: Transform) -> jax.tree_util.Partial:
    """Makes a transform of a function of logits [B V] and `History`; it becomes part of the compiled program."""
    return jax.tree_util.Partial(function)


def as_pytree(transform: Transform) -> Any:
    """Returns a transform of logits and history that can be an argument of a jitted function."""
    if dataclasses.is_dataclass(transform) or isinstance(transform, jax.tree_util.Partial):
        return transform
    return _OfLogits(jax.tree_util.Partial(transform))


def needs_key(transform: Any) -> bool:
    """Whether anything is left to chance: not after `greedy`, wherever in a chain it stands."""
    if isinstance(transform, Chain):
        return all(needs_key(each) for each in transform.transforms)
    return not isinstance(transform, Greedy)


def sample(
    key: Key[Array, ""], logits: Float[Array, "B V"], transform: Transform = greedy, history: History | None = None
) -> Int[Array, " B"]:
    """Draws one token a row. A row's draw depends on the key, its number and its logits, not on the other rows."""
    return draw(key, as_pytree(transform)(logits, history))


def draw(key: Key[Array, ""], logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Draws one token a row from the softmax of transformed logits; token 0 where they are NaN."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, logits.astype(jnp.float32)).astype(jnp.int32)
