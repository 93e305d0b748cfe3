"""Projections, norms, feed-forward layers and embeddings, each against the oracle."""

import draw
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import FLOAT32

from jaxformer.layers import ACTIVATIONS, MLP, NORMS, Embed, Projection, make_norm

HALF_ULP = 2**-8  # of a bfloat16, relative


def shapes(module, *args):
    return jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(module.init, jax.random.key(0), *args)["params"])


EQUATIONS = {
    "BTD,DNH->BTNH": ((16, 4, 4), (4, 4)),
    "BTD,DKH->BTKH": ((16, 2, 4), (2, 4)),
    "BTNH,NHD->BTD": ((4, 4, 16), (16,)),
    "BTD,DF->BTF": ((16, 24), (24,)),
    "BTF,FD->BTD": ((24, 16), (16,)),
    "BTD,DV->BTV": ((16, 29), (29,)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_projection_is_its_einsum(equation, bias, rng):
    config = draw.tiny()
    kernel_shape, bias_shape = EQUATIONS[equation]
    inputs = equation.split(",")[0]
    x = rng.normal(size=[{"B": 2, "T": 3, **config.sizes}[letter] for letter in inputs]).astype(np.float32)
    module = Projection(config, equation, bias=bias)
    expected_shapes = {"kernel": kernel_shape} | ({"bias": bias_shape} if bias else {})
    assert shapes(module, jnp.asarray(x)) == expected_shapes
    params = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in expected_shapes.items()}
    y = module.apply({"params": params}, jnp.asarray(x))
    draw.close(y, oracle.dense(x, params, equation), FLOAT32)


def test_a_projection_computes_in_the_compute_type_and_keeps_its_parameters(rng):
    config = draw.tiny(dtype="bfloat16")
    x = jnp.asarray(rng.normal(size=(1, 2, 16)), jnp.float32)
    module = Projection(config, "BTD,DF->BTF", bias=True)
    params = module.init(jax.random.key(0), x)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert module.apply({"params": params}, x).dtype == "bfloat16"
    logits = module.copy(out_dtype="float32").apply({"params": params}, x)
    assert logits.dtype == "float32"
    exact = [np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64) for y in (x, params["kernel"])]
    draw.close(logits, np.einsum("BTD,DF->BTF", *exact), FLOAT32)  # the sum itself is float32


@pytest.mark.parametrize("gain", [1.0, 0.25])
@pytest.mark.parametrize(("equation", "fan_in"), [("BTD,DNH->BTNH", 256), ("BTNH,NHD->BTD", 64), ("BTF,FD->BTD", 512)])
def test_kernels_start_with_variance_gain_over_fan_in(equation, fan_in, gain):
    config = draw.tiny(d_model=256, d_head=16, d_ff=512)
    x = jnp.zeros([{"B": 1, "T": 1, **config.sizes}[letter] for letter in equation.split(",")[0]])
    params = Projection(config, equation, bias=True, gain=gain).init(jax.random.key(0), x)["params"]
    assert float(params["kernel"].std() * np.sqrt(fan_in / gain)) == pytest.approx(1, abs=0.05)
    assert abs(float(params["kernel"].mean())) < 0.05 * np.sqrt(gain / fan_in)
    assert not params["bias"].any()


def normalised(x, params, config):
    return oracle.norm(np.asarray(x, np.float64), params, config.to_dict())


def norm_params(norm, rng):
    bias = {"bias": rng.normal(size=16).astype(np.float32)} if norm == "layernorm" else {}
    return {"scale": (1 + 0.3 * rng.normal(size=16)).astype(np.float32)} | bias


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.5])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_the_oracles(norm, eps, rng):
    config, params = draw.tiny(norm=norm, norm_eps=eps), norm_params(norm, rng)
    x = rng.normal(size=(2, 3, 16)).astype(np.float32) * np.array([1e-3, 1.0, 1e3], np.float32)[:, None]
    y = NORMS[norm](config).apply({"params": params}, jnp.asarray(x))
    draw.close(y, normalised(x, params, config), FLOAT32)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_a_bfloat16_model_are_computed_in_float32(norm, rng):
    """Only the result is rounded; sums of squares in bfloat16 would be wrong in the second digit."""
    config, params = draw.tiny(norm=norm, dtype="bfloat16"), norm_params(norm, rng)
    x = jnp.asarray(3 + rng.normal(size=(2, 3, 16)), jnp.bfloat16)
    y = NORMS[norm](config).apply({"params": params}, x)
    assert y.dtype == "bfloat16"
    expected = normalised(x, params, config)
    assert (abs(np.asarray(y, np.float64) - expected) <= HALF_ULP * abs(expected) + FLOAT32).all()


