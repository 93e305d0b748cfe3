"""The arrangements of embeddings, stack and head: a decoder-only language model.

    logits = head(Stack(embed(ids) + positions))

A model is a pure function of its parameters: `model.apply({"params": params}, ids)`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.attention import softcapped
from jaxformer.blocks import Stack
from jaxformer.cache import Cache
from jaxformer.config import Config
from jaxformer.layers import Bias, Embed, Projection, make_norm
from jaxformer.masks import Mask, documents, positions_from_segments
from jaxformer.positions import ADD
from jaxformer.taps import tap


def check_ids(ids: Any, vocab_size: int) -> None:
    """Refuses what is not a batch of token ids; values are checked where they are known, which is outside of jit.

    Raises:
      ValueError: not integers, not [B T], no tokens, or an id outside of [0, vocab_size).
    """
    if not hasattr(ids, "dtype"):
        raise ValueError(f"ids are a {type(ids).__name__}; pass an integer array [batch, tokens]")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"ids have type {ids.dtype}; token ids must be integers")
    if ids.ndim != 2 or 0 in ids.shape:
        raise ValueError(f"ids have shape {tuple(ids.shape)}; they must be [batch, tokens] with at least one of each")
    if isinstance(ids, jax.core.Tracer):
        return
    values = np.asarray(ids)
    bad = values[(values < 0) | (values >= vocab_size)]
    if bad.size:
        raise ValueError(
            f"token id {bad[0]} is outside of the vocabulary of {vocab_size}; ids are 0 to {vocab_size - 1}"
        )


def check_positions(positions: Any, max_len: int) -> None:
    """Refuses positions beyond a learned table; under jit, where they are not known, they give NaN logits.

    Raises:
      ValueError: a position of max_len or above.
    """
    if isinstance(positions, jax.core.Tracer):
        return
    last = int(np.asarray(positions).max())  # in NumPy: under jit the maximum of known positions would be traced
    if last >= max_len:
        raise ValueError(
            f"position {last} is beyond the learned table of max_len={max_len}; "
            "shorten the text or choose a position scheme without a table"
        )


class Decoder(nn.Module):
    """A decoder-only language model (GPT, LLaMA).

    An id outside of the vocabulary is an error; under jit, where ids are not known, it makes all logits of its row NaN.
    """

    config: Config

    def setup(self) -> None:
        config = self.config
        self.embed = Embed(config, rows=config.vocab_size)
        if config.positions == "learned":
            self.position_embed = Embed(config, rows=config.max_len)
        self.decoder = Stack(config, causal=True)
        if not config.tie_embeddings:
            self.lm_head = Projection(config, "BTD,DV->BTV", bias=False, out_dtype="float32")
        if config.head_bias:
            self.head_bias = Bias(config)
        if config.embed_norm:
            self.embed_norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], Cache]:
        """Returns the float32 logits of the next token after each token.

        Args:
          positions: of each token in its text; -1 is padding. None: 0, 1, ... along the row, or within each segment, or
            on from the cache's length.
          segments: document number of each token of packed rows, 0 for padding. Documents do not see each other;
            without `positions`, each run of one number is a document.
          mask: replaces the causal mask.
          cache: the tokens so far; the new ones see them and are added.

        Returns:
          logits, or with a cache (logits, cache).

        Raises:
          ValueError: ids that are not token ids, positions beyond a learned table, segments together with a cache.
        """
        x, new_cache = self.hidden(ids, positions, segments, mask, cache)
        logits = self.unembed(x)
        return logits if new_cache is None else (logits, new_cache)

    def hidden(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Returns what `unembed` turns into logits, and the cache; for callers that want the logits of few tokens."""
        check_ids(ids, self.config.vocab_size)
        if segments is not None and cache is not None:
            raise ValueError("a cache holds one document a row; decode packed segments as rows of their own")
        ordered = positions is None
        if positions is None and segments is not None:
            segments = documents(segments)
            positions = positions_from_segments(segments)
        elif positions is None:
            positions = (0 if cache is None else cache.length) + jnp.arange(ids.shape[1])[None]
        return self.decoder(self._embed(ids, positions), positions, segments, mask, cache, ordered=ordered)

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the float32 logits of final hidden states."""
        config = self.config
        logits = self.embed.attend(x) if config.tie_embeddings else self.lm_head(x)
        if config.logit_scale is not None:
            logits = logits * config.logit_scale
        if config.head_bias:
            logits = self.head_bias(logits)
        return softcapped(logits, config.logit_softcap)

    def _embed(self, ids: Array, positions: Array) -> Array:
        config = self.config
        x = self.embed(ids)
        if config.embed_scale:
            x = x * jnp.asarray(np.sqrt(config.d_model), x.dtype)
        if config.positions == "learned":
            check_positions(positions, config.max_len)
            x = x + self.position_embed(jnp.maximum(positions, 0))
        elif config.positions in ADD:
            x = x + ADD[config.positions](positions, config.d_model).astype(x.dtype)
        if config.embed_norm:
            x = self.embed_norm(x)
        return tap(self, "x", self.dropout(x, deterministic=not self.has_rng("dropout")))


ARCHITECTURES: dict[str, type[Decoder]] = {"decoder": Decoder}


def build(config: Config) -> Decoder:
    """Makes the model that `config.architecture` names."""
    return ARCHITECTURES[config.architecture](config)
