"""Exact attention as one fused kernel a pass, forward and backward, for GPU and TPU; interpreted on a CPU.

    z = softmax(scale * q k^T + bias) v        by blocks whose scores live in the chip's own memory only

(Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2"). The arithmetic is that of `chunked`. This file cuts
the arrays into blocks, finds for each block of queries the span of key blocks in which the mask allows anything (the
other way round for the gradients of the keys), and launches the kernels of `flash_kernels`, which loop over that span.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float

from jaxformer.attention.bias import PositionBias
from jaxformer.attention.dropout import Dropout
from jaxformer.attention.flash_kernels import Keys, Queries, Span, Static, forward_kernel, keys_kernel, queries_kernel
from jaxformer.attention.grid import Grid, make_grid, padded
from jaxformer.masks import Mask

QUERIES = {"cpu": 128, "gpu": 64, "tpu": 256}
KEYS = {"cpu": 128, "gpu": 64, "tpu": 256}
"""Tokens in a block by platform, powers of two. On a GPU 64 leaves room for float32 heads of 128 in shared memory."""

VMEM = 40 * 2**20
"""Bytes of operands that a program may hold in a TPU core's own memory; from v5e on a core has 64 MiB or more."""


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
    """Attends in one kernel, with gradients to q, k, v and the bias; see `attention` for the arguments.

    Whatever the mask, blocks outside of the span of its row are not touched. Key/value heads are read where they lie,
    never repeated. Products of float32 follow `jax_default_matmul_precision`: unset, they are rounded as everywhere
    else on that platform (TF32, bfloat16); asked for more than that, they are exact.

    Args:
      bias: an array, whose gradient has a row for each of the batch until they are summed; or a `PositionBias`, no
        block of which leaves the kernel. Kernels know no gather, slice or array constant: pick an entry of a leaf by a
        masked sum. On a GPU a leaf has a power of two of numbers a head.
      platform: what the call is compiled for: "gpu", "tpu" (v5e and later; Mosaic refuses it for v4), or
        "cpu" (interpreted, slowly). None: `jax.default_backend()`; give it to compile for another machine.

    Raises:
      ValueError: a pattern_fn, dropout, another function as bias, or another platform; on a GPU, a leaf of a size that
        is no power of two; on a TPU, float16, or too long rows: a program holds the keys and values of a head, and for
        the gradients the queries of the heads that share it.
    """
    platform = platform or jax.default_backend()
    _check(q.dtype, bias, pattern_fn, dropout, platform)
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    t, s = _block(T, QUERIES[platform], platform), _block(S, KEYS[platform], platform)
    q, k, v = (_widened(x, platform) for x in (q, k, v))
    queries = rearrange(padded(q, t), "B (I t) (K G) H -> B K G I t H", t=t, K=K)
    keys, values = (rearrange(padded(x, s), "B (J s) K H -> B K J s H", s=s) for x in (k, v))
    leaves: Any = None
    operands: tuple[Array, ...] = ()
    if isinstance(bias, PositionBias):
        parts, tree = jax.tree.flatten(bias)
        leaves = (tree, tuple(part.shape[1:] for part in parts))
        operands = tuple(part.reshape(K, N // K, 1, -1) for part in parts)
    elif bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -T % t), (0, -S % s)))
        operands = (rearrange(bias, "b (K G) (I t) S -> b K G I t S", K=K, t=t),)
    static = Static(scale, softcap, leaves, _precision(q.dtype), platform)
    z = _attend(static, queries, keys, values, operands, make_grid(mask, t, s))
    return rearrange(z, "B K G I t H -> B (I t) (K G) H")[:, :T, :, :H]


def _check(dtype: Any, bias: Any, pattern_fn: Any, dropout: Any, platform: str) -> None:
    if platform not in QUERIES:
        raise ValueError(f"'flash' has no kernel for platform {platform!r}, only for {list(QUERIES)}; use 'chunked'")
    if pattern_fn is not None:
        raise ValueError("'flash' never holds the attention pattern; read or edit it with implementation='einsum'")
    if dropout is not None:
        raise ValueError("'flash' has no dropout of the pattern; use implementation='chunked' or 'einsum'")
    if callable(bias) and not isinstance(bias, PositionBias):
        raise ValueError(
            f"'flash' takes a bias that is an array or a PositionBias, which it can call for one head, and not a "
            f"{type(bias).__name__}; use implementation='chunked' or 'einsum'"
        )
    if platform == "tpu" and dtype == jnp.float16:
        raise ValueError("'flash' cannot read float16 on a TPU; use bfloat16, or implementation='chunked'")
    sizes = [math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(bias)] if isinstance(bias, PositionBias) else []
    if platform == "gpu" and any(size & (size - 1) for size in sizes):
        raise ValueError(
            f"the bias has leaves of {sizes} numbers a head; on a GPU 'flash' needs powers of two: pad them, or use "
            "implementation='chunked'"
        )


