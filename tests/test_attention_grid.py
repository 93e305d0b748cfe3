"""Every implementation x kind of mask x head grouping x bias x type x length: the oracle's, with all gradients, or the
refusal that `attention_grid.refusal` foretells, word by word.
"""

import itertools
import re
import zlib
from pathlib import Path

import attention_grid as grid
import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import BFLOAT16, CACHED, GRADIENT

import jaxformer as jf
from jaxformer.attention import attention, chunked, cudnn, splash
from jaxformer.attention.dropout import keep_weights
from jaxformer.masks import FAR

TOLERANCE = {"float32": (CACHED, GRADIENT), "bfloat16": (BFLOAT16, BFLOAT16)}


BY_DATA = ("einsum", "chunked", "flash")
"""Implementations for which all parts of a mask may be data, so that most kinds are one program."""


def whole(mask):
    """The same mask with all of its parts, those that it lacks neutral."""
    numbers = (jnp.ones_like(mask.q_positions), jnp.ones_like(mask.kv_positions))
    if mask.q_segments is not None:
        numbers = (mask.q_segments, mask.kv_segments + 0)  # two arrays, as those of ones are
    window = jnp.asarray(FAR if mask.window is None else mask.window)
    prefix = mask.prefix
    if mask.is_causal and prefix is None:
        prefix = jnp.zeros((mask.q_positions.shape[0], 1), jnp.int32)
    made = jf.Mask(mask.q_positions, mask.kv_positions, *numbers, mask.is_causal, window, prefix=prefix)
    np.testing.assert_array_equal(made.dense(), mask.dense())
    return made


def cell(mask, heads, bias, T):
    """Inputs of a cell, exact in bfloat16, and what the oracle makes of them: z and the gradients of sum(z * dz).

    With each gradient goes the size of what was added up for it: a leaf of a bias is a sum over all rows of the pattern
    in which large terms cancel, and roundings in so many rows add up as the root of their number.
    """
    rng = np.random.default_rng(zlib.crc32(f"{mask} {heads} {bias} {T}".encode()))
    (N, K), (made, allowed) = grid.HEADS[heads], grid.mask_of(mask, T)
    Q = allowed.shape[2]
    q, k, v, dz = (draw.exact(rng, (grid.B, size, n, grid.H)) for size, n in ((Q, N), (T, K), (T, K), (Q, N)))
    given, array, of_leaves = grid.BIASES[bias](rng, N, made)
    z = oracle.attention(q, k, v, allowed, array, scale=grid.SCALE)
    *gradients, dbias = oracle.attention_gradients(q, k, v, allowed, array, dz, scale=grid.SCALE)
    sizes = [abs(gradient).max() for gradient in gradients]
    if of_leaves is not None:
        gradients.append(of_leaves(dbias))
        sizes.append(max(abs(gradients[-1]).max(), abs(of_leaves(abs(dbias))).max() / np.sqrt(grid.B * Q)))
    return made, given, (q, k, v, dz), allowed, z, list(zip(gradients, sizes, strict=True))


def value_and_gradients(implementation, mask, bias, arrays, **options):
    """z and the gradients to q, k, v and to the leaves of the bias."""
    q, k, v, dz = arrays

    def run(q, k, v, bias):
        return attention(q, k, v, mask, bias, scale=grid.SCALE, implementation=implementation, **options)

    z, pull = jax.vjp(run, q, k, v, bias)
    return z, *jax.tree.leaves(pull(dz))


compiled = jax.jit(value_and_gradients, static_argnums=0)


