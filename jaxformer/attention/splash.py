"""Attention by JAX's own kernel for TPUs, splash: this file says our arguments in its words, or refuses.

    allowed[t, s] = index mask[t, s]  and  number[t] == number[s]

The index mask (causal, or a window) is static, and blocks in which it hides everything are skipped. The numbers are the
documents; padding gets numbers that nothing else has. The kernel is in `jax.experimental.pallas.ops.tpu`; on a CPU it
runs interpreted, which is right and slow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.attention.dropout import Dropout
from jaxformer.attention.indices import aligned, refuse, unpadded
from jaxformer.masks import Mask

LANES = 128
"""A block is a multiple of this."""
BLOCK = 512
"""Tokens in a block, of queries and of keys, forward and backward."""
SINK = -1e30
"""A score below every score: with its weight in the sum, a row that sees no key is 0 / 1 and not 0 / 0."""
NO_QUERY, NO_KEY = -(2**31), -(2**31) + 1
"""Numbers of padding; no document has them."""


def splash_attention(
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
    """Attends with JAX's splash kernel for TPUs, in memory linear in T; see `attention` for the arguments.

    Gradients reach q, k and v. Segments, padding and other tokens in q than in kv are fine under a full mask; causal
    order and windows need a mask that is `ordered` and whose q and kv are surely the same tokens (`indices.aligned`).
    q is scaled in float32 and rounded to its type before the kernel: exact where the scale is a power of 2.

    Raises:
      ValueError: a bias, pattern_fn, dropout, a prefix, or a traced window; causal order or a window over positions
        that are not surely in the order of the indices; a window to both sides over positions that may hold padding;
        types other than float32 and bfloat16; a GPU.

    References:
      Dao et al. 2022, "FlashAttention", algorithm 1; Ainslie et al. 2023, "GQA", section 2.2.
    """
    given = {
        "a bias": (bias, "'flash', 'chunked' or 'einsum'"),
        "pattern_fn": (pattern_fn, "'einsum'"),
        "dropout of the pattern": (dropout, "'chunked' or 'einsum'"),
    }
    refuse("splash", given)
    _check_types(q, k, v)
    causal, window = _index_mask(mask)
    if jax.default_backend() == "gpu":
        raise ValueError("'splash' is a kernel for TPUs, and this is a GPU; use implementation='flash' or 'chunked'")
    T, block = q.shape[1], (_block(q.shape[1]), _block(k.shape[1]))
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    rows = [_padded(x, size).swapaxes(1, 2) for x, size in ((scaled, block[0]), (k, block[1]), (v, block[1]))]
    numbers = _numbers(mask, q.shape[0], block)
    run = partial(_run, causal, window, block, softcap)
    # The platform that the program is lowered for decides, which need not be the one that it is traced on.
    z = jax.lax.platform_dependent(*rows, *numbers, tpu=partial(run, False), cpu=partial(run, True))
    return z.swapaxes(1, 2)[:, :T]


def _run(
    causal: bool,
    window: int | None,
    block: tuple[int, int],
    softcap: float | None,
    interpret: bool,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_numbers: Int[Array, "B T"],
    kv_numbers: Int[Array, "B S"],
) -> Float[Array, "B N T H"]:
    # Here and not above: importing Pallas takes longer than importing the package.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    N, T, S = q.shape[1], q.shape[2], k.shape[2]
    index_mask: Any = splash.FullMask((T, S))
    if window is not None:
        index_mask = splash.LocalMask((T, S), (window - 1, 0 if causal else window - 1), 0)
    elif causal:
        index_mask = splash.CausalMask((T, S))
    t, s = block
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([index_mask] * N),
        block_sizes=splash.BlockSizes(t, s, s, t, s, s, t, s),
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    sinks = jnp.full(N, SINK)
    return jax.vmap(lambda q, k, v, *numbers: kernel(q, k, v, splash.SegmentIds(*numbers), sinks))(
        q, k, v, q_numbers, kv_numbers
    )


def _check_types(q: Array, k: Array, v: Array) -> None:
    types = {str(x.dtype) for x in (q, k, v)}
    if len(types) > 1 or not types <= {"float32", "bfloat16"}:
        raise ValueError(
            f"'splash' takes q, k and v all in float32 or all in bfloat16, not {sorted(types)}; "
            "use implementation='chunked' or 'einsum'"
        )


def _index_mask(mask: Mask) -> tuple[bool, int | None]:
    """Returns whether indices are in causal order, and their window; refuses masks that are more than that."""
    others = "use implementation='flash', 'chunked' or 'einsum'"
    if mask.prefix is not None:
        raise ValueError(f"'splash' cannot honour a prefix; {others}")
    if not isinstance(mask.window, int | None):
        raise ValueError(f"'splash' needs a window that is an int, and this one is an array; {others}")
    if (mask.is_causal or mask.window is not None) and not aligned(mask):
        raise ValueError(
            "'splash' knows indices and not positions: a causal mask or a window must be `ordered`, its q and kv made "
            f"from the very same positions and segments (or from known, equal ones); {others}"
        )
    if mask.window is not None and not mask.is_causal and not unpadded(mask.q_positions):
        raise ValueError(
            "'splash' takes a window to both sides only over positions that are known before tracing and hold no "
            f"padding, because a query of padding (-1) sees the first positions of such a mask; {others}"
        )
    return mask.is_causal, None if mask.window is None else min(mask.window, mask.q_positions.shape[1])


def _numbers(mask: Mask, B: int, block: tuple[int, int]) -> tuple[Int[Array, "B T"], Int[Array, "B S"]]:
    """Returns the number of each query's and key's document; those of padding are equal to no other.

    A query of padding has its document's number under a full mask, where it sees what any query sees.
    """
    q, kv = mask.q_positions, mask.kv_positions
    q_numbers = 0 if mask.q_segments is None else mask.q_segments
    kv_numbers = 0 if mask.kv_segments is None else mask.kv_segments
    q_numbers = jnp.where((q >= 0) | (not mask.is_causal), q_numbers, NO_QUERY).astype(jnp.int32)
    kv_numbers = jnp.where(kv >= 0, kv_numbers, NO_KEY).astype(jnp.int32)
    q_numbers, kv_numbers = (jnp.broadcast_to(x, (B, x.shape[1])) for x in (q_numbers, kv_numbers))
    return _padded(q_numbers, block[0], NO_QUERY), _padded(kv_numbers, block[1], NO_KEY)


def _block(size: int) -> int:
    return min(BLOCK, -(-size // LANES) * LANES)


def _padded(x: Array, size: int, value: int = 0) -> Array:
    """Pads axis 1 to a multiple of size."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), constant_values=value)
