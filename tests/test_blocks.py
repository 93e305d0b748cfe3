"""Attention with its projections, the residual arrangements, and dropout, which differs wherever it is drawn."""

import dataclasses

import draw
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.blocks import RESIDUAL, Block, Layer, Stack
from jaxformer.multi_head import Attention


@pytest.mark.parametrize("positions", ["none", "rotary"])
@pytest.mark.parametrize("fields", [{}, {"num_kv_heads": 1, "d_head": 6, "bias": False}, {"attention_scale": 0.9}])
def test_cross_attention_is_the_oracles(fields, positions, rng):
    """Queries from one sequence, keys and values from another of other length and positions."""
    config = draw.tiny(positions=positions, **fields)
    x, y = (jnp.asarray(rng.normal(size=(2, T, 16)), jnp.float32) for T in (3, 5))
    x_at, y_at = np.array([[2, 3, 4], [0, 1, -1]]), np.array([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    mask = jf.Mask(jnp.asarray(x_at), jnp.asarray(y_at), causal=True)
    params = draw.variables(Attention(config), x, y, mask, method=call)["params"]
    z = Attention(config).apply({"params": params}, x, y, mask, method=call)
    allowed = oracle.allowed(x_at, y_at, causal=True)
    expected = oracle.multi_head(np.asarray(x), np.asarray(y), params, config.to_dict(), x_at, y_at, allowed)
    draw.close(z, expected, FLOAT32)


def call(module, x, y, mask):
    return module.attend(x, mask, source=y)


@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_attending_is_its_two_calls(positions, rng):
    x, at = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32), jnp.array([[0, 1, 2, 3], [-1, 0, 1, 2]])
    module, mask = Attention(draw.tiny(positions=positions)), jf.Mask(at, at, causal=True)
    params = draw.variables(module, x, mask, method="attend")

    def two_calls(module, x, turned):
        return module(x, module.keys_values(x, turned), mask, positions=turned)

    def one_call(module, x, turned):
        return module.attend(x, mask, positions=turned)

    for turned in (at, at + 3):
        found = [module.apply(params, x, turned, method=method) for method in (one_call, two_calls)]
        np.testing.assert_array_equal(*found)


def test_packed_documents_need_a_mask_that_keeps_them_apart():
    model, params = draw.model()
    ids, segments, at = draw.ids(1, 4), jnp.array([[1, 1, 2, 2]]), jnp.arange(4)[None]
    with pytest.raises(ValueError, match="the mask has no segments, so that packed documents would see each other"):
        model.apply({"params": params}, ids, segments=segments, mask=jf.Mask(at, at, causal=True))
    mask = jf.Mask(at, at, segments, segments, causal=True)
    logits = model.apply({"params": params}, ids, segments=segments, mask=mask)
    draw.close(logits, model.apply({"params": params}, ids, segments=segments), FLOAT32)


def test_where_the_norms_stand():
    """Every norm multiplies by its own number, so that the sum tells which stood where."""
    numbers = {"attn_norm": 2, "mlp_norm": 3, "attn_out_norm": 5, "mlp_out_norm": 7}
    sublayers = {"attn": lambda x: x + 1, "mlp": lambda x: x + 10}

    def norm(name):
        return lambda x: numbers[name] * x

    found = {name: join(jnp.asarray(1.0), sublayers, norm) for name, join in RESIDUAL.items()}
    assert found["pre"] == 4 + (3 * 4 + 10)
    assert found["post"] == 3 * (6 + (6 + 10))
    assert found["sandwich"] == 16 + 7 * (3 * 16 + 10)
    assert found["parallel"] == 1 + (2 + 1) + (3 + 10)


@pytest.mark.parametrize("residual", RESIDUAL)
def test_a_stack_is_the_oracles_blocks(residual, rng):
    config = draw.tiny(residual=residual)
    x, at = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32), np.tile(np.arange(4), (2, 1))
    for causal in (True, False):
        stack = Stack(config, causal=causal)
        params = draw.variables(stack, x, jnp.asarray(at))["params"]
        y, cache = stack.apply({"params": params}, x, jnp.asarray(at))
        expected, allowed = np.asarray(x), oracle.allowed(at, at, causal=causal)
        for i in range(2):
            expected = oracle.block(expected, params[f"layers_{i}"], config.to_dict(), at, allowed)
        if residual != "post":
            expected = oracle.norm(expected, params["final_norm"], config.to_dict())
        assert cache is None
        assert ("final_norm" in params) == (residual != "post")
        draw.close(y, expected, FLOAT32)


# Dropout --------------------------------------------------------------------------------------------------------------

DROP = draw.tiny(num_layers=4, d_model=64, d_ff=8, residual="pre", dropout=0.5, vocab_size=3, max_len=64)
ONES = {"attn": "o_proj", "mlp": "down_proj"}


