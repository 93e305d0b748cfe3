"""What counting alone reaches: an interpolated Kneser-Ney model of bytes, as a yardstick for trained models.

    p_k(w | h) = max(c(h w) - D_k, 0) / c(h) + D_k N(h) / c(h) p_{k-1}(w | h')        p_0 = 1 / 257

c counts occurrences in the highest order and distinct symbols to the left in the lower ones; N(h) is the number of
distinct symbols after h, h' is h without its first symbol, and D_k = n1 / (n1 + 2 n2) with n1, n2 the numbers of
k-grams counted once and twice (Chen and Goodman 1999, An empirical study of smoothing techniques). Symbols are the 256
bytes and the end of a document; before a document stand begin symbols, so that no context crosses into another one.

Run it for the losses of orders 1 to 6 on the prose of the running Python.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.corpus import python_prose, split_documents

SYMBOLS = 257
"""What is predicted: 256 bytes, and 256 for the end of a document."""

_BEGIN = 257  # only in contexts
_BASE = 258
_MAX_ORDER = 7  # 258 ** 7 < 2 ** 64 < 258 ** 8


class Level(NamedTuple):
    """The k-grams of one order; a gram is a number in base 258 whose last digit is the predicted symbol."""

    grams: np.ndarray
    """uint64 [grams], sorted."""
    counts: np.ndarray
    """float64 [grams]."""
    contexts: np.ndarray
    """uint64 [contexts], sorted: grams without their last digit."""
    totals: np.ndarray
    """float64 [contexts]: sum of the counts after a context."""
    distinct: np.ndarray
    """float64 [contexts]: number of distinct symbols after a context."""
    discount: float


def fit(documents: Sequence[str], order: int) -> list[Level]:
    """Count a corpus into the levels 1 ... order.

    Raises:
      ValueError: an order outside 1 ... 7, or no documents.
    """
    if not 1 <= order <= _MAX_ORDER:
        raise ValueError(f"order={order} is outside 1 ... {_MAX_ORDER}, the longest grams that fit in 64 bits")
    grams, counts = np.unique(_grams(documents, order), return_counts=True)
    levels = [_level(grams, counts)]
    for k in range(order - 1, 0, -1):
        grams, counts = np.unique(grams % np.uint64(_BASE**k), return_counts=True)
        levels.append(_level(grams, counts))
    return levels[::-1]


def probabilities(levels: Sequence[Level], grams: np.ndarray) -> np.ndarray:
    """Return the probability [grams] of the last symbol of each gram, given the symbols before it."""
    result = np.full(len(grams), 1 / SYMBOLS)
    for k, level in enumerate(levels, start=1):
        suffixes = grams % np.uint64(_BASE**k)
        contexts = suffixes // np.uint64(_BASE)
        count = _look_up(level.grams, level.counts, suffixes)
        total = _look_up(level.contexts, level.totals, contexts)
        distinct = _look_up(level.contexts, level.distinct, contexts)
        kept = np.maximum(count - level.discount, 0) + level.discount * distinct * result
        result = np.where(total > 0, kept / np.maximum(total, 1), result)
    return result


def kneser_ney_nats_per_byte(train: Sequence[str], validation: Sequence[str], order: int = 5) -> float:
    """Return the loss of an n-gram model of bytes in nats per byte of validation.

    The ends of documents are predicted too, and their loss is counted, but not their number: the sum over all bytes
    and ends is divided by the number of bytes, as for a subword model that predicts END.

    Args:
      train: documents to count.
      validation: documents to score.
      order: length of the longest grams, the predicted byte included; 1 to 7.

    Raises:
      ValueError: an order outside 1 ... 7, no documents, or no bytes in validation.
    """
    size = sum(len(document.encode()) for document in validation)
    if not size:
        raise ValueError("validation holds no bytes; give at least one document that is not empty")
    levels = fit(train, order)
    return float(-np.log(probabilities(levels, _grams(validation, order))).sum() / size)


def _grams(documents: Sequence[str], order: int) -> np.ndarray:
    """Return the gram that ends at each byte and at each end of a document, in order of the text."""
    if not documents:
        raise ValueError("there are no documents; give at least one")
    padding = np.full(order - 1, _BEGIN, np.uint64)
    end = np.array([SYMBOLS - 1], np.uint64)
    texts = [np.frombuffer(document.encode(), np.uint8).astype(np.uint64) for document in documents]
    symbols = np.concatenate([part for text in texts for part in (padding, text, end)])
    grams = np.zeros(len(symbols) - order + 1, np.uint64)
    for k in range(order):
        grams = grams * np.uint64(_BASE) + symbols[k : k + len(grams)]
    return grams[grams % np.uint64(_BASE) != _BEGIN]


def _level(grams: np.ndarray, counts: np.ndarray) -> Level:
    contexts, starts, distinct = np.unique(grams // np.uint64(_BASE), return_index=True, return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return Level(
        grams=grams,
        counts=counts.astype(np.float64),
        contexts=contexts,
        totals=np.add.reduceat(counts, starts).astype(np.float64),
        distinct=distinct.astype(np.float64),
        # Where nothing was counted once the estimate is 0, and unseen symbols would have no probability.
        discount=once / (once + 2 * twice) if once else 0.5,
    )


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, 0 for those that are not among the sorted keys."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


def main() -> None:
    """Print the loss of each order on a tenth of the documents that was not counted."""
    train, validation = split_documents(python_prose(), fraction=0.1, seed=0)
    for order in range(1, 7):
        start = time.perf_counter()
        loss = kneser_ney_nats_per_byte(train, validation, order)
        print(f"order {order}: {loss:.4f} nats per byte, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
