"""The cells of the grid over attention: masks, head groupings, biases, types and lengths, and who refuses what.

`docs/update_attention.py` prints the table of support from `refusal`, which `test_attention_grid.py` holds to be true.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxformer as jf
from jaxformer.attention import Dropout
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

IMPLEMENTATIONS = ("einsum", "chunked", "flash", "splash", "cudnn")
OPTIONS = {
    "softcap": lambda: {"softcap": 2.0},
    "any function of positions": lambda: {"bias": jax.tree_util.Partial(_slanted, jnp.asarray(0.1))},
    "dropout of the pattern": lambda: {"dropout": Dropout(jax.random.key(0), 0.3)},
    "reading the pattern": lambda: {"pattern_fn": lambda pattern: pattern * 0.5},
}
"""What else may be asked for, as arguments of `attention`."""
_ANY = "use implementation='flash', 'chunked' or 'einsum'"
_BY_LENGTHS = ("causal", "full", "left padding", "right padding", "causal window", CROSS)


def _slanted(slope, q_positions, kv_positions):
    return slope * (q_positions[:, None, :, None] - 2.0 * kv_positions[:, None, None, :]) * jnp.ones((1, 4, 1, 1))


def refusal(implementation, mask="causal", bias="none", dtype="bfloat16", T=128, option=None):
    """The message with which an implementation refuses a cell of the grid, or None: it must be right there."""
    refusals = {"chunked": _of_chunked, "flash": _of_flash, "splash": _of_splash, "cudnn": _of_cudnn}
    return refusals[implementation](mask, bias, dtype, T, option) if implementation in refusals else None


def _of_chunked(mask, bias, dtype, T, option):
    if option == "reading the pattern":
        return "'chunked' never holds the attention pattern; read or edit it with implementation='einsum'"
    return None


def _of_flash(mask, bias, dtype, T, option):
    if option == "reading the pattern":
        return "'flash' never holds the attention pattern; read or edit it with implementation='einsum'"
    if option == "dropout of the pattern":
        return "'flash' has no dropout of the pattern; use implementation='chunked' or 'einsum'"
    if option == "any function of positions":
        return (
            "'flash' takes a bias that is an array or a PositionBias, which it can call for one head, and not a "
            "Partial; use implementation='chunked' or 'einsum'"
        )
    return None


def _of_splash(mask, bias, dtype, T, option):
    if bias != "none" or option == "any function of positions":
        return f"'splash' cannot honour a bias; {_ANY}"
    if option == "reading the pattern":
        return "'splash' cannot honour pattern_fn; use implementation='einsum'"
    if option == "dropout of the pattern":
        return "'splash' cannot honour dropout of the pattern; use implementation='chunked' or 'einsum'"
    return f"'splash' cannot honour a prefix; {_ANY}" if mask == "prefix" else None


def _of_cudnn(mask, bias, dtype, T, option):
    if option == "softcap":
        return f"'cudnn' cannot honour a softcap; {_ANY}"
    if option == "reading the pattern":
        return "'cudnn' cannot honour pattern_fn; use implementation='einsum'"
    if option == "dropout of the pattern":
        return "'cudnn' cannot honour dropout of the pattern; use implementation='chunked' or 'einsum'"
    if bias not in ("none", "array") or option == "any function of positions":
        functions = "a bias that is a function of positions"
        return f"'cudnn' cannot honour {functions}; use implementation='flash' or 'chunked'"
    if dtype == "float32":
        return f"'cudnn' takes q, k and v all in float16 or all in bfloat16, not ['float32']; {_ANY}"
    queries = T // 2 + 1 if mask == CROSS else T
    if (queries % 2 or T % 2) and (bias != "none" or mask not in _BY_LENGTHS):
        return (
            f"'cudnn' needs even lengths with a bias, or with this mask, and they are {queries} queries and {T} "
            "keys; use implementation='flash' or 'chunked', or pad the rows"
        )
    return None


def support():
    """Yields the rows of the table of support: a heading and, for each implementation, whether it is honoured."""
    rows = {f"mask: {mask}": {"mask": mask} for mask in MASKS}
    rows |= {f"heads: {heads}": {} for heads in HEADS}
    rows |= {f"bias: {bias}": {"bias": bias} for bias in BIASES}
    rows |= {f"{dtype}": {"dtype": dtype} for dtype in DTYPES}
    rows |= {option: {"option": option} for option in OPTIONS}
    rows["odd lengths"] = {"T": 127}
    rows["odd lengths, packed or with a bias"] = {"T": 127, "mask": "packed segments"}
    for name, cell in rows.items():
        yield name, [refusal(implementation, **cell) is None for implementation in IMPLEMENTATIONS]