def masks_of(scan, sublayer, key, B=2):
    """What a sublayer whose output is all ones adds to the stream in each layer: 2 where it is kept, [L B T D]."""
    model = jf.build(dataclasses.replace(DROP, scan_layers=scan))
    params = jax.tree.map(jnp.zeros_like, draw.params(jf.build(DROP)))
    for i in range(4):
        params["decoder"][f"layers_{i}"][sublayer][ONES[sublayer]]["bias"] += 1
    variables = {"params": jf.trees.stack_layers(params) if scan else params}
    ids, rngs = jnp.zeros((B, 64), jnp.int32), None if key is None else {"dropout": key}
    _, read = draw.apply(model, variables, ids, mutable=("intermediates",), rngs=rngs)
    stored = read["intermediates"]
    xs = stored["decoder"]["layers"]["x"] if scan else [stored["decoder"][f"layers_{i}"]["x"] for i in range(4)]
    return np.diff(np.stack([stored["x"], *xs]), axis=0)


def agreement(a, b):
    return float((a == b).mean())


@pytest.mark.parametrize("scan", [False, True])
def test_dropout_differs_between_layers_sublayers_rows_tokens_and_keys(scan):
    key = jax.random.key(0)
    masks = {name: masks_of(scan, name, key) for name in ONES}
    for mask in masks.values():
        assert set(np.unique(mask)) == {0.0, 2.0}  # what is kept is scaled by exactly 1 / (1 - rate)
        assert all(abs(float((layer > 0).mean()) - 0.5) < 0.03 for layer in mask)
    drawn = [layer for mask in masks.values() for layer in mask]
    for i, one in enumerate(drawn):
        assert abs(agreement(one[0], one[1]) - 0.5) < 0.05  # rows
        assert abs(agreement(one[:, :-1], one[:, 1:]) - 0.5) < 0.05  # tokens
        for other in drawn[:i]:
            assert abs(agreement(one, other) - 0.5) < 0.05
    np.testing.assert_array_equal(masks_of(scan, "mlp", key), masks["mlp"])
    assert abs(agreement(masks_of(scan, "mlp", jax.random.key(1)), masks["mlp"]) - 0.5) < 0.05
    np.testing.assert_array_equal(masks_of(scan, "mlp", None), np.ones((4, 2, 64, 64)))  # no key, no dropout


def test_dropout_reaches_the_embeddings():
    model = jf.build(DROP)
    params = jax.tree.map(jnp.ones_like, draw.params(model))
    ids, rngs = jnp.zeros((2, 64), jnp.int32), {"dropout": jax.random.key(0)}
    _, read = draw.apply(model, {"params": params}, ids, mutable=("intermediates",), rngs=rngs)
    x = np.asarray(read["intermediates"]["x"])
    assert set(np.unique(x)) == {0.0, 2.0}
    assert abs(float((x > 0).mean()) - 0.5) < 0.03


@pytest.mark.parametrize("scan", [False, True])
def test_a_rate_of_zero_makes_the_key_irrelevant(scan):
    model, params = draw.model(scan_layers=scan)
    rngs = {"dropout": jax.random.key(0)}
    ids = draw.ids(1, 4)
    np.testing.assert_array_equal(
        draw.apply(model, {"params": params}, ids, rngs=rngs), draw.logits(model, params, ids)
    )


# Other code bases -----------------------------------------------------------------------------------------------------


def test_a_block_works_inside_of_nnx(rng):
    x, at = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32), jnp.arange(4)[None]

    class One(nn.Module):
        @nn.compact
        def __call__(self, x):
            (y, _), _ = Block(draw.tiny())((x, None), Layer(0), at, jf.Mask(at, at, causal=True))
            return y

    bridged = nnx.bridge.ToNNX(One(), rngs=nnx.Rngs(0)).lazy_init(x)
    params = jax.tree.map(lambda leaf: leaf.get_value(), bridged.Block_0, is_leaf=lambda x: isinstance(x, nnx.Variable))
    draw.close(bridged(x), One().apply({"params": {"Block_0": params}}, x), FLOAT32)
    gradient = nnx.grad(lambda module: module(x).sum())(bridged)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_attention_alone_works_inside_of_nnx(rng):
    x, mask = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32), jf.Mask.causal(4)
    module = nnx.bridge.ToNNX(Attention(draw.tiny()), rngs=nnx.Rngs(0))
    module = nnx.bridge.lazy_init(module, x, mask, method="attend")
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    expected = Attention(draw.tiny()).apply({"params": params}, x, mask, method="attend")
    draw.close(module(x, mask, method="attend"), expected, FLOAT32)
    assert abs(nnx.grad(lambda module: module(x, mask, method="attend").sum())(module)["q_proj"]["kernel"]).max() > 0
