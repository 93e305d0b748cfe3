"""The fused kernels, interpreted: the oracle's values, the reference's gradients, and no hidden block is read."""

import re

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental import pallas as pl
from position_biases import Linear, Table
from tolerances import BFLOAT16, FLOAT32, GRADIENT

import jaxformer as jf
from jaxformer.attention import Dropout, flash
from jaxformer.attention.einsum import einsum_attention
from jaxformer.attention.flash import flash_attention

SCALE = 0.4


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 queries and 32 keys, so that short rows span several."""
    monkeypatch.setitem(flash.QUERIES, "cpu", 16)
    monkeypatch.setitem(flash.KEYS, "cpu", 32)


def masked(kind, T, S):
    """A mask of the last T of S tokens in two rows, and the oracle's array of it."""
    kv = np.arange(S)[None].repeat(2, axis=0)
    shown = np.where(kv < [[S], [S - 5]], kv, -1)
    shuffled = np.random.default_rng(1).permutation(S)[None].repeat(2, axis=0)
    shift = np.asarray([[0], [4]])
    segments = np.where(kv < S - 3, 1 + (kv + shift) // 11, 0)
    at = oracle.positions_from_segments(segments)
    tail = slice(S - T, None)
    arrays, static = {
        "causal": ((kv[:1, tail], kv[:1]), {"causal": True}),
        "full": ((kv[:, tail], shown), {}),
        "padding": ((shown[:, tail], shown), {"causal": True}),
        "window": ((shown[:, tail], shown), {"causal": True, "window": 7}),
        "window to both sides": ((kv[:, tail], kv), {"window": 9}),
        "packed": ((at[:, tail], at, segments[:, tail], segments), {"causal": True}),
        "packed window": ((at[:, tail], at, segments[:, tail], segments), {"causal": True, "window": 4}),
        "one row of packed queries": ((at[:1, tail], at, segments[:1, tail], segments), {"causal": True}),
        "out of order": ((shuffled[:, tail], shuffled), {"causal": True}),
        "prefix": ((kv[:, tail], shown), {"causal": True}),
        "nothing allowed": ((kv[:, tail], np.full_like(kv, -1)), {}),
    }[kind]
    allowed = oracle.allowed(*arrays, **static)
    prefix = None
    if kind == "prefix":
        prefix = jnp.asarray([[S - 10], [2]])
        allowed = allowed | ((arrays[1] >= 0) & (arrays[1] < prefix))[:, None, None]
    return jf.Mask(*map(jnp.asarray, arrays), **static, prefix=prefix), allowed


def inputs(rng, T, S, N, K, H, bias, B=2):
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
    q, k, v, dz = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    made = {
        "none": lambda: None,
        "array": lambda: jnp.asarray(rng.normal(size=(1, N, T, S)), jnp.float32),
        "rows": lambda: jnp.asarray(rng.normal(size=(B, N, T, S)), jnp.float32),
        "linear": lambda: Linear(jnp.asarray(rng.uniform(0.01, 0.1, size=N), jnp.float32)),
        "table": lambda: Table(jnp.asarray(rng.normal(size=(N, 6)), jnp.float32)),
    }[bias]()
    return (q, k, v, made), dz / 4


def passes(attend, mask, given, dz, softcap=None, runs=1):
    """z, and the gradients to q, k, v and the leaves of the bias."""

    def z(mask, *given):
        return attend(*given[:3], mask, given[3], scale=SCALE, softcap=softcap)

    def both(mask, *given):
        value, pull = jax.vjp(lambda *given: z(mask, *given), *given)
        return value, jax.tree.leaves(pull(dz))

    compiled = jax.jit(both)
    results = [compiled(mask, *given) for _ in range(runs)]
    return results[0] if runs == 1 else results


KINDS = (
    *("causal", "full", "padding", "window", "window to both sides", "packed", "packed window"),
    *("one row of packed queries", "out of order", "prefix", "nothing allowed"),
)
CASES = [
    *((kind, 37, 70, 4, 2, 5, "array", None) for kind in KINDS),
    *((kind, 37, 70, 4, 2, 5, bias, 2.0) for kind in ("packed window", "full") for bias in ("rows", "linear", "table")),
    ("causal", 40, 40, 2, 2, 16, "none", None),
    ("window", 50, 50, 3, 1, 17, "none", 2.0),
    *(("causal", T, T, 2, 1, 3, "array", None) for T in (6, 16, 17)),
    ("full", 70, 37, 6, 2, 4, "table", None),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("kind", "T", "S", "N", "K", "H", "bias", "softcap"), CASES)
def test_values_are_the_oracles_and_gradients_the_references(kind, T, S, N, K, H, bias, softcap, rng):
    mask, allowed = masked(kind, T, max(T, S))
    if S < T:
        mask, allowed = mask.with_keys(mask.kv_positions[:, :S], None), allowed[..., :S]
    given, dz = inputs(rng, T, S, N, K, H, bias)
    z, gradients = passes(flash_attention, mask, given, dz, softcap)
    q, k, v, made = given
    array = made(mask.q_positions, mask.kv_positions) if callable(made) else made
    draw.close(z, oracle.attention(q, k, v, allowed, array, scale=SCALE, softcap=softcap), FLOAT32)
    _, expected = passes(einsum_attention, mask, given, dz, softcap)
    for ours, theirs in zip(gradients, expected, strict=True):
        draw.close(ours, theirs, GRADIENT)
    seen = np.broadcast_to(allowed.any(axis=3)[:, 0, :, None, None], z.shape)
    np.testing.assert_array_equal(np.asarray(z)[~seen], 0)


@pytest.mark.parametrize("T", [129, 192])
def test_the_real_blocks_give_the_references_values_and_gradients(T, rng):
    given, dz = inputs(rng, T, T, 2, 1, 4, "table", B=1)
    mask = jf.Mask.causal(T)
    (z, gradients), (expected, references) = (passes(f, mask, given, dz) for f in (flash_attention, einsum_attention))
    draw.close(z, expected, FLOAT32)
    for ours, theirs in zip(gradients, references, strict=True):
        draw.close(ours, theirs, GRADIENT)


@pytest.mark.parametrize("T", [1, 7, 127, 128, 129, 192, 255])
def test_a_length_that_is_no_multiple_of_the_block_gives_the_mean_of_what_is_seen(T):
    zeros, v = jnp.zeros((1, T, 1, 1)), jnp.arange(T, dtype=jnp.float32)[None, :, None, None]
    full = flash_attention(zeros, zeros, v, jf.Mask.full(T, T), scale=1.0)
    np.testing.assert_allclose(full[0, :, 0, 0], (T - 1) / 2, rtol=FLOAT32)
    causal = flash_attention(zeros, zeros, v, jf.Mask.causal(T), scale=1.0)
    np.testing.assert_allclose(causal[0, :, 0, 0], np.arange(T) / 2, rtol=FLOAT32)


def test_query_heads_read_the_head_of_their_group():
    v = jnp.broadcast_to(jnp.asarray([10.0, 20.0])[:, None], (1, 3, 2, 1))
    z = flash_attention(jnp.zeros((1, 3, 4, 1)), jnp.zeros((1, 3, 2, 1)), v, jf.Mask.causal(3), scale=1.0)
    np.testing.assert_array_equal(z[0, 1, :, 0], [10, 10, 20, 20])


@pytest.mark.usefixtures("small_blocks")
def test_a_traced_window_is_the_same_as_a_static_one(rng):
    given, dz = inputs(rng, 50, 50, 2, 2, 4, "none")
    mask, _ = masked("causal", 50, 50)
    static = passes(flash_attention, mask.narrowed(20), given, dz)
    traced = passes(flash_attention, mask.narrowed(jnp.int32(20)), given, dz)
    jax.tree.map(np.testing.assert_array_equal, traced, static)


@pytest.mark.usefixtures("small_blocks")
def test_five_runs_are_the_same_to_the_bit(rng):
    given, dz = inputs(rng, 50, 50, 4, 2, 4, "table")
    mask, _ = masked("packed", 50, 50)
    first, *others = passes(flash_attention, mask, given, dz, runs=5)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_scores_and_sums_in_float32(dtype, rng):
    given, dz = inputs(rng, 90, 90, 2, 1, 8, "none")
    halves = tuple(x.astype(dtype) for x in given[:3])
    mask, allowed = masked("window", 90, 90)
    z, gradients = passes(flash_attention, mask, (*halves, None), dz.astype(dtype))
    assert {x.dtype for x in (z, *gradients)} == {jnp.dtype(dtype)}
    exact = [np.asarray(x, np.float64) for x in halves]
    draw.close(z, oracle.attention(*exact, allowed, scale=SCALE), BFLOAT16)
    floats = (*(x.astype(jnp.float32) for x in halves), None)
    _, expected = passes(einsum_attention, mask, floats, dz.astype(dtype).astype(jnp.float32))
    for ours, theirs in zip(gradients, expected, strict=True):
        draw.close(ours, theirs, BFLOAT16)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_that_a_row_hides_are_never_read(rng):
    """NaN in them would reach the result, because 0 times NaN is NaN."""
    (q, k, v, _), dz = inputs(rng, 96, 96, 2, 1, 4, "none")
    mask = jf.Mask.causal(96).narrowed(10)
    # The second row only has no token in its first 64 slots: what one row sees is not read for another.
    kv = jnp.stack([jnp.arange(96), jnp.where(jnp.arange(96) < 64, -1, jnp.arange(96))])
    hidden = k.at[1, :64].set(jnp.nan), v.at[1, :64].set(jnp.nan)
    z, gradients = passes(flash_attention, mask.with_keys(kv, None), (q, *hidden, None), dz)
    assert all(np.isfinite(x).all() for x in (z, *gradients))
    late = k.at[:, :32].set(jnp.nan), v.at[:, :32].set(jnp.nan)
    z, (dq, _, _) = passes(flash_attention, mask, (q, *late, None), dz)
    assert np.isfinite(z[:, 48:]).all()
    assert np.isfinite(dq[:, 48:]).all()
    assert np.isnan(z[:, :32]).all()
    _, (_, dk, dv) = passes(flash_attention, mask, (q.at[:, 80:].set(jnp.nan), k, v, None), dz)
    assert np.isfinite(dk[:, :64]).all()
    assert np.isfinite(dv[:, :64]).all()


@pytest.mark.usefixtures("small_blocks")
def test_no_row_of_scores_and_no_repeated_keys_are_in_the_program():
    x, kv = (jax.ShapeDtypeStruct((1, 512, heads, 8), jnp.float32) for heads in (8, 1))

    def loss(q, k, v, slopes):
        return flash_attention(q, k, v, jf.Mask.causal(512), Linear(slopes), scale=1.0).sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(x, kv, kv, jnp.ones(8)))
    assert not re.search(r"512,512\]|16,512\]", jaxpr)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["causal", "one row of packed queries"])
