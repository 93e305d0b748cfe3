"""JAX's splash kernel behind our signature: the numbers of the reference, or a refusal; and it lowers for a TPU."""

import re

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import BFLOAT16, FLOAT32, GRADIENT

import jaxformer as jf
from jaxformer.attention.dropout import Dropout
from jaxformer.attention.einsum import einsum_attention
from jaxformer.attention.splash import splash_attention

SCALE, B, T, H = 0.4, 2, 130, 8
ROW = np.arange(T)[None].repeat(B, axis=0)
LEFT = np.where(ROW >= [[5], [0]], ROW - [[5], [0]], -1)
RIGHT = np.where(ROW < [[T - 9], [0]], ROW, -1)  # nothing is in the second row
PACKED = np.where(ROW < T - 4, 1 + ROW // 50, 0)
AT = oracle.positions_from_segments(PACKED)
CASES = {
    "left padding": ((LEFT, LEFT), {"causal": True}, 4, 2, 3.0),
    "packed, known to be equal": ((AT, AT.copy(), PACKED, PACKED.copy()), {"causal": True}, 2, 2, None),
    "causal window": ((RIGHT, RIGHT), {"causal": True, "window": 17}, 3, 1, None),
    "window to both sides": ((ROW, ROW), {"window": 17}, 2, 1, None),
    "full with padding": ((RIGHT, RIGHT), {}, 2, 2, 2.0),
    "fewer keys, out of order": ((ROW, RIGHT[:, 40::-1]), {}, 4, 2, None),
    "documents on both sides": ((ROW, AT[:, 30:90], PACKED, PACKED[:, 30:90]), {}, 2, 2, None),
}


def make_mask(arrays, ordered=True, **static):
    """The mask of these arrays, one jax array for each, so that what is the same here is the same there."""
    made = {id(x): jnp.asarray(x, jnp.int32) for x in arrays}
    return jf.Mask(*(made[id(x)] for x in arrays), ordered=ordered, **static)


def inputs(rng, S, N, K, dtype="float32"):
    return [jnp.asarray(rng.normal(size=(B, *shape)), dtype) for shape in ((T, N, H), (S, K, H), (S, K, H), (T, N, H))]


def both(f, q, k, v, dz):
    """Value and gradients."""
    return jax.jit(lambda *x: (f(*x), jax.vjp(f, *x)[1](dz)))(q, k, v)


@pytest.mark.parametrize("case", CASES)
def test_values_are_the_oracles_and_gradients_the_references(case, rng):
    arrays, static, N, K, softcap = CASES[case]
    mask, allowed = make_mask(arrays, **static), oracle.allowed(*arrays, **static)
    q, k, v, dz = inputs(rng, arrays[1].shape[1], N, K)
    (z, gradients), (_, expected) = (
        both(lambda *x, f=f: f(*x, mask, scale=SCALE, softcap=softcap), q, k, v, dz)
        for f in (splash_attention, einsum_attention)
    )
    draw.close(z, oracle.attention(q, k, v, allowed, scale=SCALE, softcap=softcap), FLOAT32)
    for ours, theirs in zip(gradients, expected, strict=True):
        draw.close(ours, theirs, GRADIENT)
    empty = np.broadcast_to(~allowed.any(axis=(1, 3)), (B, T))
    assert empty.any() == (case != "window to both sides")
    np.testing.assert_array_equal(z[empty], 0)
    np.testing.assert_array_equal(gradients[0][empty], 0)


@pytest.mark.parametrize("length", [1, 7, 127, 128, 129, 192, 255])
def test_a_length_that_is_no_multiple_of_the_block_gives_the_mean_of_what_is_seen(length, monkeypatch):
    monkeypatch.setattr("jaxformer.attention.splash.BLOCK", 128)
    zeros, v = jnp.zeros((1, length, 1, 1)), jnp.arange(length, dtype=jnp.float32)[None, :, None, None]
    z = jax.jit(lambda: [splash_attention(zeros, zeros, v, m, scale=1.0) for m in masks])
    masks = jf.Mask.full(length, length), jf.Mask.causal(length)
    full, causal = z()
    np.testing.assert_allclose(full[0, :, 0, 0], (length - 1) / 2, rtol=FLOAT32)
    np.testing.assert_allclose(causal[0, :, 0, 0], np.arange(length) / 2, rtol=FLOAT32)


def test_query_heads_share_key_value_heads_in_consecutive_groups():
    zeros = jnp.zeros((1, 3, 6, 1))
    v = jnp.broadcast_to(jnp.asarray([10.0, 20.0])[:, None], (1, 3, 2, 1))
    z = splash_attention(zeros, zeros[:, :, :2], v, jf.Mask.full(3, 3), scale=1.0)
    np.testing.assert_array_equal(z[0, 0, :, 0], [10, 10, 10, 20, 20, 20])


def test_bfloat16_keeps_scores_and_sums_in_float32(rng):
    q, k, v, _ = inputs(rng, T, 2, 2, "bfloat16")
    z = splash_attention(q, k, v, make_mask((ROW, ROW), causal=True), scale=SCALE)
    assert z.dtype == jnp.bfloat16
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    draw.close(z, oracle.attention(*exact, np.tril(np.ones((1, 1, T, T), bool)), scale=SCALE), BFLOAT16)


def test_a_mask_made_while_tracing_is_taken_if_q_and_kv_are_one_array(rng):
    q, k, v, _ = inputs(rng, T, 2, 2)
    from_positions = jax.jit(
        lambda q, k, v, at: splash_attention(q, k, v, jf.Mask(at, at, causal=True, ordered=True), scale=SCALE)
    )
    z = from_positions(q, k, v, jnp.asarray(LEFT))
    draw.close(z, oracle.attention(q, k, v, oracle.allowed(LEFT, LEFT, causal=True), scale=SCALE), FLOAT32)
    at = jnp.arange(T)[None]
    run = jax.jit(lambda mask: splash_attention(q, k, v, mask, scale=SCALE))
    full = oracle.allowed(at, at, causal=True)
    z = run(jf.Mask(at, at, causal=True, ordered=True))
    draw.close(z, oracle.attention(q, k, v, full, scale=SCALE), FLOAT32)
    with pytest.raises(ValueError, match="from the very same positions"):
        run(jf.Mask(at, at + 0, causal=True, ordered=True))


# Refusals -------------------------------------------------------------------------------------------------------------

OTHERS = "use implementation='flash', 'chunked' or 'einsum'"
INDICES = (
    "'splash' knows indices and not positions: a causal mask or a window must be `ordered`, its q and kv made from the "
    f"very same positions and segments (or from known, equal ones); {OTHERS}"
)
BOTH_SIDES = (
    "'splash' takes a window to both sides only over positions that are known before tracing and hold no padding, "
    f"because a query of padding (-1) sees the first positions of such a mask; {OTHERS}"
)
REFUSED = {
    "array bias": ({"bias": jnp.zeros((1, 2, T, T))}, f"'splash' cannot honour a bias; {OTHERS}"),
    "bias function": ({"bias": lambda q, kv: q}, f"'splash' cannot honour a bias; {OTHERS}"),
    "pattern": ({"pattern_fn": lambda p: p}, "'splash' cannot honour pattern_fn; use implementation='einsum'"),
    "dropout": (
        {"dropout": Dropout(jax.random.key(0), 0.1)},
        "'splash' cannot honour dropout of the pattern; use implementation='chunked' or 'einsum'",
    ),
}
REFUSED_MASKS = {
    "prefix": (jf.Mask.prefix_lm(jnp.asarray([3, 5]), T), f"'splash' cannot honour a prefix; {OTHERS}"),
    "traced window": (
        make_mask((ROW, ROW), causal=True, window=jnp.asarray(3)),
        f"'splash' needs a window that is an int, and this one is an array; {OTHERS}",
    ),
    "not ordered": (make_mask((ROW, ROW), causal=True, ordered=False), INDICES),
    "other positions": (make_mask((ROW, ROW + 1), causal=True), INDICES),
    "other documents": (make_mask((ROW, ROW, PACKED, PACKED + 1), causal=True), INDICES),
    "a window without order": (make_mask((ROW, ROW), window=3, ordered=False), INDICES),
    "padding and a window to both sides": (make_mask((LEFT, LEFT), window=3), BOTH_SIDES),
}


def refused(message, mask, bias=None, dtype="float32", **given):
    q, k, v, _ = inputs(np.random.default_rng(0), T, 2, 2, dtype)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        splash_attention(q, k, v, mask, bias, scale=1.0, **given)


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_the_kernel_has_not_are_refused(case):
    given, message = REFUSED[case]
    refused(message, jf.Mask.causal(T), **given)


@pytest.mark.parametrize("case", REFUSED_MASKS)
def test_masks_that_indices_do_not_surely_say_are_refused(case):
    mask, message = REFUSED_MASKS[case]
    refused(message, mask)


def test_positions_that_are_traced_may_hold_padding():
    def f(at):
        x = jnp.zeros((B, T, 2, H))
        return splash_attention(x, x, x, jf.Mask(at, at, window=3, ordered=True), scale=1.0)

    with pytest.raises(ValueError, match=re.escape(BOTH_SIDES)):
        jax.eval_shape(f, jnp.asarray(ROW))


def test_other_types_and_a_gpu_are_refused(monkeypatch):
    message = "'splash' takes q, k and v all in float32 or all in bfloat16, not ['float16']; "
    refused(message + "use implementation='chunked' or 'einsum'", jf.Mask.causal(T), dtype="float16")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    message = "'splash' is a kernel for TPUs, and this is a GPU; use implementation='flash' or 'chunked'"
    refused(message, jf.Mask.causal(T))


# Lowering -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "window", "dtype"), [(1000, None, "bfloat16"), (130, 17, "float32")])
def test_forward_and_backward_lower_for_a_tpu_from_here(length, window, dtype):
    def loss(q, k, v, at):
        mask = jf.Mask(at, at, causal=True, window=window, ordered=True)
        return splash_attention(q, k, v, mask, scale=SCALE, softcap=30.0).astype(jnp.float32).sum()

    q, k = (jax.ShapeDtypeStruct((B, length, N, 64), dtype) for N in (4, 2))
    at = jax.ShapeDtypeStruct((B, length), jnp.int32)
    for f, kernels in ((loss, 1), (jax.grad(loss, argnums=(0, 1, 2)), 3)):
        text = jax.jit(f).trace(q, k, k, at).lower(lowering_platforms=("tpu",)).as_text()
        assert len(re.findall(r"custom_call @tpu_custom_call\b", text)) == kernels
        assert "while" not in text  # an interpreted kernel is a loop
