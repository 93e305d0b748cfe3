"""The arrangements of embeddings, stacks and head.

    encoder            head(Stack(embed(ids)))                                           (Devlin et al. 2019)
    decoder            head(causal Stack(embed(ids)))                                    (Radford et al. 2018)
    encoder_decoder    head(causal Stack(embed(target_ids), Stack(embed(ids))))          (Vaswani et al. 2017)

A model is a pure function of its parameters: `model.apply({"params": params}, ids)`. An id outside of the vocabulary is
an error; under jit, where ids are not known, it makes what depends on it NaN. Padding and packing are said by positions
(-1: no token here) and segments.
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
from jaxformer.embeddings import Embeddings, check_ids
from jaxformer.heads import Classifier, LMHead, Pooler
from jaxformer.masks import Mask, documents, positions_from_segments
from jaxformer.taps import tap
from jaxformer.trees import Leaf


class Places(NamedTuple):
    """Where the tokens of a text stand.

    Attributes:
      ordered: positions count up one by one within each document.
    """

    positions: Array
    segments: Array | None
    ordered: bool


def places(ids: Array, positions: Array | None, segments: Array | None, cache: Cache | None = None) -> Places:
    """Fills in the positions of a text: along the row, within each run of one segment number, or on from the cache.

    Raises:
      ValueError: segments together with a cache.
    """
    if segments is not None and cache is not None:
        raise ValueError("a cache holds one document a row; decode packed segments as rows of their own")
    if positions is not None:
        return Places(positions, segments, ordered=False)
    if segments is not None:
        segments = documents(segments)
        return Places(positions_from_segments(segments), segments, ordered=True)
    start = 0 if cache is None else cache.length
    return Places(start + jnp.arange(ids.shape[1])[None], None, ordered=True)


class Encoder(nn.Module):
    """A two-sided model of a text (BERT), with the head that the config names."""

    config: Config

    def setup(self) -> None:
        config = self.config
        self.embed = Embeddings(config, config.vocab_size)
        self.encoder = Stack(config, causal=False)
        if config.head in ("lm", "masked_lm"):
            self.lm_head = LMHead(config, config.vocab_size)
        elif config.head == "pooler":
            self.pooler = Pooler(config)
        elif config.head != "none":
            self.classifier = Classifier(config)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        mask: Mask | None = None,
        token_types: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B ..."]:
        """Returns what the head makes of the hidden states.

        Args:
          positions, segments, mask: as of a `Decoder`; the mask is two-sided.
          token_types: which part of the text a token belongs to; None: all 0.

        Returns:
          Logits [B T V] of lm and masked_lm, a vector [B D] of pooler, logits [B Y] of classifier and [B T Y] of
          token_classifier, hidden states [B T D] without a head.
        """
        check_ids(ids, self.config.vocab_size)
        at = places(ids, positions, segments)
        x = self._stack(ids, at, mask, token_types)
        if self.config.head in ("lm", "masked_lm"):
            return self.lm_head(x, self.embed)
        if self.config.head == "none":
            return x
        return (self.pooler if self.config.head == "pooler" else self.classifier)(x, at.positions)

    def hidden(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "#B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        mask: Mask | None = None,
        token_types: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the final hidden states, whatever the head."""
        check_ids(ids, self.config.vocab_size)
        return self._stack(ids, places(ids, positions, segments), mask, token_types)

    def _stack(self, ids: Array, at: Places, mask: Mask | None, token_types: Array | None) -> Array:
        x = tap(self, "x", self.embed(ids, at.positions, token_types))
        return self.encoder(x, at.positions, at.segments, mask, ordered=at.ordered)[0]


class Decoder(nn.Module):
    """A decoder-only language model (GPT, LLaMA)."""

    config: Config

    def setup(self) -> None:
        config = self.config
        self.embed = Embeddings(config, config.vocab_size)
        self.decoder = Stack(config, causal=True)
        self.lm_head = LMHead(config, config.vocab_size)

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
        at = places(ids, positions, segments, cache)
        x = tap(self, "x", self.embed(ids, at.positions))
        return self.decoder(x, at.positions, at.segments, mask, cache, ordered=at.ordered)

    def unembed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the float32 logits of final hidden states."""
        return self.lm_head(x, self.embed)


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


Model = Encoder | Decoder | EncoderDecoder

ARCHITECTURES: dict[str, type[Model]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder_decoder": EncoderDecoder,
}


def build(config: Config) -> Model:
    """Makes the model that `config.architecture` names."""
    return ARCHITECTURES[config.architecture](config)
