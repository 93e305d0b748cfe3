"""Transforms of logits that look at the text so far.

    repetition    logit / r if positive, logit * r if negative, of every token in prompt and new text
    presence      logit - p of every token in the new text;   frequency: logit - p * (how often it stands there)

Where one of them rules out every token of a row, the row becomes NaN: a token must not be drawn from nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.history import History
from jaxformer.transforms import numbers, transform


def _without(logits: Array, banned: Array) -> Array:
    """Rules tokens out; a row of which none is left is NaN."""
    left = jnp.where(banned, -jnp.inf, logits)
    return jnp.where((left == -jnp.inf).all(axis=-1, keepdims=True), jnp.nan, left)


def _text(history: History | None) -> History:
    if history is None:
        raise ValueError(
            "this transform reads the text so far; pass sampling.History.of_prompt(ids, positions, length)"
        )
    return history


@transform("penalty")
@dataclasses.dataclass(frozen=True)
class RepetitionPenalty:
    """Makes every token of the text so far less likely."""

    penalty: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        seen = _text(history).counts(logits.shape[-1]) > 0
        return jnp.where(seen, jnp.where(logits > 0, logits / self.penalty, logits * self.penalty), logits)


@transform("presence", "frequency")
@dataclasses.dataclass(frozen=True)
class CountPenalty:
    """Takes a number off the logits of new tokens, and another for each time they were taken."""

    presence: Any
    frequency: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        counts = _text(history).counts(logits.shape[-1], new_only=True)
        return logits.astype(jnp.float32) - self.presence * (counts > 0) - self.frequency * counts


@transform(static=("n",))
@dataclasses.dataclass(frozen=True)
class NoRepeatNgram:
    """Rules out each token that would make a run of n tokens that stands in the text already."""

    n: int

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        history, logits, n = _text(history), logits.astype(jnp.float32), self.n
        ids, lengths = history.ids, history.lengths[:, None]
        last = ids.shape[1] - (n - 1)
        if last < 1:
            return logits
        rows, start = jnp.arange(ids.shape[0])[:, None], jnp.arange(last)
        repeats = start + n - 1 < lengths
        for j in range(n - 1):
            newest = jnp.take_along_axis(ids, jnp.maximum(lengths - (n - 1) + j, 0), axis=1)
            repeats &= ids[:, j : j + last] == newest
        banned = jnp.zeros(logits.shape, bool)
        followers = jnp.where(repeats, ids[:, n - 1 :], logits.shape[-1])
        return _without(logits, banned.at[rows, followers].set(True, mode="drop"))


@transform("n", "eos_ids")
@dataclasses.dataclass(frozen=True)
class MinNewTokens:
    """Rules out the end until there are n new tokens."""

    n: Any
    eos_ids: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        history = _text(history)
        early = history.lengths - history.prompt_lengths < self.n
        ends = jnp.zeros(logits.shape[-1], bool).at[self.eos_ids].set(True, mode="drop")
        return _without(logits.astype(jnp.float32), early[:, None] & ends)


@transform("function")
@dataclasses.dataclass(frozen=True)
class Allowed:
    """Rules out all tokens but those that a function of the text allows."""

    function: Any

    def __call__(self, logits: Float[Array, "B V"], history: History | None = None) -> Float[Array, "B V"]:
        return _without(logits.astype(jnp.float32), ~self.function(_text(history)))


def repetition_penalty(penalty: Any) -> RepetitionPenalty:
    """Makes tokens of prompt and new text less likely (above 1) or more (below 1).

    Raises:
      ValueError: a penalty that is not positive and finite.

    References:
      Keskar et al. 2019, "CTRL", section 4.1.
    """
    for value in numbers(penalty):
        if not 0 < value < math.inf:
            raise ValueError(f"repetition_penalty={value} must be a positive finite number; 1 changes nothing")
    return RepetitionPenalty(_of_rows(penalty))


def presence_penalty(penalty: Any) -> CountPenalty:
    """Takes a number off the logit of every token that was generated; the prompt does not count.

    Raises:
      ValueError: a penalty that is not finite.
    """
    return CountPenalty(_finite("presence_penalty", penalty), jnp.zeros(()))


def frequency_penalty(penalty: Any) -> CountPenalty:
    """Takes a number off the logit of a token for each time it was generated; the prompt does not count.

    Raises:
      ValueError: a penalty that is not finite.
    """
    return CountPenalty(jnp.zeros(()), _finite("frequency_penalty", penalty))


def no_repeat_ngram(n: int) -> NoRepeatNgram:
    """Rules out what would repeat a run of n tokens of prompt and new text; n = 1 takes no token twice.

    Raises:
      ValueError: n below 1.

    References:
      Paulus et al. 2018, "A Deep Reinforced Model for Abstractive Summarization", section 2.5.
    """
    if n < 1:
        raise ValueError(f"no_repeat_ngram={n} is no length of a run; it must be at least 1")
    return NoRepeatNgram(n)


def min_new_tokens(n: int, eos_ids: int | Sequence[int]) -> MinNewTokens:
    """Rules out the end tokens until n tokens are generated.

    Raises:
      ValueError: a negative n, no end token, or a negative one.
    """
    ids = np.ravel(eos_ids)
    if n < 0 or not ids.size or ids.min() < 0:
        raise ValueError(f"min_new_tokens({n}, {eos_ids}) needs a number from 0 on, and the ids of the end tokens")
    return MinNewTokens(jnp.asarray(n, jnp.int32), jnp.asarray(ids, jnp.int32))


def allowed(function: Callable[[History], Bool[Array, "#B V"]]) -> Allowed:
    """Keeps the tokens that a function of the text so far allows: what a grammar needs.

    Args:
      function: from `History` to booleans [B V] or [V], True for tokens that may come next. What a grammar must
        remember follows from the text: with brackets as tokens 0 and 1, `opened = counts[:, 0] - counts[:, 1]`.
    """
    return Allowed(function if isinstance(function, jax.tree_util.Partial) else jax.tree_util.Partial(function))


def _finite(name: str, penalty: Any) -> Array:
    for value in numbers(penalty):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number; 0 changes nothing")
    return _of_rows(penalty)


def _of_rows(penalty: Any) -> Array:
    """Returns one number for all rows, or one a row as a column."""
    return jnp.asarray(penalty, jnp.float32)[..., None]
