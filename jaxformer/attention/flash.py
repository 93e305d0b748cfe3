"""Exact attention as one fused kernel a pass, forward and backward, for GPU and TPU; interpreted on a CPU.

    z = softmax(scale * q k^T + bias) v        by blocks whose scores live in the chip's own memory only

(Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2"). The arithmetic is that of `chunked`. This file cuts
the arrays into blocks, finds for each block of queries the span of key blocks in which its mask allows anything (and the
other way round for the gradients of the keys), and launches the kernels of `flash_kernels`, which loop over that span.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from jaxformer.attention.bias import PositionBias
from jaxformer.attention.dropout import Dropout
from jaxformer.attention.flash_kernels import (
    Keys,
    Queries,
    Span,
    Static,
    forward_kernel,
    keys_kernel,
    queries_kernel,
)
from jaxformer.attention.grid import Grid, make_grid, padded
from jaxformer.masks import Mask

QUERIES = {"cpu": 128, "gpu": 64, "tpu": 256}
KEYS = {"cpu": 128, "gpu": 64, "tpu": 256}
"""Tokens in a block, powers of two."""

VMEM = 48 * 2**20
"""Bytes of a TPU core's fast memory that one program may fill."""


def flash_attention(
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
    platform: str | None = None,
) -> Float[Array, "B T N H"]:
    """TODO."""
    platform = platform or jax.default_backend()
    _check(bias, pattern_fn, dropout, platform)
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    t, s = min(QUERIES[platform], _power_of_two(T)), min(KEYS[platform], _power_of_two(S))
    q, k, v = (_widened(x, platform) for x in (q, k, v))
    queries = rearrange(padded(q, t), "B (I t) (K G) H -> B K G I t H", t=t, K=K)
    keys, values = (rearrange(padded(x, s), "B (J s) K H -> B K J s H", s=s) for x in (k, v))
    structure, operands = None, ()
    if isinstance(bias, PositionBias):
        leaves, tree = jax.tree.flatten(bias)
        structure = (tree, tuple(leaf.shape[1:] for leaf in leaves))
        operands = tuple(leaf.reshape(K, N // K, 1, -1) for leaf in leaves)
    elif bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -T % t), (0, -S % s)))
        operands = (rearrange(bias, "b (K G) (I t) S -> b K G I t S", K=K, t=t),)
    static = Static(scale, softcap, structure, _precision(q.dtype), platform)
    z = _attend(static, queries, keys, values, operands, make_grid(mask, t, s))
    return rearrange(z, "B K G I t H -> B (I t) (K G) H")[:, :T, :, :H]


def _check(bias: Any, pattern_fn: Any, dropout: Any, platform: str) -> None:
    if pattern_fn is not None:
        raise ValueError("'flash' never holds the attention pattern; read or edit it with implementation='einsum'")
    if dropout is not None:
        raise ValueError("'flash' has no dropout of the pattern; use implementation='chunked' or 'einsum'")
    if callable(bias) and not isinstance(bias, PositionBias):
        raise ValueError(
            f"'flash' goes head by head and takes a bias that is an array or a PositionBias, not {type(bias).__name__}; "
            "use implementation='chunked' or 'einsum'"
        )


def _power_of_two(size: int) -> int:
    """Returns the power of two from `size` up, at least 16: what Triton's matrix products take."""
    return max(16, 1 << (size - 1).bit_length())


def _widened(x: Array, platform: str) -> Array:
    if platform == "tpu":
        return x
    return jnp.pad(x, [(0, 0)] * 3 + [(0, _power_of_two(x.shape[-1]) - x.shape[-1])])


def _precision(dtype: Any) -> jax.lax.Precision:
    asked = jax.config.jax_default_matmul_precision
    if dtype != jnp.float32 or asked in (None, "default", "bfloat16", "fastest"):
        return jax.lax.Precision.DEFAULT
    return jax.lax.Precision.HIGHEST


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q: Array, k: Array, v: Array, bias: tuple[Array, ...], grid: Grid) -> Array:
    return _forward(static, q, k, v, bias, grid)[0]


def _forward(
    static: Static, q: Array, k: Array, v: Array, bias: tuple[Array, ...], grid: Grid
) -> tuple[Array, tuple[Any, ...]]:
    B, K, G, I, t, _ = q.shape
    z, lse = _launch(
        static,
        forward_kernel,
        {"b": B, "k": K, "g": G, "i": I},
        (*_terms(static, grid, bias, B, "k"), (q, "bkgi**"), (k, "bk***"), (v, "bk***")),
        ((q, "bkgi**"), (jax.ShapeDtypeStruct((B, K, G, I, 1, t), jnp.float32), "bkgi**")),
    )
    return z, (q, k, v, bias, grid, z, lse)


