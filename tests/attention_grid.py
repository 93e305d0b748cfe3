"""The cells of the grid over attention: masks, head groupings, biases, types and lengths, and who refuses what.

`docs/update_attention.py` prints the table of support from `refusal`, which `test_attention_grid.py` holds to be true.
"""

import jax.numpy as jnp
import numpy as np
import oracle

import jaxformer as jf
from jaxformer.biases import Alibi, Relative, alibi_slopes

B, H, SCALE = 2, 8, 0.4
LENGTHS = (1, 7, 127, 128, 129, 192, 255)
HEADS = {"multi-head": (4, 4), "grouped": (4, 2), "multi-query": (4, 1)}
DTYPES = ("float32", "bfloat16")
BUCKETS, REACH = 8, 40

# Masks ----------------------------------------------------------------------------------------------------------------


def _rows(T):
    return np.tile(np.arange(T), (B, 1))


def _left(T):
    """The second row begins with padding, of a third of its length."""
    return np.stack([np.arange(T), np.arange(T) - T // 3]).clip(-1)


def _right(T):
    return np.where(np.arange(T) < np.array([[T], [T - T // 3]]), np.arange(T), -1)


def _segments(T):
    """The first row holds three documents, the second two and padding."""
    cuts = np.array([[T // 4, T // 2], [T // 3, T - T // 8]])
    numbers = 1 + (np.arange(T) >= cuts[:, :1]) + (np.arange(T) >= cuts[:, 1:])
    numbers[1] = np.where(numbers[1] == 3, 0, numbers[1])
    return numbers


def _packed(T):
    return {"causal": True, "segments": _segments(T)}


CROSS = "other queries than keys"
MASKS = {
    "causal": lambda T: (_rows(T), {"causal": True}),
    "full": lambda T: (_rows(T), {}),
    "left padding": lambda T: (_left(T), {"causal": True}),
    "right padding": lambda T: (_right(T), {}),
    "packed segments": lambda T: (
        oracle.positions_from_segments(_segments(T)),
        {"causal": True, "segments": _segments(T)},
    ),
    "causal window": lambda T: (_left(T), {"causal": True, "window": max(1, T // 3)}),
    "window to both sides": lambda T: (_rows(T), {"window": max(1, T // 5)}),
    "prefix": lambda T: (_left(T), {"causal": True, "prefix": np.array([[T // 2], [T // 4]])}),
    CROSS: lambda T: (_right(T), {"queries": _rows(T // 2 + 1)}),
}
"""Kind -> positions of the keys, and what else the mask is made of; queries are the keys' tokens unless given."""


def mask_of(kind, T):
    """The mask of a kind for the package, and the same for the oracle: bool [B 1 T S]."""
    positions, options = MASKS[kind](T)
    queries, segments = options.get("queries"), options.get("segments")
    options = {name: value for name, value in options.items() if name in ("causal", "window", "prefix")}
    allowed = oracle.allowed(positions if queries is None else queries, positions, segments, segments, **options)
    keys = jnp.asarray(positions)
    numbers = None if segments is None else jnp.asarray(segments)
    if "prefix" in options:
        options["prefix"] = jnp.asarray(options["prefix"])
    q = keys if queries is None else jnp.asarray(queries)
    return jf.Mask(q, keys, numbers, numbers, ordered=True, **options), allowed


# Biases ---------------------------------------------------------------------------------------------------------------


def _no_bias(rng, N, mask):
    return None, None, None


def _array(rng, N, mask):
    shape = (B, N, mask.q_positions.shape[1], mask.kv_positions.shape[1])
    bias = rng.normal(size=shape).astype(np.float32)
    return jnp.asarray(bias), bias, lambda dbias: dbias


def _slopes(rng, N, mask):
    at = np.asarray(mask.q_positions), np.asarray(mask.kv_positions)
    distance = abs(at[0][:, None, :, None] - at[1][:, None, None, :])
    return Alibi(jnp.asarray(alibi_slopes(N))), oracle.alibi(*at, N), lambda d: -(d * distance).sum(axis=(0, 2, 3))


def _table(rng, N, mask):
    table, two_sided = rng.normal(size=(N, BUCKETS)).astype(np.float32), not mask.is_causal
    distances = np.asarray(mask.q_positions)[:, :, None] - np.asarray(mask.kv_positions)[:, None, :]
    unique, where = np.unique(distances, return_inverse=True)
    of_distance = np.array([oracle.relative_bucket(int(distance), BUCKETS, REACH, two_sided) for distance in unique])
    buckets = of_distance[where].reshape(distances.shape)

    def gradient(dbias):
        return np.stack([(dbias * (buckets == r)[:, None]).sum(axis=(0, 2, 3)) for r in range(BUCKETS)], axis=1)

    return Relative(jnp.asarray(table), two_sided, REACH), np.moveaxis(table[:, buckets], 0, 1), gradient


BIASES = {"none": _no_bias, "array": _array, "slopes (ALiBi)": _slopes, "table of distances (T5)": _table}
"""Kind -> the bias for the package, as an array for the oracle, and the gradient of its leaves from the array's."""

# Who refuses what -----------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = ("einsum", "chunked", "splash", "cudnn")
_ANY = "use implementation='flash', 'chunked' or 'einsum'"


def refusal(implementation, mask="causal", bias="none", dtype="bfloat16", T=128):
    """The message with which an implementation refuses a cell of the grid, or None: it must be right there."""
    if implementation == "splash":
        if bias != "none":
            return f"'splash' cannot honour a bias; {_ANY}"
        if mask == "prefix":
            return f"'splash' cannot honour a prefix; {_ANY}"
    if implementation == "cudnn":
        if bias not in ("none", "array"):
            return (
                "'cudnn' cannot honour a bias that is a function of positions; use implementation='flash' or 'chunked'"
            )
        if dtype == "float32":
            return f"'cudnn' takes q, k and v all in float16 or all in bfloat16, not ['float32']; {_ANY}"
        by_lengths = bias == "none" and mask in (
            "causal",
            "full",
            "left padding",
            "right padding",
            "causal window",
            CROSS,
        )
        queries = T // 2 + 1 if mask == CROSS else T
        if not by_lengths and (queries % 2 or T % 2):
            return (
                f"'cudnn' needs even lengths with a bias, or with this mask, and they are {queries} queries and {T} "
                "keys; use implementation='flash' or 'chunked', or pad the rows"
            )
    return None
