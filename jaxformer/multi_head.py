"""Multi-head attention: the projections around `attention.attention`.

o_proj(concat_n attention(q_proj_n(x), k_proj_n(y), v_proj_n(y)))          (Vaswani et al. 2017, section 3.2.2)
"""

from functools import partial
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.attention import Bias, Dropout, attention, cached_attention, check_cached
from jaxformer.cache import LayerView
from jaxformer.config import Config
from jaxformer.layers import Projection, make_norm
from jaxformer.masks import Mask
from jaxformer.positions import ROTATE, Frequencies, frequencies
from jaxformer.storage import KV
from jaxformer.taps import tap, tapped


class Attention(nn.Module):
    """Multi-head attention in two calls, so that caching stays outside of it; taps q, k, v, pattern, z."""

    config: Config

    def setup(self) -> None:
        config = self.config
        project = partial(Projection, config, bias=config.bias if config.qkv_bias is None else config.qkv_bias)
        self.q_proj = project("BTD,DNH->BTNH")
        self.k_proj = project("BTD,DKH->BTKH")
        self.v_proj = project("BTD,DKH->BTKH")
        self.o_proj = Projection(config, "BTNH,NHD->BTD", bias=config.bias, gain=1 / (2 * config.num_layers))
        if config.qk_norm:
            self.q_norm, self.k_norm = (make_norm(config) for _ in "qk")

    def keys_values(
        self, x: Float[Array, "B S D"], positions: Int[Array, "#B S"], turns: Frequencies | None = None
    ) -> KV:
        """Projects tokens to keys (turned by their positions) and values, both [B S K H].

        Args:
          turns: rotary frequencies; None: those of the config's first layer.
        """
        k = self.k_proj(x)
        if self.config.qk_norm:
            k = self.k_norm(k)
        return KV(tap(self, "k", self._rotate(k, positions, turns)), tap(self, "v", self.v_proj(x)))

    def attend(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        bias: Bias = None,
        *,
        source: Float[Array, "B S D"] | None = None,
        positions: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attends from x to x itself, or to a source: both calls in one, for use outside of a `Block`.

        Args:
          mask, bias, positions: as of a call; keys are turned by the mask's key positions where there is a source.
        """
        tokens = x if source is None else source
        at = mask.kv_positions if source is not None or positions is None else positions
        return self(x, self.keys_values(tokens, at), mask, bias, positions=positions)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kv: KV | LayerView,
        mask: Mask,
        bias: Bias = None,
        *,
        positions: Int[Array, "#B T"] | None = None,
        turns: Frequencies | None = None,
    ) -> Float[Array, "B T D"]:
        """Attends from x to keys and values, fresh ones or those of a cache, which has no pattern to read.

        Args:
          bias: added to the scores, an array or a function of positions (see `attention.attention`).
          positions: by which queries are turned; None: the mask's query positions.
          turns: rotary frequencies; None: those of the config's first layer.

        Raises:
          ValueError: dropout, or an edit of the pattern, over a cache.
        """
        config = self.config
        q = self.q_proj(x)
        if config.qk_norm:
            q = self.q_norm(q)
        q = tap(self, "q", self._rotate(q, mask.q_positions if positions is None else positions, turns))
        options: dict[str, Any] = {"scale": config.scale, "softcap": config.softcap}
        dropout: Dropout | None = None
        if config.attention_dropout and self.has_rng("dropout"):
            dropout = Dropout(self.make_rng("dropout"), config.attention_dropout)
        if isinstance(kv, LayerView):
            check_cached(config.attention)
            if dropout is not None or self.has_variable("edits", "pattern"):
                raise ValueError(
                    "attention over a cache has no pattern to edit or to drop; run the whole text without a cache"
                )
            z = cached_attention(q, kv, mask, bias, **options)
        else:
            pattern_fn = partial(tap, self, "pattern") if tapped(self, "pattern") else None
            options |= {"pattern_fn": pattern_fn, "dropout": dropout, "implementation": config.attention}
            z = attention(q, kv.k, kv.v, mask, bias, **options)
        return self.o_proj(tap(self, "z", z))

    def _rotate(self, x: Array, positions: Array, turns: Frequencies | None) -> Array:
        config = self.config
        if config.positions not in ROTATE:
            return x
        if turns is None:
            turns = frequencies(config.rotaries[0], config.sizes["H"])
        return ROTATE[config.positions](x, positions, turns)
