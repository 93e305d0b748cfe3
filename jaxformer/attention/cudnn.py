"""Attention by cuDNN on NVIDIA GPUs, through `jax.nn.dot_product_attention`: our mask in its words, or a refusal.

    lengths: allowed[t, s] = s <= t, t - s < window and s < length,   or   array: allowed[t, s] is read from memory

cuDNN knows indices, and tokens that begin at index 0. Where the tokens of a row are one run, they are rolled to the
start and described by their number; memory is then linear in T. Every other mask is an array of T * S per row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.attention.dropout import Dropout
from jaxformer.attention.indices import aligned, refuse, unpadded
from jaxformer.masks import Mask

IMPLEMENTATION: Literal["cudnn", "xla"] = "cudnn"
"""What `jax.nn.dot_product_attention` is asked for; "xla" computes the same anywhere."""
WIDTH, WIDTH_BEFORE_HOPPER = 256, 128
"""The widest heads, and those of GPUs of a compute capability below 9."""
LOWEST = -(2.0**15)
"""Nothing lower is added to a score: a weight is 0 there already, and float16 ends soon after."""


def cudnn_attention(
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
) -> Float[Array, "B T N H"]:
    """Attends with cuDNN's fused kernel; see `attention` for the arguments.

    Gradients reach q, k, v and the bias, which is rounded to q's type. Memory is linear in T without a bias if the mask
    is `ordered`, has no segments, no prefix, and no window that is traced or to both sides, and, if it is causal, has q
    and kv that are surely the same tokens (`indices.aligned`); fastest if the positions are known before tracing and
    hold no padding. Otherwise the mask is an array of T * S numbers per row, shared by all heads, of even T and S.

    Raises:
      ValueError: a softcap, pattern_fn, dropout, or a bias that is a function; types other than float16 and bfloat16;
        a head width that is no multiple of 8 or too wide for the GPU; an odd length with a bias or a mask that has to
        be an array; no GPU.

    References:
      Dao 2023, "FlashAttention-2", section 3.1; Ainslie et al. 2023, "GQA", section 2.2.
    """
    given = {
        "a softcap": (softcap, "'flash', 'chunked' or 'einsum'"),
        "pattern_fn": (pattern_fn, "'einsum'"),
        "dropout of the pattern": (dropout, "'chunked' or 'einsum'"),
        "a bias that is a function of positions": (bias if callable(bias) else None, "'flash' or 'chunked'"),
    }
    refuse("cudnn", given)
    _check_inputs(q, k, v)
    by_lengths = bias is None and _has_lengths(mask)
    if not by_lengths and (q.shape[1] % 2 or k.shape[1] % 2):
        raise ValueError(
            f"'cudnn' needs even lengths with a bias, or with this mask, and they are {q.shape[1]} queries and "
            f"{k.shape[1]} keys; use implementation='flash' or 'chunked', or pad the rows"
        )
    _check_device(q.shape[3])
    return _by_lengths(q, k, v, mask, scale) if by_lengths else _by_array(q, k, v, mask, bias, scale)


def _check_inputs(q: Array, k: Array, v: Array) -> None:
    types, H = {str(x.dtype) for x in (q, k, v)}, q.shape[3]
    if len(types) > 1 or not types <= {"float16", "bfloat16"}:
        raise ValueError(
            f"'cudnn' takes q, k and v all in float16 or all in bfloat16, not {sorted(types)}; "
            "use implementation='flash', 'chunked' or 'einsum'"
        )
    if H % 8 or H > WIDTH:
        raise ValueError(
            f"'cudnn' takes heads whose width is a multiple of 8 up to {WIDTH}, not {H}; "
            "use implementation='flash', 'chunked' or 'einsum'"
        )


def _check_device(H: int) -> None:
    if jax.default_backend() != "gpu":
        raise ValueError(
            f"'cudnn' runs on NVIDIA GPUs, and this is a {jax.default_backend()}; use implementation='chunked'"
        )
    if H > WIDTH_BEFORE_HOPPER and float(jax.local_devices()[0].compute_capability) < 9:
        raise ValueError(
            f"'cudnn' takes heads up to {WIDTH_BEFORE_HOPPER} wide on this GPU, not {H}; use implementation='chunked'"
        )


def _has_lengths(mask: Mask) -> bool:
    """Returns whether indices, one window and the number of tokens surely say all of the mask."""
    if mask.q_segments is not None or mask.prefix is not None:
        return False
    if mask.is_causal:
        return aligned(mask) and (mask.window is None or isinstance(mask.window, int))
    return mask.ordered and mask.window is None


def _by_lengths(q: Array, k: Array, v: Array, mask: Mask, scale: float) -> Float[Array, "B T N H"]:
    B, T = q.shape[:2]
    window = (min(mask.window, T) - 1, 0) if isinstance(mask.window, int) else None
    attend = partial(_attend, scale=scale, is_causal=mask.is_causal, local_window_size=window)
    if unpadded(mask.kv_positions):
        return attend(q, k, v)
    real = mask.kv_positions >= 0
    first, count = (jnp.broadcast_to(x, (B,)).astype(jnp.int32) for x in (real.argmax(axis=1), real.sum(axis=1)))
    # A row without tokens has a length of 1 all the same, so that nothing in it is divided by 0; its values are 0.
    lengths = jnp.maximum(count, 1)
    k, v = (_front(x, first, count) for x in (k, v))
    if not mask.is_causal:
        return attend(q, k, v, key_value_seq_lengths=lengths)
    q = _front(q, first, count)
    z = attend(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    # Nothing is promised of the rows behind the last token.
    return _rolled(jnp.where(_index(T) < count[:, None, None, None], z, 0), first)


def _front(x: Float[Array, "B T N H"], first: Int[Array, " B"], count: Int[Array, " B"]) -> Float[Array, "B T N H"]:
    """Rolls each row's tokens to its start; what is not a token is 0, and so is its gradient."""
    return jnp.where(_index(x.shape[1]) < count[:, None, None, None], _rolled(x, -first), 0)


def _rolled(x: Float[Array, "B T N H"], shift: Int[Array, " B"]) -> Float[Array, "B T N H"]:
    return jax.vmap(lambda row, by: jnp.roll(row, by, axis=0))(x, shift)


def _index(T: int) -> Int[Array, "1 T 1 1"]:
    return jnp.arange(T)[None, :, None, None]


def _by_array(q: Array, k: Array, v: Array, mask: Mask, bias: Any, scale: float) -> Float[Array, "B T N H"]:
    allowed = mask.dense()
    if bias is not None:
        # 0 where the mask hides: two large negative numbers may be infinite together.
        bias = jnp.where(allowed, jnp.maximum(bias, LOWEST), 0).astype(q.dtype)
    z = _attend(q, k, v, bias, allowed, scale=scale)
    # A row that sees no key is the mean of all values there.
    return jnp.where(allowed.any(axis=3)[:, 0, :, None, None], z, 0)


def _attend(*arrays: Any, **how: Any) -> Float[Array, "B T N H"]:
    return jax.nn.dot_product_attention(*arrays, implementation=IMPLEMENTATION, **how)
