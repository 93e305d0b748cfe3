"""Block-sparse attention: a layout says which blocks of the pattern exist, and only those are computed.

    allowed'[t, s] = allowed[t, s]  and  layout[t // block, s // block]

(Child et al. 2019, "Generating Long Sequences with Sparse Transformers", sections 4.2, 4.3 and 5.5.) It is softmax
attention under a mask that positions cannot say, so it is not in `IMPLEMENTATIONS`; a model uses it after
`IMPLEMENTATIONS["strided"] = partial(block_sparse_attention, layout=strided(16, 4), block=128)` with
`attention="strided"` in its config.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.attention.chunked import attend_blocks
from jaxformer.attention.dropout import Dropout
from jaxformer.masks import Mask


def local(blocks: int, reach: int) -> Bool[np.ndarray, "I I"]:
    """Returns the layout in which a block sees itself and `reach` blocks to either side."""
    i, j = np.indices((blocks, blocks))
    return abs(i - j) <= reach


def strided(blocks: int, stride: int) -> Bool[np.ndarray, "I I"]:
    """Returns the layout of the last `stride` blocks and of every stride-th block besides (section 4.3, strided).

    Both halves of the factorised pattern are in one layout, as in the paper's merged heads; the mask makes it causal.
    """
    i, j = np.indices((blocks, blocks))
    return (abs(i - j) < stride) | ((i - j) % stride == 0)


def fixed(blocks: int, stride: int, summaries: int = 1) -> Bool[np.ndarray, "I I"]:
    """Returns the layout of a block's own stretch of `stride` blocks and of the last `summaries` of every stretch.

    Section 4.3, fixed; both halves of the factorised pattern in one layout.
    """
    i, j = np.indices((blocks, blocks))
    return (i // stride == j // stride) | (j % stride >= stride - summaries)


def block_sparse_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Mask,
    bias: Any = None,
    *,
    layout: Bool[np.ndarray, "I J"],
    block: int,
    scale: float,
    softcap: float | None = None,
    pattern_fn: Callable[[Array], Array] | None = None,
    dropout: Dropout | None = None,
) -> Float[Array, "B T N H"]:
    """Attends within the blocks of a layout; for the other arguments see `attention.attention`.

    Time grows with the number of blocks in which layout and mask leave anything, memory with T. The layout is of
    *indices*, as they lie in the arrays; heads that are to have layouts of their own are calls of their own.

    Args:
      layout: True where a block of queries may attend to a block of keys. Shorter texts use its first rows and columns.
      block: tokens in a block; from 64 on the products are fast.

    Raises:
      ValueError: a layout of fewer blocks than the lengths have, or a pattern_fn.
    """
    if pattern_fn is not None:
        raise ValueError("block-sparse attention never holds the pattern; read or edit it with implementation='einsum'")
    if block < 1:
        raise ValueError(f"block={block} holds no token; it must be at least 1")
    needed = -(-q.shape[1] // block), -(-k.shape[1] // block)
    if layout.ndim != 2 or layout.shape[0] < needed[0] or layout.shape[1] < needed[1]:
        raise ValueError(
            f"the layout is of {layout.shape} blocks, but {q.shape[1]} queries and {k.shape[1]} keys are {needed} "
            f"blocks of {block}; make it with as many"
        )
    layout = layout[: needed[0], : needed[1]]
    return attend_blocks(
        q, k, v, mask, bias, (block, block), scale=scale, softcap=softcap, dropout=dropout, layout=layout
    )