@pytest.mark.parametrize("bias", ["array", "rows", "table"])
def test_no_program_reaches_beyond_an_array(kind, bias, rng, monkeypatch):
    """The interpreter would move such a block back inside; a machine reads what is there."""
    launch, reached = pl.pallas_call, []

    def watched(kernel, *, grid, in_specs, out_specs, out_shape, **how):
        def call(*arrays):
            specs, shapes = jax.tree.leaves((in_specs, out_specs)), jax.tree.leaves((arrays, out_shape))
            for spec, x in zip(specs, shapes, strict=True):
                if spec.block_shape is not None:
                    last = spec.index_map(*(n - 1 for n in grid))
                    ends = [(at + 1) * (n or 1) for at, n in zip(last, spec.block_shape, strict=True)]
                    reached.append((ends, list(x.shape)))
            return launch(kernel, grid=grid, in_specs=in_specs, out_specs=out_specs, out_shape=out_shape, **how)(
                *arrays
            )

        return call

    monkeypatch.setattr(pl, "pallas_call", watched)
    (mask, _), (given, dz) = masked(kind, 37, 70), inputs(rng, 37, 70, 4, 2, 5, bias)
    jax.eval_shape(lambda *given: passes(flash_attention, mask, given, dz), *given)
    assert len(reached) > 30
    assert [pair for pair in reached if any(end > n for end, n in zip(*pair, strict=True))] == []


