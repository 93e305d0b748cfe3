"""Weights in 8 bits: what they stand for, what they cost, and that every model takes them."""

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.int8 import Int8Kernel, dequantize, errors, quantize
from jaxformer.trees import stack_layers

IDS = draw.ids(2, 6)
MODELS = {
    "plain": {},
    "gated": {"gated": True, "tie_embeddings": False, "qk_norm": True},
    "encoder": {"architecture": "encoder", "head": "masked_lm", "d_embed": 6, "num_token_types": 2},
    "classes": {"architecture": "encoder", "head": "classifier", "num_labels": 3},
    "shared": {"num_layers": 4, "num_distinct_layers": 2},
}


def kernels(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Int8Kernel))
    return [leaf for leaf in leaves if isinstance(leaf, Int8Kernel)]


def int8_of(kernel, name="decoder/layers_0/attn/q_proj"):
    tree = kernel
    for part in reversed([*name.split("/"), "kernel"]):
        tree = {part: tree}
    return kernels(quantize(tree))[0]


@pytest.mark.parametrize(("name", "shape", "inputs"), [
    ("decoder/layers_0/attn/q_proj", (6, 2, 4), (0,)),
    ("decoder/layers_0/attn/o_proj", (2, 4, 6), (0, 1)),
    ("decoder/layers_0/mlp/up_proj", (6, 5), (0,)),
    ("decoder/layers/mlp/down_proj", (3, 5, 6), (1,)),
    ("decoder/layers/cross/o_proj", (3, 2, 4, 6), (1, 2)),
    ("lm_head", (6, 9), (0,)),
])  # fmt: skip
def test_each_output_has_a_scale_and_its_largest_weight_is_exact(name, shape, inputs, rng):
    kernel = rng.normal(size=shape).astype(np.float32) * 10 ** rng.uniform(-3, 3, size=shape[-1]).astype(np.float32)
    found = int8_of(kernel, name)
    largest = np.abs(kernel).max(axis=inputs, keepdims=True)
    assert found.q.dtype == jnp.int8
    np.testing.assert_allclose(found.scale, largest / 127, rtol=1e-6)
    off = np.abs(np.asarray(found.astype("float32")) - kernel)
    assert (off <= np.asarray(found.scale) * 0.5001).all()
    assert (np.where(np.abs(kernel) == largest, off / largest, 0) < 1e-6).all()


@given(hnp.arrays(np.float32, (4, 3), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
@example(np.full((4, 3), 2e-37, np.float32))
@example(np.full((4, 3), 1.4e-36, np.float32))
def test_no_weight_is_off_by_more_than_half_a_step(kernel):
    found = int8_of(kernel, "decoder/layers_0/mlp/up_proj")
    off = np.abs(np.asarray(found.astype("float32"), np.float64) - kernel)
    # The quotient and the product round up to 127 steps by 2^-24 of them each; XLA takes subnormal weights for 0.
    limits = np.finfo(np.float32)
    assert (off <= np.asarray(found.scale, np.float64) * (0.5 + 127 * limits.eps) + limits.tiny).all()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_int8_computes_what_its_numbers_say(name, scan):
    made, params = draw.model(**MODELS[name])
    if scan:
        made, params = jf.build(draw.tiny(scan_layers=True, **MODELS[name])), stack_layers(params)
    small = quantize(params)
    exact = draw.logits(made, params, IDS)
    found = draw.logits(made, small, IDS)
    draw.close(found, draw.logits(made, dequantize(small), IDS), FLOAT32)
    assert 1e-4 < np.abs(found - exact).max() < 0.1 * np.abs(exact).max()


def test_an_encoder_decoder_and_bfloat16_too():
    config = draw.tiny(architecture="encoder_decoder", dtype="bfloat16", param_dtype="bfloat16")
    made = jf.build(config)
    params = draw.variables(made, IDS, IDS)["params"]
    small = quantize(params)
    assert {leaf.scale.dtype.name for leaf in kernels(small)} == {"float32"}
    found, exact = (draw.logits(made, p, IDS, IDS) for p in (small, params))
    assert np.abs(found - exact).max() < 0.1 * np.abs(exact).max()


def test_generate_takes_them():
    made, params = draw.model()
    small = quantize(params)
    found = jf.generate(made, small, IDS, max_new_tokens=6)
    np.testing.assert_array_equal(found.ids, jf.generate(made, dequantize(small), IDS, max_new_tokens=6).ids)


def test_the_kernels_take_a_quarter_of_the_bytes_and_nothing_else_changes():
    _, params = draw.model(d_model=64, num_heads=4, d_ff=256)
    small = quantize(params)
    before = {jf.trees.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    weights = sum(leaf.nbytes for path, leaf in before.items() if path.endswith("kernel"))
    saved = jf.trees.num_bytes(params) - jf.trees.num_bytes(small)
    assert 0.72 < saved / weights < 0.75
    for path, leaf in jax.tree_util.tree_leaves_with_path(small, is_leaf=lambda x: isinstance(x, Int8Kernel)):
        name = jf.trees.path_name(path)
        assert isinstance(leaf, Int8Kernel) == name.endswith("kernel")
        assert leaf.shape == before[name].shape
        if not isinstance(leaf, Int8Kernel):
            np.testing.assert_array_equal(leaf, before[name])


def test_the_error_of_each_kernel_is_reported(rng):
    _, params = draw.model()
    found = errors(params, quantize(params))
    assert set(found) == {name for name in map(jf.trees.path_name, paths(params)) if name.endswith("kernel")}
    kernel = np.asarray(params["decoder"]["layers_0"]["mlp"]["up_proj"]["kernel"], np.float64)
    step = np.abs(kernel).max(axis=0) / 127
    off = np.round(kernel / step) * step - kernel
    wanted = np.sqrt((off**2).mean() / (kernel**2).mean())
    np.testing.assert_allclose(found["decoder/layers_0/mlp/up_proj/kernel"], wanted, rtol=1e-4)


def paths(tree):
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def test_what_cannot_be_is_refused():
    _, params = draw.model()
    with pytest.raises(ValueError, match="is in int8 already"):
        quantize(quantize(params))
    with pytest.raises(ValueError, match=r"up_proj/kernel holds NaN or infinity"):
        int8_of(np.array([[1.0, np.nan]], np.float32), "decoder/layers_0/mlp/up_proj")
    with pytest.raises(KeyError, match="0 sharding rules fit"):
        quantize({"strange": {"kernel": np.ones((2, 2), np.float32)}})


def test_a_kernel_of_zeros_stays_zero():
    found = int8_of(np.zeros((3, 2), np.float32), "decoder/layers_0/mlp/up_proj")
    np.testing.assert_array_equal(found.astype("float32"), 0)
