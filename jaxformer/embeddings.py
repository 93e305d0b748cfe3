"""From token ids to the residual stream: tokens, and what is added to them.

    x = proj(norm(scale * token[ids] + position(positions) + type[token_types]))

Every part but the tokens is there if the config asks for it (Vaswani et al. 2017, sections 3.4 and 3.5; Devlin et al.
2019, "BERT", section 3; Lan et al. 2020, "ALBERT", section 3.1, for the projection from a narrower table).
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.cache import Cache
from jaxformer.config import Config
from jaxformer.layers import Embed, Projection, make_norm
from jaxformer.masks import documents, positions_from_segments
from jaxformer.positions import ADD


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
    _check_range("token id", "the vocabulary", "ids", ids, vocab_size)


def check_types(token_types: Any, num_types: int | None) -> None:
    """Refuses token types that are not integers, or that the model has no row for.

    Raises:
      ValueError: see above.
    """
    if num_types is None:
        raise ValueError("token_types are given, but the model has none; leave them out, or set num_token_types")
    if not jnp.issubdtype(token_types.dtype, jnp.integer):
        raise ValueError(f"token_types have type {token_types.dtype}; they must be integers")
    _check_range("token type", "the table", "types", token_types, num_types)


def _check_range(what: str, where: str, plural: str, values: Any, size: int) -> None:
    if isinstance(values, jax.core.Tracer):
        return
    known = np.asarray(values)
    bad = known[(known < 0) | (known >= size)]
    if bad.size:
        raise ValueError(f"{what} {bad[0]} is outside of {where} of {size}; {plural} are 0 to {size - 1}")


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


class Embeddings(nn.Module):
    """The embedding layer of one stack; its token table may serve as the output head too.

    Attributes:
      rows: number of token ids.
    """

    config: Config
    rows: int

    def setup(self) -> None:
        config = self.config
        self.token = Embed(config, self.rows)
        if config.positions == "learned":
            self.position = Embed(config, config.max_len)
        if config.num_token_types:
            self.type = Embed(config, config.num_token_types)
        if config.embed_norm:
            self.norm = make_norm(config)
        if config.d_embed is not None:
            self.proj = Projection(config, "BTE,ED->BTD", bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        positions: Int[Array, "#B T"],
        token_types: Int[Array, "#B T"] | None = None,
        *,
        token: Embed | None = None,
    ) -> Float[Array, "B T D"]:
        """Embeds tokens at their positions.

        Args:
          token_types: None: all 0.
          token: the table of another stack that this one shares; None: its own.

        Raises:
          ValueError: positions beyond a learned table, or token types that are none.
        """
        config = self.config
        x = (token or self.token)(ids)
        if config.embed_scale:
            x = x * jnp.asarray(np.sqrt(config.d_model), x.dtype)
        if config.positions == "learned":
            check_positions(positions, config.max_len)
            x = x + self.position(jnp.maximum(positions, 0))
        elif config.positions in ADD:
            x = x + ADD[config.positions](positions, config.sizes["E"]).astype(x.dtype)
        if token_types is not None:
            check_types(token_types, config.num_token_types)
        if config.num_token_types:
            x = x + self.type(jnp.zeros((1, ids.shape[1]), jnp.int32) if token_types is None else token_types)
        if config.embed_norm:
            x = self.norm(x)
        x = self.dropout(x, deterministic=not self.has_rng("dropout"))
        return x if config.d_embed is None else self.proj(x)

    def attend(self, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Returns the float32 products of x with the vector of every token."""
        return self.token.attend(x)
