"""Attention with its projections, the block around it, and the stack of blocks.

    pre:   x + f(norm(x))      (Radford et al. 2019; Xiong et al. 2020)
    post:  norm(x + f(x))      (Vaswani et al. 2017)

for f = attention, then f = feed-forward. One `Stack` serves every arrangement of encoder and decoder.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.attention import attention, cached_attention, check_cached
from jaxformer.cache import KV, Cache, LayerView, append_positions, store
from jaxformer.config import Config
from jaxformer.layers import MLP, Projection, make_norm
from jaxformer.masks import Mask
from jaxformer.positions import ROTATE
from jaxformer.sharding import constrain
from jaxformer.taps import COLLECTIONS, tap, tapped

Sublayer = Callable[[Array], Array]

RESIDUAL: dict[str, Callable[[Array, Sublayer, Sublayer], Array]] = {
    "pre": lambda x, norm, f: x + f(norm(x)),
    "post": lambda x, norm, f: norm(x + f(x)),
}
"""How a sublayer f and its norm join the residual stream x."""


class Attention(nn.Module):
    """Multi-head attention in two calls, so that caching stays outside of it; taps q, k, v, pattern, z."""

    config: Config

    def setup(self) -> None:
        config = self.config
        project = partial(Projection, config, bias=config.bias)
        self.q_proj = project("BTD,DNH->BTNH")
        self.k_proj = project("BTD,DKH->BTKH")
        self.v_proj = project("BTD,DKH->BTKH")
        self.o_proj = project("BTNH,NHD->BTD", gain=1 / (2 * config.num_layers))

    def keys_values(self, x: Float[Array, "B S D"], positions: Int[Array, "#B S"]) -> KV:
        """Projects tokens to keys (turned by their positions) and values, both [B S K H]."""
        return KV(tap(self, "k", self._rotate(self.k_proj(x), positions)), tap(self, "v", self.v_proj(x)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kv: KV | LayerView,
        mask: Mask,
        bias: Float[Array, "#B N T S"] | None = None,
        *,
        positions: Int[Array, "#B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Attends from x to keys and values, fresh ones or those of a cache.

        Args:
          positions: by which queries are turned; None: the mask's query positions.
        """
        config = self.config
        q = tap(self, "q", self._rotate(self.q_proj(x), mask.q_positions if positions is None else positions))
        if isinstance(kv, LayerView):
            check_cached(config.attention)
            if self.has_variable("edits", "pattern"):
                raise ValueError("attention over a cache has no pattern to edit; run the whole text without a cache")
            z = cached_attention(q, kv, mask, bias, scale=config.scale)
        else:
            pattern_fn = partial(tap, self, "pattern") if tapped(self, "pattern") else None
            z = attention(
                q, kv.k, kv.v, mask, bias, scale=config.scale, pattern_fn=pattern_fn, implementation=config.attention
            )
        return self.o_proj(tap(self, "z", z))

    def _rotate(self, x: Array, positions: Array) -> Array:
        if self.config.positions not in ROTATE:
            return x
        return ROTATE[self.config.positions](x, positions, base=self.config.rotary_base)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each joined to the residual stream as `config.residual` says.

    Takes and returns (x, cache), as `nn.scan` wants its carry; taps `x`, the residual stream after the block.
    """

    config: Config

    @nn.compact
    def __call__(
        self, carry: tuple[Array, Cache | None], layer: Int[Array, ""] | int, positions: Int[Array, "#B T"], mask: Mask
    ) -> tuple[tuple[Array, Cache | None], None]:
        config = self.config
        x, cache = carry
        attn, mlp = Attention(config, name="attn"), MLP(config, name="mlp")
        dropout = nn.Dropout(config.dropout, deterministic=not self.has_rng("dropout"))

        def attend(h: Array) -> Array:
            nonlocal cache
            fresh: KV = attn.keys_values(h, positions)
            if cache is None:
                return dropout(attn(h, fresh, mask, positions=positions))
            cache, view = store(cache, layer, fresh)
            return dropout(attn(h, view, mask, positions=positions))

        join = RESIDUAL[config.residual]
        x = join(x, make_norm(config, "attn_norm"), attend)
        x = join(x, make_norm(config, "mlp_norm"), lambda h: dropout(mlp(h)))
        return (constrain(tap(self, "x", x), "BTD"), cache), None


class Stack(nn.Module):
    """The layers of an encoder or decoder, in a Python loop (`layers_{i}`) or one scan (`layers`), and the final norm.

    Attributes:
      causal: whether a token sees only itself and the tokens before it.
    """

    config: Config
    causal: bool

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "#B T"],
        segments: Int[Array, "B T"] | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Runs every layer; with a cache, its new tokens attend to what it holds and are added to it."""
        config, L = self.config, self.config.num_layers
        if cache is not None:
            cache = append_positions(cache, jnp.broadcast_to(positions, x.shape[:2]))
        if mask is None:
            kv_positions = positions if cache is None else cache.positions
            mask = Mask(positions, kv_positions, segments, segments, causal=self.causal)
        carry = (constrain(x, "BTD"), cache)
        if config.scan_layers:
            layers = nn.scan(
                Block,
                variable_axes={"params": 0, **COLLECTIONS},
                split_rngs={"params": True, "dropout": True},
                in_axes=(0, nn.broadcast, nn.broadcast),
                length=L,
            )
            carry, _ = layers(config, name="layers")(carry, jnp.arange(L), positions, mask)
        else:
            for i in range(L):
                carry, _ = Block(config, name=f"layers_{i}")(carry, i, positions, mask)
        x, cache = carry
        return (make_norm(config, "final_norm")(x) if config.residual == "pre" else x), cache
