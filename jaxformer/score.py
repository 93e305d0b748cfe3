"""How likely a model finds a text: the log-probability of each token given those before it.

log p(token_t | tokens before t),     perplexity = exp(- mean over tokens of it)
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.embeddings import Places, check_ids, check_positions, places
from jaxformer.losses import cross_entropy, in_blocks
from jaxformer.models import Decoder
from jaxformer.trees import Leaf

BLOCK = 64
"""Tokens of a row whose logits exist at a time: all of them, [B T V], would be larger than the model."""


@partial(jax.tree_util.register_dataclass, data_fields=["logprobs", "counted"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Score:
    """The log-probabilities of a batch of texts.

    Attributes:
      logprobs: [B T] float32, of each token given those before it, in nats; 0 where it is not counted.
      counted: [B T] whether there is one: not for padding, nor for the first token of a text.
    """

    logprobs: Leaf
    counted: Leaf

    @property
    def perplexities(self) -> Float[Array, " B"]:
        """The perplexity of each row; NaN for a row without a counted token."""
        return jnp.exp(-self.logprobs.sum(axis=1) / self.counted.sum(axis=1))

    @property
    def perplexity(self) -> Float[Array, ""]:
        """The perplexity of all rows together, every token counting alike."""
        return jnp.exp(-self.logprobs.sum() / self.counted.sum())


def score(
    model: Decoder,
    params: Any,
    ids: Int[Array | np.ndarray, "B T"],
    *,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
) -> Score:
    """Returns the log-probability of every token that has one before it; rows and documents do not see each other.

    Args:
      positions, segments: as of a `Decoder`; padding is not counted.

    Raises:
      ValueError: a model that is no decoder, ids outside of the vocabulary, rows of one token, or a text that is longer
        than the model's context (see `score_long`).
    """
    _check_decoder(model)
    ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    check_ids(ids, model.config.vocab_size)
    if not 2 <= ids.shape[1] <= model.config.max_len:
        raise ValueError(
            f"rows are of {ids.shape[1]} tokens; there must be at least 2, of which the first is given, and at most "
            f"max_len={model.config.max_len}; use score_long for a longer text"
        )
    if positions is not None and model.config.positions == "learned":
        check_positions(positions, model.config.max_len)
    return _score(model, params, ids, positions, segments)


def score_long(
    model: Decoder,
    params: Any,
    ids: Int[Array | np.ndarray, " T"],
    *,
    stride: int,
    window: int | None = None,
    batch_size: int = 1,
) -> Score:
    """Scores one text of any length in windows that overlap; each token but the first is scored once.

    Args:
      stride: tokens by which a window is moved, and which it scores; the others are context, so that each token has at
        least `window - stride` tokens before it, as far as there are any.
      window: tokens of a window; None: the config's max_len.
      batch_size: windows that are run together.

    Returns:
      The score of a batch of this one row.

    Raises:
      ValueError: a model that is no decoder, fewer than 2 ids or one outside of the vocabulary, a window beyond
        max_len, or a stride that leaves no context.
    """
    _check_decoder(model)
    window = model.config.max_len if window is None else window
    if not 2 <= window <= model.config.max_len or not 1 <= stride < window or batch_size < 1:
        raise ValueError(
            f"window={window}, stride={stride} and batch_size={batch_size} must be 2 <= window <= max_len="
            f"{model.config.max_len}, 1 <= stride < window and batch_size >= 1"
        )
    text = np.asarray(ids)
    check_ids(text[None], model.config.vocab_size)
    if text.size < 2:
        raise ValueError("there must be at least 2 tokens, of which the first is given")
    starts = np.arange(1 + max(0, -(-(text.size - window) // stride))) * stride
    starts = np.concatenate([starts, np.full(-len(starts) % batch_size, text.size)])  # whole batches
    out = np.zeros((1, text.size), np.float32)
    for batch in starts.reshape(-1, batch_size):
        at = batch[:, None] + np.arange(window)
        positions = np.where(at < text.size, np.arange(window), -1).astype(np.int32)
        found = _score(model, params, text[np.minimum(at, text.size - 1)].astype(np.int32), positions, None)
        new = (positions > 0) & ((at >= batch[:, None] + window - stride) | (batch[:, None] == 0))
        out[0, at[new]] = np.asarray(found.logprobs)[new]
    return Score(jnp.asarray(out), jnp.arange(text.size)[None] > 0)


def _check_decoder(model: Any) -> None:
    if not isinstance(model, Decoder):
        raise ValueError(f"{type(model).__name__} gives no token a probability from those before it; score a Decoder")


@partial(jax.jit, static_argnames="model")
def _score(model: Decoder, params: Any, ids: Array, positions: Array | None, segments: Array | None) -> Score:
    apply: Callable[..., Any] = partial(model.apply, {"params": params})
    x, _ = apply(ids, positions, segments, method="hidden")
    before, counted = _before(places(ids, positions, segments), ids.shape)
    x = jnp.take_along_axis(x, before[..., None], axis=1)
    logprobs = in_blocks(lambda x, ids: -cross_entropy(apply(x, method="unembed"), ids), BLOCK, x, ids)
    return Score(jnp.where(counted, logprobs, 0.0), counted)


def _before(at: Places, shape: tuple[int, ...]) -> tuple[Int[Array, "B T"], Array]:
    """Returns the column of the token before each one, padding aside, and whether there is one in its document."""
    real, index = jnp.broadcast_to(at.positions >= 0, shape), jnp.arange(shape[1])
    latest = jax.lax.cummax(jnp.where(real, index, -1), axis=1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    counted = real & (before >= 0)
    before = jnp.maximum(before, 0)
    if at.segments is not None:
        counted &= jnp.take_along_axis(at.segments, before, axis=1) == at.segments
    return before, counted
