"""Pairs of texts as batches: a source that is read, and a target that is written.

source       a b c END          positions 0 1 2 3
target       START d e          labels    d e END
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from jaxformer.data import Batch
from jaxformer.trees import Leaf


@partial(jax.tree_util.register_dataclass, data_fields=["ids", "positions", "target"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Pairs:
    """What an encoder-decoder's training step takes: a source in each row, and the target as a `Batch`."""

    ids: Leaf
    """[B S] int32: the sources."""
    positions: Leaf
    """[B S] int32: from 0 in each row; -1 at padding."""
    target: Batch
    """[B T]: a START and the target as ids, the target and its end as labels."""


def pad_pairs(
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    source_len: int,
    target_len: int,
    start_id: int,
    end_id: int,
    pad_id: int = 0,
) -> Pairs:
    """Puts pairs of texts into rows of one shape, padded on the right; both texts get their end, and nothing is cut.

    Args:
      source_len, target_len: columns; the end of a text takes one.
      start_id: with which targets begin.

    Raises:
      ValueError: no pairs, unequal numbers of texts, or one that is too long, by its number.
    """
    if not sources or len(sources) != len(targets):
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets make no pairs; give one of each, or more")
    ids, positions = _rows([[*source, end_id] for source in sources], source_len, pad_id, "source")
    labels, target_positions = _rows([[*target, end_id] for target in targets], target_len, pad_id, "target")
    target_ids, _ = _rows([[start_id, *target] for target in targets], target_len, pad_id, "target")
    real = target_positions >= 0
    target = Batch(target_ids, labels, real.astype(np.float32), target_positions, real.astype(np.int32))
    return Pairs(ids, positions, target)


def _rows(texts: Sequence[Sequence[int]], length: int, pad_id: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and positions [B length]."""
    ids, positions = np.full((len(texts), length), pad_id, np.int32), np.full((len(texts), length), -1, np.int32)
    for row, text in enumerate(texts):
        if len(text) > length:
            raise ValueError(f"{kind} {row} has {len(text)} tokens with its end, over the {length} that fit; cut it")
        ids[row, : len(text)], positions[row, : len(text)] = text, np.arange(len(text))
    return ids, positions
