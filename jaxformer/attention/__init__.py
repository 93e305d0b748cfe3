"""Attention behind one signature: q, k, v, a `Mask`, a bias; the same result from every implementation, or an error.

`IMPLEMENTATIONS["mine"] = f` adds one. None falls back in silence: an implementation that cannot honour an argument
refuses it and names one that can. `cached_attention` reads the layers of a cache where they lie.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxformer.attention.arguments import Bias, check_arrays, check_terms
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
    "Bias",
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
    bias: Bias = None,
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
      bias: added to the scores after scaling and capping, in float32; or a pytree of float arrays that is a function of
        q_positions [b t] and kv_positions [b s] and makes it, [b N t s]: chunked calls it block by block and never
        holds the whole.
      scale: factor on q . k; H ** -0.5 as a rule.
      softcap: positive, bounds the scores to (-softcap, softcap) before the bias and the mask; None: no bound.
      pattern_fn: reads or replaces the pattern [B N T S]; only einsum has one.
      dropout: drops weights of the pattern, by their place in it: every implementation that can drops the same.
      implementation: key of `IMPLEMENTATIONS`, or "auto" (see `choose`). Forward-mode and second derivatives need
        einsum.

    Raises:
      ValueError: shapes or types that do not fit together, a bias without gradients, a softcap that is not positive,
        or whatever the implementation cannot honour (the message names one that can).
      KeyError: an unknown implementation.

    References:
      Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1; Ainslie et al. 2023, "GQA", section 2.2.
    """
    check_arrays(q, k, v)
    bias = check_terms(q, k.shape[1], mask, bias, softcap)
    name = choose(implementation, q.shape[1] * k.shape[1], pattern_fn is not None)
    return IMPLEMENTATIONS[name](
        q, k, v, mask, bias, scale=scale, softcap=softcap, pattern_fn=pattern_fn, dropout=dropout
    )
