"""cuDNN behind our signature: what it is asked for, and what is refused.

cuDNN itself needs a GPU. `jax.nn.dot_product_attention` computes the same from the same arguments through XLA, so here
it is asked for "xla": the numbers must be the oracle's. One test reads which calls of cuDNN the program would make.
"""

import re
from types import SimpleNamespace

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import BFLOAT16

import jaxformer as jf
from jaxformer.attention import cudnn
from jaxformer.attention.cudnn import cudnn_attention
from jaxformer.attention.dropout import Dropout
from jaxformer.attention.einsum import einsum_attention

SCALE, B, T, H = 0.4, 2, 22, 8
ROW = np.arange(T)[None].repeat(B, axis=0)
LEFT = np.where(ROW >= [[5], [0]], ROW - [[5], [0]], -1)
MIDDLE = np.where((ROW >= 3) & (ROW < [[T - 4], [0]]), ROW - 3, -1)  # nothing is in the second row
PACKED = np.where(ROW < T - 4, 1 + ROW // 5, 0)
AT = oracle.positions_from_segments(PACKED)
SHUFFLED = np.random.default_rng(1).permutation(T)[None].repeat(B, axis=0)
BY_LENGTHS = {
    "causal": ((ROW, ROW), {"causal": True}),
    "left padding": ((LEFT, LEFT), {"causal": True}),
    "causal window": ((MIDDLE, MIDDLE), {"causal": True, "window": 3}),
    "a window wider than the row": ((ROW, ROW), {"causal": True, "window": 100}),
    "full with padding": ((ROW, MIDDLE), {}),
    "fewer keys": ((ROW, LEFT[:, :12]), {}),
}
BY_ARRAY = {
    "packed": ((AT, AT, PACKED, PACKED), {"causal": True}),
    "out of order": ((SHUFFLED, SHUFFLED), {"causal": True, "ordered": False}),
    "last queries": ((ROW[:, -6:], ROW), {"causal": True}),
    "window to both sides": ((LEFT, LEFT), {"window": 3}),
    "nothing in one row": ((MIDDLE, MIDDLE), {"causal": True, "ordered": False}),
}
CASES = BY_LENGTHS | BY_ARRAY


@pytest.fixture
def on_gpu(monkeypatch):
    """Passes for a GPU; XLA computes, in float32. Gives the list of what was asked for, call by call.

    Queries behind the last one are NaN here, because cuDNN promises nothing of them.
    """
    asked, attend = [], jax.nn.dot_product_attention

    def record(q, k, v, *arrays, **how):
        asked.append({**how, "arrays": arrays})
        z = attend(*(x.astype("float32") for x in (q, k, v)), *arrays, **how).astype(q.dtype)
        lengths = how.get("query_seq_lengths", jnp.full(len(q), q.shape[1]))
        return jnp.where(jnp.arange(q.shape[1])[None, :, None, None] < lengths[:, None, None, None], z, jnp.nan)

    monkeypatch.setattr(cudnn, "IMPLEMENTATION", "xla")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    return asked


def make_mask(arrays, ordered=True, **static):
    """The mask of these arrays, one jax array for each; traced if it is made while tracing."""
    made = {id(x): jnp.asarray(x, jnp.int32) for x in arrays}
    return jf.Mask(*(made[id(x)] for x in arrays), ordered=ordered, **static)


def inputs(rng, t, S, N, K, bias_rows=None, dtype="float16"):
    shapes = ((t, N, H), (S, K, H), (S, K, H), (t, N, H))
    q, k, v, dz = (jnp.asarray(rng.normal(size=(B, *shape)), dtype) for shape in shapes)
    return (q, k, v, None if bias_rows is None else jnp.asarray(rng.normal(size=(bias_rows, N, t, S)), "float32")), dz


@pytest.mark.parametrize(
    ("case", "traced", "bias_rows"),
    [
        *((case, traced, None) for case in BY_LENGTHS for traced in (False, True)),
        *((case, True, None) for case in BY_ARRAY),
        ("left padding", False, 1),
        ("causal window", True, 2),
        ("packed", True, 1),
    ],
)
def test_values_are_the_oracles_and_gradients_the_references(case, traced, bias_rows, on_gpu, rng):
    arrays, static = CASES[case]
    N, K = (4, 2) if case in BY_LENGTHS else (3, 3)
    given, dz = inputs(rng, arrays[0].shape[1], arrays[1].shape[1], N, K, bias_rows)
    allowed = oracle.allowed(*arrays, **{name: static[name] for name in static if name != "ordered"})

    known = make_mask(arrays, **static)

    @jax.jit
    def run(given):
        mask = make_mask(arrays, **static) if traced else known
        z, pull = jax.vjp(lambda *x: cudnn_attention(*x[:3], mask, x[3], scale=SCALE), *given)
        exact = jax.tree.map(lambda x: x.astype("float32"), given)
        _, expected = jax.vjp(lambda *x: einsum_attention(*x[:3], mask, x[3], scale=SCALE), *exact)
        return z, pull(dz), expected(dz.astype("float32"))

    z, gradients, expected = run(given)
    draw.close(z, oracle.attention(*given[:3], allowed, given[3], scale=SCALE), BFLOAT16)
    for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        draw.close(ours, theirs, BFLOAT16)
    empty = np.broadcast_to(~allowed.any(axis=(1, 3)), z.shape[:2])
    np.testing.assert_array_equal(z[empty], 0)
    np.testing.assert_array_equal(gradients[0][empty], 0)
    linear = case in BY_LENGTHS and bias_rows is None
    assert [len(asked["arrays"]) for asked in on_gpu] == [0 if linear else 2]


def test_only_padding_costs_lengths(on_gpu, rng):
    given, _ = inputs(rng, T, T, 2, 2)
    for at in (ROW, MIDDLE):
        cudnn_attention(*given[:3], make_mask((at, at), causal=True), scale=SCALE)
    known, padded = on_gpu
    assert not {name for name in known if "lengths" in name}
    assert known["is_causal"]
    assert padded["is_causal"]
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        np.testing.assert_array_equal(padded[name], [T - 7, 1])  # and not 0, by which cuDNN might divide


@pytest.mark.parametrize("length", [1, 7, 127, 128, 129, 192, 255])
@pytest.mark.parametrize("traced", [False, True])
def test_every_length_gives_the_mean_of_what_is_seen(length, traced, on_gpu):
    zeros, v = jnp.zeros((1, length, 1, 8), "float16"), jnp.arange(length, dtype="float16")[None, :, None, None]

    def means(at, **static):
        mask = jf.Mask(at, at, ordered=True, **static)
        return cudnn_attention(zeros, zeros, v.repeat(8, axis=3), mask, scale=1.0)[0, :, 0, 0]

    at, run = jnp.arange(length)[None], (jax.jit if traced else lambda f, **_: f)(means, static_argnames="causal")
    np.testing.assert_allclose(run(at), (length - 1) / 2, rtol=2e-3)
    np.testing.assert_allclose(run(at, causal=True), np.arange(length) / 2, rtol=2e-3)


def test_a_prefix_and_a_traced_window_are_read_from_an_array(on_gpu, rng):
    given, _ = inputs(rng, T, T, 2, 2)
    for mask in (jf.Mask.prefix_lm(jnp.asarray([3, 7]), T), make_mask((ROW, ROW), causal=True, window=jnp.asarray(3))):
        z = cudnn_attention(*given[:3], mask, scale=SCALE)
        draw.close(z, oracle.attention(*given[:3], mask.dense(), scale=SCALE), BFLOAT16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_of_the_lowest_float32_hides_a_key(dtype, on_gpu, rng):
    (q, k, v, _), _ = inputs(rng, T, T, 2, 2, dtype=dtype)
    causal = np.tril(np.ones((1, 1, T, T), bool))
    bias = jnp.where(causal, 0, jnp.finfo("float32").min).repeat(2, axis=1)
    exact = [np.asarray(x, "float64") for x in (q, k, v)]
    for mask in (jf.Mask.full(T, T), jf.Mask.causal(T)):
        z = cudnn_attention(q, k, v, mask, bias, scale=SCALE)
        assert z.dtype == dtype
        draw.close(z, oracle.attention(*exact, causal, scale=SCALE), BFLOAT16)
    by_bias, by_both = (asked["arrays"][0] for asked in on_gpu)
    assert np.isfinite(by_bias).all()
    assert not by_both.any()  # what the mask hides is not hidden again: the sum might be infinite


def test_a_query_that_sees_nothing_gives_zero_and_harms_no_gradient(on_gpu):
    zeros, v = jnp.zeros((1, 2, 1, 8), "float16"), jnp.asarray([1, 3], "float16")[None, :, None, None].repeat(8, axis=3)
    at = jnp.arange(2)[None]
    mask = jf.Mask(at, at, jnp.asarray([[1, 2]]), jnp.asarray([[1, 1]]))
    z, pull = jax.vjp(lambda *x: cudnn_attention(*x, mask, scale=1.0), zeros, zeros, v)
    np.testing.assert_array_equal(z[0, :, 0, 0], [2, 0])
    dq, dk, dv = pull(jnp.ones_like(z))
    assert not dq.any()
    assert np.isfinite(dk).all()
    np.testing.assert_array_equal(dv, np.full_like(v, 0.5))


# What cuDNN is asked for ----------------------------------------------------------------------------------------------

FORWARD = "jax._src.cudnn.fused_attention_stablehlo"
PROGRAMS = {
    "known": ((ROW, ROW), {"causal": True}, False, None, ("CAUSAL", "0")),
    "traced": ((ROW, ROW), {"causal": True}, True, None, ("PADDING_CAUSAL", "0")),
    "window": ((ROW, ROW), {"causal": True, "window": 5}, True, None, ("PADDING_CAUSAL", "5")),
    "full": ((ROW, ROW), {}, True, None, ("PADDING", "0")),
    "packed": ((AT, AT, PACKED, PACKED), {"causal": True}, True, None, ("NO_MASK", "0")),
    "bias": ((ROW, ROW), {"causal": True}, False, 1, ("NO_MASK", "0")),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_the_program_calls_cudnn_with_the_mask_in_its_words(case, monkeypatch, rng):
    arrays, static, traced, bias_rows, expected = PROGRAMS[case]
    monkeypatch.setattr(f"{FORWARD}.check_cudnn_version", lambda: 91002)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    given, dz = inputs(rng, T, T, 4, 2, bias_rows, "bfloat16")

    known = make_mask(arrays, **static)

    def gradients(given):
        mask = make_mask(arrays, **static) if traced else known
        return jax.vjp(lambda *x: cudnn_attention(*x[:3], mask, x[3], scale=SCALE), *given)[1](dz)

    program = jax.jit(gradients).trace(given).lower(lowering_platforms=("cuda",))
    text = program.as_text().replace("\\22", '"')
    assert len(re.findall(r"@__cudnn\$fmha\w+", text)) == 2
    assert set(re.findall(r'"mask_type": "(\w+)"', text)) == {expected[0]}
    assert set(re.findall(r'"sliding_window_length": (\d+)', text)) == {expected[1]}
    assert ("ScaleBias" in text) == (expected[0] == "NO_MASK")


# Refusals -------------------------------------------------------------------------------------------------------------

OTHERS = "use implementation='flash', 'chunked' or 'einsum'"
REFUSED = {
    "softcap": ({"softcap": 2.0}, f"'cudnn' cannot honour a softcap; {OTHERS}"),
    "pattern": ({"pattern_fn": lambda p: p}, "'cudnn' cannot honour pattern_fn; use implementation='einsum'"),
    "dropout": (
        {"dropout": Dropout(jax.random.key(0), 0.1)},
        "'cudnn' cannot honour dropout of the pattern; use implementation='chunked' or 'einsum'",
    ),
    "bias function": (
        {"bias": lambda q, kv: q},
        "'cudnn' cannot honour a bias that is a function of positions; use implementation='flash' or 'chunked'",
    ),
    "float32": (
        {"dtype": "float32"},
        f"'cudnn' takes q, k and v all in float16 or all in bfloat16, not ['float32']; {OTHERS}",
    ),
    "width": ({"width": 12}, f"'cudnn' takes heads whose width is a multiple of 8 up to 256, not 12; {OTHERS}"),
    "too wide": ({"width": 264}, f"'cudnn' takes heads whose width is a multiple of 8 up to 256, not 264; {OTHERS}"),
    "odd with a bias": (
        {"length": 5, "bias": jnp.zeros((1, 2, 5, 5))},
        "'cudnn' needs even lengths with a bias, or with this mask, and they are 5 queries and 5 keys; "
        "use implementation='flash' or 'chunked', or pad the rows",
    ),
    "no GPU": ({}, "'cudnn' runs on NVIDIA GPUs, and this is a cpu; use implementation='chunked'"),
}


def refused(message, mask=None, bias=None, dtype="bfloat16", width=8, length=6, **given):
    x = jnp.zeros((1, length, 2, width), dtype)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        cudnn_attention(x, x, x, mask or jf.Mask.causal(length), bias, scale=1.0, **given)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cudnn_has_not_is_refused_before_the_device_is_looked_at(case):
    given, message = REFUSED[case]
    refused(message, **given)


def test_an_odd_length_is_refused_where_the_mask_is_an_array():
    at = jnp.arange(5)[None]
    message = REFUSED["odd with a bias"][1]
    refused(message, jf.Mask(at, at, causal=True), length=5)
    refused(message, jf.Mask(at, at, at, at, causal=True, ordered=True), length=5)


def test_the_widest_heads_need_a_hopper(monkeypatch, on_gpu):
    capability = SimpleNamespace(compute_capability="8.6")
    monkeypatch.setattr(jax, "local_devices", lambda: [capability])
    refused("'cudnn' takes heads up to 128 wide on this GPU, not 136; use implementation='chunked'", width=136)
    capability.compute_capability = "10.0"
    x = jnp.zeros((1, 4, 1, 136), "bfloat16")
    assert cudnn_attention(x, x, x, jf.Mask.causal(4), scale=1.0).shape == x.shape
