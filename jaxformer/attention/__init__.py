"""Attention behind one signature: q, k, v, a `Mask`, a bias; the same result from every implementation, or an error.

`IMPLEMENTATIONS["mine"] = f` adds one. None falls back in silence: an implementation that cannot honour an argument
refuses it and names one that can. `cached_attention` reads the layers of a cache where they lie.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.attention.bias import PositionBias
from jaxformer.attention.cached import cached_attention
from jaxformer.attention.chunked import chunked_attention
from jaxformer.attention.cudnn import cudnn_attention
from jaxformer.attention.dropout import Dropout
from jaxformer.attention.einsum import einsum_attention, masked_softmax, softcapped
from jaxformer.attention.splash import splash_attention
from jaxformer.masks import Mask

__all__ = [
    "IMPLEMENTATIONS",
    "Dropout",
    "PositionBias",
    "attention",
    "cached_attention",
    "check_cached",
    "choose",
    "masked_softmax",
    "softcapped",
]


def _flash_attention(*args: Any, **options: Any) -> Array:
    # Here and not above: importing Pallas takes longer than importing the package.
    from jaxformer.attention.flash import flash_attention

    return flash_attention(*args, **options)


_OURS: dict[str, Callable[..., Array]] = {
    "einsum": einsum_attention,
    "chunked": chunked_attention,
    "flash": _flash_attention,
    "splash": splash_attention,
    "cudnn": cudnn_attention,
}
IMPLEMENTATIONS: dict[str, Callable[..., Array]] = dict(_OURS)
"""Name -> implementation. Each takes (q, k, v, mask, bias, *, scale, softcap, pattern_fn, dropout)."""


_CPU_CHUNKED, _CHUNKED = 256**2, 2048**2
"""Scores a head from which "auto" takes chunked: on a CPU it is faster there, elsewhere it bounds the memory."""


def choose(implementation: str, scores: int, needs_pattern: bool) -> str:
    """Returns the name of the implementation to use, which is the given one unless that is "auto".

    "auto" is einsum where the pattern is read or edited, and for few scores a head (T * S): below 256^2 on a CPU and
    below 2048^2 elsewhere. Otherwise it is chunked.

    Raises:
      KeyError: an unknown name.
    """
    if implementation == "auto":
        limit = _CPU_CHUNKED if jax.default_backend() == "cpu" else _CHUNKED
        return "einsum" if needs_pattern or scores < limit else "chunked"
    if implementation not in IMPLEMENTATIONS:
        raise KeyError(
            f"attention implementation {implementation!r} is unknown; choose one of {['auto', *IMPLEMENTATIONS]}"
        )
    return implementation


def check_cached(implementation: str) -> None:
    """Refuses an implementation that `cached_attention` cannot stand in for; it computes what all of ours do.

    Raises:
      KeyError: an unknown name.
      ValueError: an implementation of the user's, which may compute something else.
    """
    name = choose(implementation, 0, False)
    if IMPLEMENTATIONS[name] is not _OURS.get(name):
        raise ValueError(
            f"attention implementation {implementation!r} has no form that reads a cache; "
            "run the whole text without a cache, or decode with attention='auto'"
        )


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    bias: Float[Array | np.ndarray, "#B N T S"] | Callable[..., Array] | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    pattern_fn: Callable[[Array], Array] | None = None,
    dropout: Dropout | None = None,
    implementation: str = "auto",
) -> Float[Array, "B T N H"]:
    """Returns z = softmax(scale * q k^T + bias) v over the keys that the mask allows.

    The layout is batch, token, head, width. Query head n reads key/value head n // (N // K). A query that may attend to
    nothing gets exactly 0, with finite gradients. Scores and softmax are float32 under every input type.

    Args:
      mask: who may attend to whom; its batch axis may be 1.
      bias: float32, added to the scores after scaling and capping; or a function (pytree) of q_positions [b t] and
        kv_positions [b s] that makes it, [b N t s]: chunked calls it block by block and never holds the whole.
      scale: factor on q . k; H ** -0.5 as a rule.
      softcap: bounds the scores to (-softcap, softcap) before the bias and the mask; None: no bound.
      pattern_fn: reads or replaces the pattern [B N T S]; only einsum has one.
      dropout: drops weights of the pattern, by their place in it: every implementation that can drops the same.
      implementation: key of `IMPLEMENTATIONS`, or "auto" (see `choose`). Forward-mode and second derivatives need
        einsum.

    Raises:
      ValueError: shapes that do not fit together.
      KeyError: an unknown implementation.

    References:
      Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; Ainslie et al. 2023, "GQA", section 2.2.
    """
    _check_shapes(q, k, v, mask, bias)
    if bias is not None and not callable(bias):
        bias = jnp.asarray(bias)
    name = choose(implementation, q.shape[1] * k.shape[1], pattern_fn is not None)
    return IMPLEMENTATIONS[name](
        q, k, v, mask, bias, scale=scale, softcap=softcap, pattern_fn=pattern_fn, dropout=dropout
    )


def _check_shapes(q: Array, k: Array, v: Array, mask: Mask, bias: Any) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; it must be [batch, tokens, heads, width]")
    (B, T, N, H), (Bk, S, K, Hk) = q.shape, k.shape
    if (Bk, Hk) != (B, H) or v.shape != k.shape:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} must agree in batch, keys, kv heads and width")
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} key/value heads; each must serve the same number")
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(mask) if leaf.ndim} - {1, B}
    if rows or (mask.q_positions.shape[1], mask.kv_positions.shape[1]) != (T, S):
        raise ValueError(
            f"the mask is of positions {mask.q_positions.shape} x {mask.kv_positions.shape}, but q is [{B} {T}] "
            f"and k is [{B} {S}]"
        )
    if bias is not None and not callable(bias) and bias.shape not in ((1, N, T, S), (B, N, T, S)):
        raise ValueError(f"bias has shape {bias.shape}; it must be [1 or batch, query heads, T, S] = {(B, N, T, S)}")
