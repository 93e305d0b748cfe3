"""The arrangements of embeddings, stacks and head.

    encoder            head(Stack(embed(ids)))                                           (Devlin et al. 2019)
    decoder            head(causal Stack(embed(ids)))                                    (Radford et al. 2018)
    encoder_decoder    head(causal Stack(embed(target_ids), Stack(embed(ids))))          (Vaswani et al. 2017)

A model is a pure function of its parameters: `model.apply({"params": params}, ids)`. An id outside of the vocabulary is
an error; under jit, where ids are not known, it makes what depends on it NaN. Padding and packing are said by positions
(-1: no token here) and segments.
"""

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.blocks import Stack
from jaxformer.cache import Cache
from jaxformer.config import Config
from jaxformer.embeddings import Embeddings, Places, check_ids, places
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.heads import Classifier, LMHead, Pooler
from jaxformer.masks import Mask
from jaxformer.taps import tap


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
          mask: replaces the causal mask; of packed rows it has the segments too. ALiBi and relative positions are
            the mask's, all others are `positions`.
          cache: the tokens so far; the new ones see them and are added.

        Returns:
          logits, or with a cache (logits, cache).

        Raises:
          ValueError: ids that are not token ids, positions beyond a learned table, segments together with a cache, or
            with a mask that has none.
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


Model = Encoder | Decoder | EncoderDecoder

ARCHITECTURES: dict[str, type[Model]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder_decoder": EncoderDecoder,
}


def build(config: Config) -> Model:
    """Makes the model that `config.architecture` names."""
    return ARCHITECTURES[config.architecture](config)