# Refusals -------------------------------------------------------------------------------------------------------------

REFUSALS = {
    "'flash' never holds the attention pattern; read or edit it with implementation='einsum'": {
        "pattern_fn": lambda pattern: pattern
    },
    "'flash' has no dropout of the pattern; use implementation='chunked' or 'einsum'": {
        "dropout": Dropout(jax.random.key(0), 0.1)
    },
    "'flash' takes a bias that is an array or a PositionBias, which it can call for one head, and not a function; "
    "use implementation='chunked' or 'einsum'": {"bias": lambda q, kv: 0.0},
    "'flash' has no kernel for platform 'abacus', only for ['cpu', 'gpu', 'tpu']; use 'chunked'": {
        "platform": "abacus"
    },
    "the bias has leaves of [6] numbers a head; on a GPU 'flash' needs powers of two: pad them, or use "
    "implementation='chunked'": {"platform": "gpu", "bias": Table(jnp.zeros((2, 6)))},
    "'flash' cannot read float16 on a TPU; use bfloat16, or implementation='chunked'": {
        "platform": "tpu",
        "dtype": jnp.float16,
    },
    "'flash' would hold 64 MiB of these tokens and heads in a TPU's fast memory, where it may fill 40; use "
    "implementation='chunked', or 'splash' on a TPU": {"platform": "tpu", "T": 2**15},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_the_kernel_cannot_do_is_refused_with_what_can(message):
    fields = {"T": 8, "bias": None, "dtype": jnp.float32} | REFUSALS[message]
    T, bias, dtype = (fields.pop(name) for name in ("T", "bias", "dtype"))
    x = jax.ShapeDtypeStruct((1, T, 2, 128), dtype)

    def z(q, k, v):
        return flash_attention(q, k, v, jf.Mask.causal(T), bias, scale=1.0, **fields)

    with pytest.raises(ValueError, match=re.escape(message) + r"(\n|$)"):
        jax.eval_shape(z, x, x, x)
