"""The block of attention and feed-forward layer, and the stack of blocks.

    pre:       x + f(norm(x))                                            (Radford et al. 2019; Xiong et al. 2020)
    post:      norm(x + f(x))                                            (Vaswani et al. 2017)
    sandwich:  x + norm'(f(norm(x)))                                     (Ding et al. 2021; Gemma Team 2024)
    parallel:  x + attention(norm(x)) + feed-forward(norm'(x))           (Black et al. 2022)

for f = attention, then f = feed-forward. One `Stack` serves every arrangement of encoder and decoder.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.biases import BIAS
from jaxformer.cache import Cache, append_positions, key_positions, store, store_source
from jaxformer.config import Config
from jaxformer.layers import MLP, make_norm
from jaxformer.masks import FAR, Mask
from jaxformer.multi_head import Attention
from jaxformer.positions import ROTATE, Frequencies, frequencies
from jaxformer.sharding import constrain
from jaxformer.storage import KV
from jaxformer.taps import COLLECTIONS, tap
from jaxformer.trees import Leaf

Sublayers = Mapping[str, Callable[[Array], Array]]
"""Name -> function, in the order in which they follow each other; the norm before `attn` is `attn_norm`."""
MakeNorm = Callable[[str], Callable[[Array], Array]]


def _pre(x: Array, sublayers: Sublayers, norm: MakeNorm) -> Array:
    for name, f in sublayers.items():
        x = x + f(norm(f"{name}_norm")(x))
    return x


def _post(x: Array, sublayers: Sublayers, norm: MakeNorm) -> Array:
    for name, f in sublayers.items():
        x = norm(f"{name}_norm")(x + f(x))
    return x


def _sandwich(x: Array, sublayers: Sublayers, norm: MakeNorm) -> Array:
    for name, f in sublayers.items():
        x = x + norm(f"{name}_out_norm")(f(norm(f"{name}_norm")(x)))
    return x


def _parallel(x: Array, sublayers: Sublayers, norm: MakeNorm) -> Array:
    return sum((f(norm(f"{name}_norm")(x)) for name, f in sublayers.items()), start=x)


RESIDUAL: dict[str, Callable[[Array, Sublayers, MakeNorm], Array]] = {
    "pre": _pre,
    "post": _post,
    "sandwich": _sandwich,
    "parallel": _parallel,
}
"""How sublayers and their norms join the residual stream x."""


class Layer(NamedTuple):
    """What differs between layers; arrays, traced, in one scan over the layers.

    Attributes:
      index: number of the layer, 0 at the bottom.
      window: how many tokens back its queries see; None: as far as the mask of the stack lets them.
      turns: frequencies of rotary positions; None: those of the config, which are the same in all layers.
    """

    index: Leaf
    window: Leaf = None
    turns: Leaf = None


def make_layers(config: Config) -> list[Layer]:
    """Returns the config's layers; what all of them have in common is None here, and the stack's or the config's."""
    windows, rotaries = config.windows, config.rotaries
    alone = (None,) * config.num_layers
    turns: tuple[Frequencies | None, ...] = alone
    if config.positions in ROTATE and len(set(rotaries)) > 1:
        turns = tuple(frequencies(rotary, config.sizes["H"]) for rotary in rotaries)
    windows = windows if len(set(windows)) > 1 else alone
    return [Layer(*layer) for layer in zip(range(config.num_layers), windows, turns, strict=True)]


def stacked(layers: list[Layer]) -> Layer:
    """Returns the layers as one of arrays, for a scan over them; no window becomes one that reaches everywhere."""
    index, windows, turns = zip(*layers, strict=True)
    window = None
    if any(windows):
        window = np.array([FAR if window is None else window for window in windows], np.int32)
    return Layer(np.array(index, np.int32), window, jax.tree.map(lambda *leaves: np.stack(leaves), *turns))


def _scanned(block: Any, length: int, *, shared: bool) -> Any:
    """Returns a block that runs as so many, with parameters of their own (stacked) or shared ones."""
    return nn.scan(
        block,
        variable_axes=COLLECTIONS if shared else {"params": 0, **COLLECTIONS},
        variable_broadcast="params" if shared else False,
        split_rngs={"params": not shared, "dropout": True},
        in_axes=(0, *[nn.broadcast] * 4),
        length=length,
    )


def arranged(config: Config) -> tuple[Any, dict[str, Layer]]:
    """Returns the kind of block that a stack is made of, and by the name of each the layer, or layers, that it runs."""
    layers, distinct = make_layers(config), config.num_blocks
    shared = config.num_layers // distinct
    if shared == 1 and not config.scan_layers:
        return Block, {f"layers_{i}": layer for i, layer in enumerate(layers)}
    block, every = Block, stacked(layers)
    if shared > 1:
        block = _scanned(Block, shared, shared=True)
        every = jax.tree.map(lambda leaf: leaf.reshape(distinct, shared, *leaf.shape[1:]), every)
    if config.scan_layers:
        return _scanned(block, distinct, shared=False), {"layers": every}
    return block, {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], every) for i in range(distinct)}


