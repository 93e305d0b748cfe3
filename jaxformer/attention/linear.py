"""Linear attention: products of features in place of the softmax, so that all keys so far are one sum of fixed size.

    z_t = phi(q_t) S / phi(q_t) n,    S = sum_s phi(k_s) v_s^T,    n = sum_s phi(k_s)         over the keys that t sees

(Katharopoulos et al. 2020, equations 4 to 7.) Two-sided attention needs one sum for all queries. In causal attention
the sums run along the row (equations 9 to 12), here by chunks: inside of a chunk its [C C] products, before it the sums
so far. One token at a time, S_t = S_{t-1} + phi(k_t) v_t^T (equations 16 to 20). M is the number of features.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.dropout import Dropout
from jaxformer.attention.features import FeatureMap, elu_plus_one
from jaxformer.masks import Mask
from jaxformer.trees import Leaf

CHUNK = 128
"""Tokens whose products with each other are formed at once."""


@partial(jax.tree_util.register_dataclass, data_fields=["sums", "total"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LinearState:
    """All that is kept of the tokens so far, in float32, however many they were.

    Attributes:
      sums: S = sum_s phi(k_s) v_s^T [B K M H].
      total: n = sum_s phi(k_s) [B K M].
    """

    sums: Leaf
    total: Leaf


def init_state(batch: int, kv_heads: int, width: int, *, feature_map: FeatureMap = elu_plus_one) -> LinearState:
    """Makes the state before any token, for `kv_heads` heads of this width."""
    features = jax.eval_shape(feature_map, jax.ShapeDtypeStruct((width,), jnp.float32)).shape[-1]
    return LinearState(jnp.zeros((batch, kv_heads, features, width)), jnp.zeros((batch, kv_heads, features)))


def linear_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    bias: Any = None,
    *,
    scale: float,
    softcap: float | None = None,
    pattern_fn: Callable[[Array], Array] | None = None,
    dropout: Dropout | None = None,
    feature_map: FeatureMap = elu_plus_one,
) -> Float[Array, "B T N H"]:
    """Attends with weights phi(scale * q) . phi(k), in time and memory linear in the length.

    This is another function than softmax attention, so `IMPLEMENTATIONS` does not hold it and a model trained with
    either does not run with the other: to build a model of it, set `IMPLEMENTATIONS["linear"] = linear_attention`.
    A query of padding, or one whose weights are all 0, gets exactly 0. Features and sums are always float32.

    Args:
      mask: two-sided, or causal with `ordered`, of tokens against themselves. If it has segments, each document lies in
        one piece, and the documents of a row have rising numbers.
      scale: factor on q before the feature map; it is no factor on the weights.
      feature_map: phi, on float32 [... H]; a value of `FEATURE_MAPS`, `random_features`, or any function.

    Raises:
      ValueError: a bias, softcap, pattern_fn, dropout or window, or a mask that is not as above. Under jit, where
        positions and segments are not known, a row in which they are not as above is NaN.

    References:
      Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3; Yang et al. 2024, "Gated Linear
      Attention", section 2, for the chunks.
    """
    _refuse(bias=bias, softcap=softcap, pattern_fn=pattern_fn, dropout=dropout)
    if mask.is_causal:
        return prefill(q, k, v, mask, scale=scale, feature_map=feature_map)[0]
    _check_mask(mask, q.shape[1], k.shape[1])
    phi, valid = _Features(feature_map, scale, k.shape[2]), mask.kv_positions >= 0
    if mask.q_segments is None:
        empty = init_state(k.shape[0], *k.shape[2:], feature_map=feature_map)
        top, total = _read(_add(empty, phi.k(k, valid), v), phi.q(q))
    else:
        document, v = _documents(mask, v)
        top, total, _ = _running(phi, q, k, v, document, valid)
        q_, k_, v_, document_, valid_ = (jnp.flip(x, axis=1) for x in (q, k, v, document, valid))
        top_, total_, _ = _running(phi, q_, k_, v_, document_, valid_, strict=True)
        top, total = top + jnp.flip(top_, axis=1), total + jnp.flip(total_, axis=1)
    return _quotient(top, total, mask.q_positions >= 0, q.dtype)


def prefill(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    *,
    scale: float,
    feature_map: FeatureMap = elu_plus_one,
) -> tuple[Float[Array, "B T N H"], LinearState]:
    """Attends causally to whole rows, and returns the state after them too, from which `step` goes on.

    Of packed rows it is the state of the last document. Arguments and errors are those of `linear_attention`.
    """
    if not mask.is_causal:
        raise ValueError(
            "only a causal mask has a state after its last token; use linear_attention for a two-sided one"
        )
    _check_mask(mask, q.shape[1], k.shape[1])
    document, v = _documents(mask, v)
    phi = _Features(feature_map, scale, k.shape[2])
    top, total, state = _running(phi, q, k, v, document, mask.kv_positions >= 0)
    return _quotient(top, total, mask.q_positions >= 0, q.dtype), state


def step(
    state: LinearState,
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    *,
    scale: float,
    positions: Int[Array, "#B 1"] | None = None,
    feature_map: FeatureMap = elu_plus_one,
) -> tuple[Float[Array, "B 1 N H"], LinearState]:
    """Adds one more token to the state and attends to all tokens so far, itself among them.

    Args:
      state: made with the same feature map.
      scale: as in `linear_attention`.
      positions: of the token; a row that has -1 has no token: it gets 0 and keeps its state. None: every row has one.

    Returns:
      z and the new state.
    """
    valid = jnp.ones((1, 1), bool) if positions is None else positions >= 0
    phi = _Features(feature_map, scale, k.shape[2])
    state = _add(state, phi.k(k, valid), v)
    return _quotient(*_read(state, phi.q(q)), valid, q.dtype), state


class _Features(NamedTuple):
    """The features of queries, by groups that share a key/value head, and of keys."""

    feature_map: FeatureMap
    scale: float
    kv_heads: int

    def q(self, q: Float[Array, "B T N H"]) -> Float[Array, "B T K G M"]:
        grouped = rearrange(q, "B T (K G) H -> B T K G H", K=self.kv_heads)
        return self.feature_map(grouped.astype(jnp.float32) * self.scale)

    def k(self, k: Float[Array, "B S K H"], valid: Bool[Array, "#B S"]) -> Float[Array, "B S K M"]:
        return jnp.where(valid[..., None, None], self.feature_map(k.astype(jnp.float32)), 0)


def _add(state: LinearState, k: Float[Array, "B S K M"], v: Float[Array, "B S K H"]) -> LinearState:
    sums = jnp.einsum("BSKM,BSKH->BKMH", k, v, preferred_element_type=jnp.float32)
    return LinearState(state.sums + sums, state.total + k.sum(axis=1))


def _read(state: LinearState, q: Float[Array, "B T K G M"]) -> tuple[Array, Array]:
    top = jnp.einsum("BTKGM,BKMH->BTKGH", q, state.sums)
    return top, jnp.einsum("BTKGM,BKM->BTKG", q, state.total)


def _quotient(
    top: Float[Array, "B T K G H"], total: Float[Array, "B T K G"], valid: Bool[Array, "#B T"], dtype: Any
) -> Float[Array, "B T N H"]:
    seen = (total != 0) & valid[..., None, None]
    z = jnp.where(seen[..., None], top / jnp.where(seen, total, 1)[..., None], 0)
    return rearrange(z.astype(dtype), "B T K G H -> B T (K G) H")


def _running(
    phi: _Features, q: Array, k: Array, v: Array, document: Array, valid: Array, strict: bool = False
) -> tuple[Array, Array, LinearState]:
    """Sums over the keys up to each query (strict: before it) in its document, chunk by chunk.

    Returns:
      The sums of weighted values [B T K G H] and of weights [B T K G], and the state of the last document.
    """
    T, C = q.shape[1], min(CHUNK, q.shape[1])
    order = jnp.tri(C, k=-1 if strict else 0, dtype=bool)

    def chunk(carry: tuple[LinearState, Array], tokens: tuple[Array, ...]) -> tuple[Any, tuple[Array, Array]]:
        state, last = carry
        q, k, v, document, valid = tokens
        q, k = phi.q(q), phi.k(k, valid)
        pairs = order & (document[:, :, None] == document[:, None, :])
        near = jnp.where(pairs[:, None, None], jnp.einsum("BTKGM,BSKM->BKGTS", q, k), 0)
        goes_on = document == last
        top, total = _read(state, jnp.where(goes_on[..., None, None, None], q, 0))
        top = top + jnp.einsum("BKGTS,BSKH->BTKGH", near, v, preferred_element_type=jnp.float32)
        total = total + jnp.einsum("BKGTS->BTKG", near)
        last, keep = document[:, -1:], goes_on[:, -1, None, None]
        state = LinearState(jnp.where(keep[..., None], state.sums, 0), jnp.where(keep, state.total, 0))
        state = _add(state, jnp.where((document == last)[..., None, None], k, 0), v)
        return (state, last), (top, total)

    def cut(x: Array, **how: Any) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, -T % C)] + [(0, 0)] * (x.ndim - 2), **how)
        return rearrange(padded, "B (I C) ... -> I B C ...", C=C)

    empty = init_state(k.shape[0], *k.shape[2:], feature_map=phi.feature_map)
    chunks = cut(q), cut(k), cut(v), cut(document, mode="edge"), cut(valid)
    # Every chunk is computed again in the backward pass: its products are not kept.
    (state, _), sums = jax.lax.scan(jax.checkpoint(chunk), (empty, document[:, :1]), chunks)
    top, total = (rearrange(x, "I B C ... -> B (I C) ...")[:, :T] for x in sums)
    return top, total, state


def _documents(mask: Mask, v: Array) -> tuple[Int[Array, "b T"], Array]:
    """Returns the document in which each token stands (padding goes with what is before it), and the values.

    Rows whose queries are not their keys, or whose documents do not rise, are refused; where that is not known, their
    values become NaN.
    """
    with jax.ensure_compile_time_eval():  # what is known is looked at, also under jit
        kept = (mask.q_positions == mask.kv_positions).all(axis=1)
        document = jnp.zeros_like(mask.kv_positions)
        if mask.q_segments is not None and mask.kv_segments is not None:
            valid = mask.kv_positions >= 0
            document = jax.lax.cummax(jnp.where(valid, mask.kv_segments, jnp.iinfo(jnp.int32).min), axis=1)
            kept = kept & (mask.q_segments == mask.kv_segments).all(axis=1)
            kept = kept & ((document == mask.kv_segments) | ~valid).all(axis=1)
        if not isinstance(kept, jax.core.Tracer) and not kept.all():
            raise ValueError(
                "linear attention sums along the row: queries and keys must be the same tokens, and the documents of a "
                "row must have rising segment numbers; number them 1, 2, 3, ..., or use 'einsum' or 'chunked'"
            )
    return document, jnp.where(kept[:, None, None, None], v, jnp.nan)


_REASONS = {
    "bias": "it has no scores to add one to",
    "softcap": "it has no scores to bound",
    "pattern_fn": "the pattern never exists in it",
    "dropout": "the pattern never exists in it",
    "window": "a sum of keys cannot lose the oldest",
    "prefix": "its sums follow the order of the tokens",
}


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            others = "'einsum'" if name == "pattern_fn" else "'einsum' or 'chunked'"
            raise ValueError(f"linear attention cannot honour {name}: {_REASONS[name]}; use {others}")


def _check_mask(mask: Mask, T: int, S: int) -> None:
    _refuse(window=mask.window, prefix=mask.prefix)
    if (mask.q_positions.shape[1], mask.kv_positions.shape[1]) != (T, S):
        raise ValueError(
            f"the mask is of positions {mask.q_positions.shape} x {mask.kv_positions.shape}, but there are {T} queries "
            f"and {S} keys"
        )
    if mask.is_causal and not mask.ordered:
        raise ValueError(
            "linear attention needs the promise that positions count up along the row; make the causal mask with "
            "ordered=True if they do, or use 'einsum' or 'chunked'"
        )
    if (mask.is_causal or mask.q_segments is not None) and T != S:
        raise ValueError(
            f"linear attention of {T} queries to {S} keys can be neither causal nor packed, for its sums run along one "
            "row; add single tokens with `step`, or use 'einsum' or 'chunked'"
        )