def _backward(static: Static, residuals: tuple[Any, ...], dz: Array) -> tuple[Any, ...]:
    q, k, v, bias, grid, z, lse = residuals
    (B, K, G, I, t, _), J = q.shape, k.shape[2]
    delta = jnp.einsum("BKGItH,BKGItH->BKGIt", dz, z, preferred_element_type=jnp.float32)[:, :, :, :, None]
    own = ((q, "bkgi**"), (k, "bk***"), (v, "bk***"), (dz, "bkgi**"), (lse, "bkgi**"), (delta, "bkgi**"))
    shares = [
        jax.ShapeDtypeStruct((B, K, G, I, *operand.shape[-2:]), jnp.float32) for operand in bias
    ]
    dq, *dbias = _launch(
        static,
        queries_kernel,
        {"b": B, "k": K, "g": G, "i": I},
        (*_terms(static, grid, bias, B, "k"), *own),
        ((q, "bkgi**"), *((share, "bkgi**") for share in shares)),
    )
    whole = ((q, "bk****"), (k, "bkj**"), (v, "bkj**"), (dz, "bk****"), (lse, "bk****"), (delta, "bk****"))
    dk, dv = _launch(
        static,
        keys_kernel,
        {"b": B, "k": K, "j": J},
        (*_terms(static, grid, bias, B, "j"), *whole),
        ((k, "bkj**"), (v, "bkj**")),
    )
    axes = (0, 3) if static.leaves else () # an array: over the batch if it has one row
    dbias = [_summed_to(operand.shape, share, bool(static.leaves)).astype(operand.dtype) for operand, share in zip(bias, dbias, strict=True)]
    return dq, dk, dv, tuple(dbias), None


def _summed_to(shape, share, leaves):
    if leaves:
        return share.sum(axis=(0, 3))
    return share if shape[0] == share.shape[0] else share.sum(axis=0, keepdims=True)


_attend.defvjp(_forward, _backward)


def _terms(static: Static, grid: Grid, bias: tuple[Array, ...], B: int, axis: str) -> tuple[Any, ...]:
    """Returns the operands that come before q, k and v, for programs of one block of queries ("k") or of keys ("j")."""
    rows = [None if x is None else x.swapaxes(0, 1)[:, :, None] for x in grid[:6]]
    q_positions, low, high, kv_positions, q_segments, kv_segments = rows
    queries = Queries(low, high, q_segments, q_positions if static.leaves else None)
    keys = Keys(kv_positions, kv_segments)
    active = grid.active_rows().transpose(2, 0, 1)
    if axis == "k":
        layouts = "bi**", "b***", "kg**" if static.leaves else "bkgi**"
    else:
        layouts = "b***", "bj**", "k***" if static.leaves else "bk***J"
        active = active.mT
    return (_span(active, B), ""), *zip((queries, keys, bias), layouts, strict=True)


def _span(active: Array, B: int) -> Span:
    first, stop = active.argmax(axis=2), active.shape[2] - active[:, :, ::-1].argmax(axis=2)
    stop = jnp.where(active.any(axis=2), stop, 0)
    return Span(*(jnp.broadcast_to(x.astype(jnp.int32), (B, x.shape[1])) for x in (first, stop)))


def _launch(static: Static, kernel: Any, grid: dict[str, int], operands: Any, results: Any) -> Any:
    def spec(layout: str, x: Any) -> pl.BlockSpec:
        if not layout:
            return pl.BlockSpec(memory_space=pltpu.SMEM if static.platform == "tpu" else None)
        block, names = [], []
        for letter, size in zip(layout, x.shape, strict=True):
            block.append(size if letter == "*" else None if letter.islower() else size // grid[letter.lower()])
            names.append(None if letter == "*" or size == 1 else letter.lower())
        at = [None if name is None else list(grid).index(name) for name in names]
        return pl.BlockSpec(tuple(block), lambda *ids: tuple(0 if i is None else ids[i] for i in at))

    in_specs = [jax.tree.map(partial(spec, layout), x) for x, layout in operands]
    out_specs = [spec(layout, x) for x, layout in results]
    how: dict[str, Any] = {
        "cpu": {"interpret": True},
        "gpu": {"compiler_params": pltriton.CompilerParams(num_warps=4, num_stages=2)},
        "tpu": {"compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel",) * len(grid), vmem_limit_bytes=2*VMEM)},
    }[static.platform]
    return pl.pallas_call(
        partial(kernel, static),
        grid=tuple(grid.values()),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
        **how,
    )(*(x for x, _ in operands))
