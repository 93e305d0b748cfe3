"""The encoder-decoder: a stack that reads a source, and a causal one that attends to it.

logits = head(causal Stack(embed(target_ids), Stack(embed(ids))))          (Vaswani et al. 2017, figure 1)
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.blocks import Source, Stack
from jaxformer.cache import Cache
from jaxformer.config import Config
from jaxformer.embeddings import Embeddings, Places, check_ids, places
from jaxformer.heads import LMHead
from jaxformer.masks import Mask
from jaxformer.taps import tap
from jaxformer.trees import Leaf


class Memory(NamedTuple):
    """What an encoder made of the source: hidden states [B S D], and positions and segments of its tokens [B S]."""

    x: Leaf
    positions: Leaf
    segments: Leaf = None


class EncoderDecoder(nn.Module):
    """A model of a target text given a source text (the original Transformer, T5, BART).

    The stacks share one table of tokens unless the config has a `target_vocab_size`.
    """

    config: Config

    def setup(self) -> None:
        config = self.config
        self.embed = Embeddings(config, config.vocab_size)
        self.encoder = Stack(config, causal=False)
        self.target_embed = Embeddings(config, config.target_vocab_size or config.vocab_size)
        self.decoder = Stack(config.of_decoder, causal=True)
        self.lm_head = LMHead(config, config.target_vocab_size or config.vocab_size)

    def __call__(
        self,
        ids: Int[Array, "B S"],
        target_ids: Int[Array, "B T"],
        positions: Int[Array, "#B S"] | None = None,
        target_positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "B S"] | None = None,
        target_segments: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Returns the float32 logits of the next target token after each target token.

        Args:
          positions, target_positions: as of a `Decoder`, of either text.
          segments, target_segments: of packed rows; a target sees the source of its own number.
        """
        memory = self.encode(ids, positions, segments)
        return self._logits(target_ids, places(target_ids, target_positions, target_segments), memory, None)[0]

    def encode(
        self,
        ids: Int[Array, "B S"],
        positions: Int[Array, "#B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> Memory:
        """Returns what `decode` attends to."""
        check_ids(ids, self.config.vocab_size)
        at = places(ids, positions, segments)
        x = tap(self, "x", self.embed(ids, at.positions))
        x, _ = self.encoder(x, at.positions, at.segments, ordered=at.ordered)
        return Memory(x, jnp.broadcast_to(at.positions, ids.shape), at.segments)

    def decode(
        self,
        target_ids: Int[Array, "B T"],
        memory: Memory | None = None,
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], Cache]:
        """Returns logits, or with a cache (logits, cache).

        Args:
          memory: of the source. Its keys and values stay in the cache, so that calls after the first do without.
          cache: made with `source_len`.

        Raises:
          ValueError: no memory where the cache holds none, segments on one side only, or a cache for another source.
        """
        logits, cache = self._logits(target_ids, places(target_ids, positions, segments, cache), memory, cache)
        return logits if cache is None else (logits, cache)

    def _logits(self, ids: Array, at: Places, memory: Memory | None, cache: Cache | None) -> tuple[Array, Cache | None]:
        config = self.config
        is_shared = config.target_vocab_size is None
        check_ids(ids, config.target_vocab_size or config.vocab_size)
        source, cache = _source(at, memory, cache)
        x = tap(self, "target_x", self.target_embed(ids, at.positions, token=self.embed.token if is_shared else None))
        x, cache = self.decoder(x, at.positions, at.segments, None, cache, source=source, ordered=at.ordered)
        return self.lm_head(x, self.embed if is_shared else self.target_embed), cache


def _source(at: Places, memory: Memory | None, cache: Cache | None) -> tuple[Source, Cache | None]:
    """Returns what the decoder attends to in the source, and the cache that knows where its tokens stand."""
    if memory is None:
        if cache is None or not _may_hold_source(cache):
            raise ValueError("there is no source to attend to; pass the memory that encode returns")
        return Source(None, Mask(at.positions, cache.source_positions)), cache
    if (memory.segments is None) != (at.segments is None):
        raise ValueError("source and target are packed together or not at all; give segments of both or of neither")
    if cache is not None:
        if cache.source_positions is None or cache.source_positions.shape != memory.positions.shape:
            held = None if cache.source_positions is None else cache.source_positions.shape
            raise ValueError(
                f"the cache has room for a source of {held}, and this one is {memory.positions.shape}; make it with "
                f"init_cache(..., source_len={memory.positions.shape[1]})"
            )
        cache = dataclasses.replace(cache, source_positions=memory.positions.astype(jnp.int32))
    return Source(memory.x, Mask(at.positions, memory.positions, at.segments, memory.segments)), cache


def _may_hold_source(cache: Cache) -> bool:
    known = cache.source_positions
    return known is not None and (isinstance(known, jax.core.Tracer) or bool((np.asarray(known) >= 0).any()))