def _block(tokens: int, most: int, platform: str) -> int:
    """Returns the size of a block of so many tokens; a TPU reads along rows at multiples of 128 only."""
    return max(min(most, _power_of_two(tokens)), 128 if platform == "tpu" else 16)


def _power_of_two(size: int) -> int:
    """Returns the power of two from `size` up that Triton's products of matrices take, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _widened(x: Array, platform: str) -> Array:
    """Pads the heads with zeros, which add nothing to a product, to a width that Triton can load; Mosaic loads any."""
    width = x.shape[-1] if platform == "tpu" else _power_of_two(x.shape[-1])
    return jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])


def _precision(dtype: Any) -> jax.lax.Precision:
    """Returns the precision of products: Mosaic knows only these two, so that anything above the least is the most."""
    asked = jax.default_matmul_precision.value
    least = dtype != jnp.float32 or asked in (None, "default", "fastest", "bfloat16")
    return jax.lax.Precision.DEFAULT if least else jax.lax.Precision.HIGHEST


# The passes -----------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q: Array, k: Array, v: Array, bias: tuple[Array, ...], grid: Grid) -> Array:
    return _forward(static, q, k, v, bias, grid)[0]


def _forward(
    static: Static, q: Array, k: Array, v: Array, bias: tuple[Array, ...], grid: Grid
) -> tuple[Array, tuple[Any, ...]]:
    B, K, G, blocks, t, _ = q.shape
    z, lse = _launch(
        static,
        forward_kernel,
        {"b": B, "k": K, "g": G, "i": blocks},
        (*_along_keys(static, grid, bias, B), (q, "bkgi**"), (k, "bk***"), (v, "bk***")),
        ((q, "bkgi**"), (jax.ShapeDtypeStruct((B, K, G, blocks, 1, t), jnp.float32), "bkgi**")),
    )
    return z, (q, k, v, bias, grid, z, lse)


def _backward(static: Static, residuals: tuple[Any, ...], dz: Array) -> tuple[Any, ...]:
    q, k, v, bias, grid, z, lse = residuals
    (B, K, G, blocks), J = q.shape[:4], k.shape[2]
    delta = jnp.einsum("BKGItH,BKGItH->BKGIt", dz, z, preferred_element_type=jnp.float32)[..., None, :]
    shares = [jax.ShapeDtypeStruct((B, K, G, blocks, *operand.shape[-2:]), jnp.float32) for operand in bias]
    queries = [(x, "bkgi**") for x in (dz, lse, delta)]
    dq, *dbias = _launch(
        static,
        queries_kernel,
        {"b": B, "k": K, "g": G, "i": blocks},
        (*_along_keys(static, grid, bias, B), (q, "bkgi**"), (k, "bk***"), (v, "bk***"), *queries),
        ((q, "bkgi**"), *((share, "bkgi**") for share in shares)),
    )
    queries = [(x, "bk****") for x in (dz, lse, delta)]
    dk, dv = _launch(
        static,
        keys_kernel,
        {"b": B, "k": K, "j": J},
        (*_along_queries(static, grid, bias, B), (q, "bk****"), (k, "bkj**"), (v, "bkj**"), *queries),
        ((k, "bkj**"), (v, "bkj**")),
    )
    if static.leaves:
        dbias = [share.sum(axis=(0, 3)) for share in dbias]
    elif bias and bias[0].shape[0] == 1:
        dbias = [dbias[0].sum(axis=0, keepdims=True)]
    return dq, dk, dv, tuple(d.astype(x.dtype) for d, x in zip(dbias, bias, strict=True)), None


_attend.defvjp(_forward, _backward)


# Launching ------------------------------------------------------------------------------------------------------------


def _along_keys(static: Static, grid: Grid, bias: tuple[Array, ...], B: int) -> tuple[tuple[Any, str], ...]:
    """Returns what a program of one block of queries sees of mask and bias, with layouts (see `_launch`)."""
    queries, keys, active = _terms(static, grid)
    layout = "kg**" if static.leaves else "bkgi**"
    return (_span(active, B), ""), (queries, "bi**"), (keys, "b***"), (bias, layout)


def _along_queries(static: Static, grid: Grid, bias: tuple[Array, ...], B: int) -> tuple[tuple[Any, str], ...]:
    """Returns what a program of one block of keys sees of mask and bias, with layouts (see `_launch`)."""
    queries, keys, active = _terms(static, grid)
    layout = "k***" if static.leaves else "bk***J"
    return (_span(active.mT, B), ""), (queries, "b***"), (keys, "bj**"), (bias, layout)


def _terms(static: Static, grid: Grid) -> tuple[Queries, Keys, Bool[Array, "b I J"]]:
    rows = {name: None if x is None else x.swapaxes(0, 1)[:, :, None] for name, x in grid._asdict().items()}
    positions = rows["q_positions"] if static.leaves else None
    queries = Queries(rows["low"], rows["high"], rows["q_segments"], positions)
    return queries, Keys(rows["kv_positions"], rows["kv_segments"]), grid.active_rows().transpose(2, 0, 1)


def _span(active: Bool[Array, "b I J"], B: int) -> Span:
    first, stop = active.argmax(axis=2), active.shape[2] - active[:, :, ::-1].argmax(axis=2)
    stop = jnp.where(active.any(axis=2), stop, 0)
    return Span(*(jnp.broadcast_to(x.astype(jnp.int32), (B, x.shape[1])) for x in (first, stop)))


def _launch(static: Static, kernel: Callable[..., None], grid: dict[str, int], operands: Any, results: Any) -> Any:
    """Runs a program for each point of the grid on operands (pytree, layout), into results (shape, layout).

    A layout has a letter for each axis of an array: "*" gives a program the whole axis, "i" its own index of grid axis
    i (0 where the array has but one), "I" its own of as many equal pieces. An empty layout is for scalars.
    """

    def spec(layout: str, x: Any) -> pl.BlockSpec:
        if not layout:
            return pl.BlockSpec(memory_space=pltpu.SMEM if static.platform == "tpu" else None)
        axes = zip(layout, x.shape, strict=True)
        at = [None if axis == "*" or n == 1 else list(grid).index(axis.lower()) for axis, n in axes]
        return pl.BlockSpec(_shares(layout, x, grid), lambda *ids: tuple(0 if i is None else ids[i] for i in at))

    in_specs = [jax.tree.map(partial(spec, layout), x) for x, layout in operands]
    out_specs = [spec(layout, x) for x, layout in results]
    if static.platform == "tpu":
        _check_memory(grid, (*operands, *results))
    return pl.pallas_call(
        partial(kernel, static),
        grid=tuple(grid.values()),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in results],
        interpret=static.platform == "cpu",
        compiler_params=_compiler_params(static.platform, len(grid), results[0][0]),
    )(*(x for x, _ in operands))


def _shares(layout: str, x: Any, grid: dict[str, int]) -> tuple[int | None, ...]:
    """Returns how much of each axis a program gets; None for one index of an axis, which its block then lacks."""
    sizes = zip(layout, x.shape, strict=True)
    return tuple(n if axis == "*" else None if axis.islower() else n // grid[axis.lower()] for axis, n in sizes)


def _compiler_params(platform: str, axes: int, heads: Any) -> Any:
    if platform == "gpu":  # Without these a GPU's kernels go to Mosaic, which cannot compile them.
        # Without a bias, four warps spill an H100's registers from 128 lanes of bfloat16 or 64 of float32 on; eight
        # spill from 128 lanes of float32 on.
        wide = heads.shape[-1] * heads.dtype.itemsize > 128
        return pltriton.CompilerParams(num_warps=8 if wide else 4, num_stages=2)
    if platform == "tpu":
        parallel: Any = ("parallel",) * axes
        return pltpu.CompilerParams(dimension_semantics=parallel, vmem_limit_bytes=VMEM + 16 * 2**20)
    return None


def _check_memory(grid: dict[str, int], operands: Any) -> None:
    """Refuses programs that hold too much: each block twice, since the next is fetched while one is in use."""
    total = 0
    for x, layout in operands:
        for part in jax.tree.leaves(x) if layout else []:
            *lead, columns = (size for size in _shares(layout, part, grid) if size is not None)
            total += 2 * math.prod(lead) * (columns + -columns % 128) * part.dtype.itemsize
    if total > VMEM:
        raise ValueError(
            f"'flash' would hold {total >> 20} MiB of these tokens and heads in a TPU's fast memory, where it may fill "
            f"{VMEM >> 20}; use implementation='chunked', or 'splash' on a TPU"
        )