@pytest.fixture(autouse=True)
def cudnn_by_xla(monkeypatch):
    """The same function of JAX on its other backend: cuDNN needs a GPU."""
    monkeypatch.setattr(cudnn, "IMPLEMENTATION", "xla")
    monkeypatch.setattr(cudnn, "_check_device", lambda H: None)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that rows of some hundred tokens are several blocks, and blocks hide in part and as a whole."""
    monkeypatch.setattr(chunked, "QUERIES", 64)
    monkeypatch.setattr(chunked, "KEYS", 96)
    monkeypatch.setattr(splash, "BLOCK", splash.LANES)


@pytest.fixture(autouse=True)
def forgotten():
    """Frees the programs of a test, which no other test runs: together they would take several GB."""
    yield
    jax.clear_caches()


def check(implementation, made, given, arrays, allowed, expected, expected_gradients):
    dtype = str(arrays[0].dtype)
    by_data = implementation in BY_DATA
    run = compiled if by_data else value_and_gradients
    z, *gradients = run(implementation, whole(made) if by_data else made, given, arrays)
    assert z.dtype == dtype
    forward, backward = TOLERANCE[dtype]
    draw.close(z, expected, forward * max(1, abs(expected).max()))
    np.testing.assert_array_equal(z[np.broadcast_to(~allowed.any(axis=(1, 3)), z.shape[:2])], 0)
    for gradient, (right, size) in zip(gradients, expected_gradients, strict=True):
        draw.close(gradient, right, backward * max(1, size if dtype == "bfloat16" else abs(right).max()))


@pytest.mark.parametrize("T", grid.LENGTHS)
@pytest.mark.parametrize("bias", grid.BIASES)
@pytest.mark.parametrize("heads", grid.HEADS)
def test_every_cell_is_the_oracles_or_refused(heads, bias, T):
    for mask in grid.MASKS:
        made, given, arrays, *oracles = cell(mask, heads, bias, T)
        for implementation, dtype in itertools.product(grid.IMPLEMENTATIONS, grid.DTYPES):
            typed = [jnp.asarray(x, dtype) for x in arrays]
            refused = grid.refusal(implementation, mask, bias, dtype, T)
            try:
                if refused is None:
                    check(implementation, made, given, typed, *oracles)
                else:
                    with pytest.raises(ValueError, match=f"^{re.escape(refused)}(\n|$)"):
                        value_and_gradients(implementation, made, given, typed)
            except BaseException as error:
                error.add_note(f"in the cell of {implementation}, {mask}, {dtype}")
                raise


@pytest.mark.parametrize("implementation", grid.IMPLEMENTATIONS)
def test_one_row_of_a_mask_and_of_a_bias_serves_the_batch(implementation):
    """The gradient of the shared bias is the sum over the rows."""
    T, dtype = 130, "bfloat16" if implementation == "cudnn" else "float32"
    made, _, arrays, *_ = cell("causal window", "grouped", "none", T)
    made = jf.Mask(made.q_positions[:1], made.q_positions[:1], causal=True, window=made.window, ordered=True)
    q, k, v, dz = arrays
    bias = draw.exact(np.random.default_rng(0), (1, 4, T, T))
    allowed = oracle.allowed(*[np.arange(T)[None]] * 2, causal=True, window=made.window)
    typed = [jnp.asarray(x, dtype) for x in arrays]
    if implementation == "splash":
        bias = None
    z = oracle.attention(q, k, v, allowed, bias, scale=grid.SCALE)
    *expected, dbias = oracle.attention_gradients(q, k, v, allowed, bias, dz, scale=grid.SCALE)
    expected += [] if bias is None else [dbias.sum(axis=0, keepdims=True)]
    given = None if bias is None else jnp.asarray(bias)
    sizes = [(gradient, abs(gradient).max()) for gradient in expected]
    check(implementation, made, given, typed, np.broadcast_to(allowed, (grid.B, 1, T, T)), z, sizes)


def option_of_oracle(option, bias, arrays, allowed):
    """What the oracle makes of an option: z and the gradients of q, k, v and of the leaves of the bias."""
    q, k, v, dz = arrays
    N, T, S = q.shape[2], q.shape[1], k.shape[1]
    how = {"scale": grid.SCALE, "softcap": 2.0 if option == "softcap" else None}
    array = None
    if bias is not None:
        positions = grid.MASKS["left padding"](T)[0]
        distance = positions[:, None, :, None] - 2.0 * positions[:, None, None, :]
        array = 0.1 * distance * np.ones((1, N, 1, 1))
    factors = np.ones((len(q), N, T, S))
    if option == "dropout of the pattern":
        dropout = grid.OPTIONS[option]()["dropout"]
        factors = np.asarray(keep_weights(dropout.rate, dropout.seeds(), len(q), N, jnp.arange(T), jnp.arange(S)))
    elif option == "reading the pattern":
        factors = factors * 0.5
    z, *gradients, dbias = oracle.attention_with_factors(q, k, v, allowed, array, factors, dz, **how)
    return [z, *gradients] + ([] if array is None else [(dbias * distance).sum()])


@pytest.mark.parametrize("option", grid.OPTIONS)
@pytest.mark.parametrize("implementation", grid.IMPLEMENTATIONS)
def test_every_option_is_the_oracles_or_refused(implementation, option):
    made, _, arrays, allowed, *_ = cell("left padding", "grouped", "none", 129)
    dtype = "bfloat16" if implementation == "cudnn" else "float32"
    typed = [jnp.asarray(x, dtype) for x in arrays]
    options = grid.OPTIONS[option]()
    bias = options.pop("bias", None)
    refused = grid.refusal(implementation, option=option)
    if refused is not None:
        with pytest.raises(ValueError, match=f"^{re.escape(refused)}(\n|$)"):
            value_and_gradients(implementation, made, bias, typed, **options)
        return
    found = value_and_gradients(implementation, made, bias, typed, **options)
    expected = option_of_oracle(option, bias, arrays, allowed)
    plain = oracle.attention(*arrays[:3], allowed, scale=grid.SCALE)
    assert abs(expected[0] - plain).max() > 0.01  # the option does something
    for a, b, tolerance in zip(found, expected, [CACHED, *[GRADIENT] * (len(found) - 1)], strict=True):
        draw.close(a, b, tolerance * max(1, abs(b).max()))


def test_the_table_in_the_docs_is_what_this_grid_holds_to():
    text = (Path(__file__).parent.parent / "docs" / "attention.md").read_text()
    head = "| | " + " | ".join(f"`{name}`" for name in grid.IMPLEMENTATIONS) + " |\n"
    rows = [f"| {name} | {' | '.join('yes' if yes else 'no' for yes in found)} |" for name, found in grid.support()]
    table = head + "|---" * (len(grid.IMPLEMENTATIONS) + 1) + "|\n" + "\n".join(rows) + "\n"
    assert table in text, "run python docs/update_attention.py"