@pytest.mark.parametrize("norm", NORMS)
def test_the_norm_of_equal_numbers_is_finite_with_finite_gradients(norm):
    module = NORMS[norm](draw.tiny(norm=norm))
    for x in (jnp.zeros((1, 2, 16)), jnp.full((1, 2, 16), 3.0)):
        params = module.init(jax.random.key(0), x)
        gradient = jax.grad(lambda x, p=params: module.apply(p, x).sum())(x)
        assert np.isfinite(module.apply(params, x)).all()
        assert np.isfinite(gradient).all()


def test_the_layernorm_of_a_shifted_row_is_the_same(rng):
    config, params = draw.tiny(norm="layernorm"), norm_params("layernorm", rng)
    x = jnp.asarray(rng.integers(-8, 8, size=(1, 4, 16)), jnp.float32)
    norm = NORMS["layernorm"](config)
    draw.close(norm.apply({"params": params}, x + 4096), norm.apply({"params": params}, x), FLOAT32)


@pytest.mark.parametrize(
    ("norm", "bias", "names"),
    [("layernorm", True, {"scale", "bias"}), ("layernorm", False, {"scale"}), ("rmsnorm", True, {"scale"})],
)
def test_norms_hold_what_the_config_says_and_start_neutral(norm, bias, names):
    params = make_norm(draw.tiny(norm=norm, bias=bias), "norm").init(jax.random.key(0), jnp.ones((1, 1, 16)))["params"]
    assert set(params) == names
    np.testing.assert_array_equal(params["scale"], np.ones(16))
    assert not params.get("bias", jnp.zeros(16)).any()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_the_oracles(name):
    x = np.concatenate([np.linspace(-6, 6, 101), [-1e4, 1e4]]).astype(np.float32)
    draw.close(ACTIVATIONS[name](jnp.asarray(x)), oracle.ACTIVATIONS[name](x), FLOAT32)
    slope = jax.vmap(jax.grad(ACTIVATIONS[name]))(jnp.asarray(x))
    assert np.isfinite(slope).all()
    draw.close(slope[-2:], [0, 1], FLOAT32)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_feed_forward_layer_is_the_oracles(activation, gated, bias, rng):
    config = draw.tiny(activation=activation, gated=gated, bias=bias)
    x = jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)
    params = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32) / 4,
        shapes(MLP(config), x),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    assert set(params) == {"up_proj", "down_proj"} | ({"gate_proj"} if gated else set())
    assert ("bias" in params["down_proj"]) == bias
    draw.close(MLP(config).apply({"params": params}, x), oracle.mlp(x, params, activation), FLOAT32)


def test_the_feed_forward_layer_treats_each_token_alone(rng):
    config = draw.tiny()
    x = jnp.asarray(rng.normal(size=(1, 4, 16)), jnp.float32)
    params = MLP(config).init(jax.random.key(0), x)
    changed = MLP(config).apply(params, x.at[:, 2].set(9)) != MLP(config).apply(params, x)
    np.testing.assert_array_equal(changed.any(axis=-1), [[False, False, True, False]])


TABLE = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def embed(*args, method=None, **fields):
    return Embed(draw.tiny(**fields), rows=8).apply({"params": {"embedding": TABLE}}, *args, method=method)


def test_embeddings_are_rows_and_a_tied_head_is_their_products(rng):
    index = jnp.asarray([[0, 7, 3], [3, 3, 1]])
    np.testing.assert_array_equal(embed(index), TABLE[index])
    x = jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)
    draw.close(embed(x, method="attend"), np.einsum("BTD,VD->BTV", np.float64(x), np.float64(TABLE)), FLOAT32)
    assert embed(index, dtype="bfloat16").dtype == "bfloat16"
    assert embed(x.astype(jnp.bfloat16), method="attend", dtype="bfloat16").dtype == "float32"


@pytest.mark.parametrize("index", [8, 100, -1, -8, -100])
def test_a_number_outside_of_the_table_is_nan_and_never_another_row(index):
    found = jax.jit(embed)(jnp.asarray([[2, index, 7]]))[0]
    np.testing.assert_array_equal(np.isnan(found).all(axis=-1), [False, True, False])
    np.testing.assert_array_equal(found[jnp.asarray([0, 2])], TABLE[[2, 7]])


def test_embeddings_start_with_rows_of_length_one():
    module = Embed(draw.tiny(d_model=64), rows=200)
    table = module.init(jax.random.key(0), jnp.zeros((1, 1), int))["params"]["embedding"]
    assert table.shape == (200, 64)
    assert float(jnp.square(table).sum(axis=-1).mean()) == pytest.approx(1, abs=0.05)


def test_parameters_are_stored_in_the_parameter_type():
    class All(nn.Module):
        @nn.compact
        def __call__(self, ids):
            config = draw.tiny(param_dtype="bfloat16")
            return make_norm(config, "norm")(MLP(config)(Embed(config, rows=8)(ids)))

    variables = jax.eval_shape(All().init, jax.random.key(0), jnp.zeros((1, 2), int))
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("bfloat16")}