class Source(NamedTuple):
    """What a decoder attends to besides its own text.

    Attributes:
      x: final hidden states of an encoder [B S D]; None: their keys and values are in the cache.
      mask: of the decoder's tokens against the source's.
    """

    x: Leaf
    mask: Mask


class Block(nn.Module):
    """One layer: attention, cross-attention if there is a source, feed-forward, joined as `config.residual` says.

    Takes and returns (x, cache), as `nn.scan` wants its carry; taps `x`, the residual stream after the block.
    """

    config: Config

    @nn.compact
    def __call__(
        self,
        carry: tuple[Array, Cache | None],
        layer: Layer,
        positions: Int[Array, "#B T"],
        mask: Mask,
        bias: Any = None,
        source: Source | None = None,
    ) -> tuple[tuple[Array, Cache | None], None]:
        config = self.config
        x, cache = carry
        attn, mlp = Attention(config, name="attn"), MLP(config, name="mlp")
        dropout = nn.Dropout(config.dropout, deterministic=not self.has_rng("dropout"))
        mask = mask.narrowed(layer.window)

        def attend(h: Array) -> Array:
            nonlocal cache
            fresh: KV = attn.keys_values(h, positions, layer.turns)
            if cache is None:
                return dropout(attn(h, fresh, mask, bias, positions=positions, turns=layer.turns))
            cache, view = store(cache, layer.index, fresh, positions)
            return dropout(attn(h, view, mask, bias, positions=positions, turns=layer.turns))

        def attend_to_source(h: Array) -> Array:
            nonlocal cache
            assert source is not None
            # Positions of two texts have no distance: neither turns nor a bias.
            cross = Attention(dataclasses.replace(config, positions="none"), name="cross")
            kv: Any = None if source.x is None else cross.keys_values(source.x, source.mask.kv_positions)
            if cache is not None:
                cache, kv = store_source(cache, layer.index, kv)
            return dropout(cross(h, kv, source.mask))

        sublayers = {"attn": attend} | ({} if source is None else {"cross": attend_to_source})
        x = RESIDUAL[config.residual](x, sublayers | {"mlp": lambda h: dropout(mlp(h))}, partial(make_norm, config))
        return (constrain(tap(self, "x", x), "BTD"), cache), None


def _check_mask(mask: Mask, segments: Array | None, cache: Cache | None) -> None:
    """Refuses a mask of the caller's that would show a query what is not there, or not its document's."""
    if segments is not None and mask.q_segments is None:
        raise ValueError(
            "the mask has no segments, so that packed documents would see each other; make it with q_segments and "
            "kv_segments, or leave it out"
        )
    if cache is not None and cache.is_ring:
        raise ValueError("the slots of a ring change hands as tokens come; leave the mask out, or use a dense cache")


class Stack(nn.Module):
    """The layers of an encoder or decoder, in a Python loop (`layers_{i}`) or one scan (`layers`), and the final norm.

    Of layers that share their parameters, `layers_{i}` is a scan, whose taps have the layers as their first axis.

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
        *,
        source: Source | None = None,
        ordered: bool = False,
    ) -> tuple[Float[Array, "B T D"], Cache | None]:
        """Runs every layer; with a cache, its new tokens attend to what it holds and are added to it.

        Args:
          mask: None: the stack's own, causal or full, in which `ordered` says that positions count up one by one
            within each document. Windows of the config narrow either. Biases of distance read the mask's positions,
            rotary and added ones `positions`.
          source: what cross-attention is to; None: there is none.
        """
        config = self.config
        if mask is not None:
            _check_mask(mask, segments, cache)
        keys = positions
        if cache is not None:
            positions = jnp.broadcast_to(positions, x.shape[:2])
            before, cache = cache, append_positions(cache, positions)
            keys = key_positions(before, cache, positions)
        if mask is None:
            ordered = ordered and cache is None
            mask = Mask(positions, keys, segments, segments, causal=self.causal, ordered=ordered)
        if len(set(config.windows)) == 1:
            mask = mask.narrowed(config.windows[0])
        bias = BIAS[config.positions](config, self.causal) if config.positions in BIAS else None
        carry = (constrain(x, "BTD"), cache)
        block, layers = arranged(config)
        for name, layer in layers.items():
            carry, _ = block(config, name=name)(carry, layer, positions, mask, bias, source)
        x, cache = carry
        has_final_norm = config.residual != "post" if config.final_norm is None else config.final_norm
        return (make_norm(config, "final_norm")(x) if has_final_norm else x), cache
