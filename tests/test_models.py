"""Whole models against the oracle, over the choices of the config; and what they refuse."""

import dataclasses

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from tolerances import BFLOAT16, FLOAT32

import jaxformer as jf

# Each pair of values of two fields stands in some row.
COVERING = {
    "published, with positions from a table": {
        "positions": "learned", "num_kv_heads": None, "activation": "gelu_tanh",
    },
    "published, with turned queries and keys": {
        "norm": "rmsnorm", "gated": True, "bias": False, "tie_embeddings": False, "activation": "silu",
    },
    "published, with sinusoids": {
        "positions": "sinusoidal", "residual": "post", "activation": "relu", "embed_scale": True, "num_kv_heads": None,
    },
    "no positions, one key head": {
        "positions": "none", "num_kv_heads": 1, "activation": "gelu", "attention_scale": 1.0, "d_head": 6,
    },
    "post, rmsnorm, gated, untied": {
        "residual": "post", "norm": "rmsnorm", "positions": "learned", "gated": True, "activation": "gelu",
        "tie_embeddings": False, "embed_scale": True,
    },
    "post, rotary, no bias, wide heads": {
        "residual": "post", "bias": False, "d_head": 10, "activation": "gelu_tanh", "attention_scale": 0.1,
    },
    "rmsnorm with biases, sinusoids, narrow heads": {
        "norm": "rmsnorm", "positions": "sinusoidal", "d_head": 2, "activation": "relu", "gated": True,
    },
    "layernorm without bias, untied, none": {
        "bias": False, "positions": "none", "tie_embeddings": False, "activation": "silu", "norm_eps": 0.1,
    },
    "one layer, one head, four times the width": {
        "num_layers": 1, "num_heads": 1, "num_kv_heads": None, "d_ff": None, "embed_scale": True, "residual": "post",
    },
    "slopes, windows by layer": {
        "positions": "alibi", "num_heads": 6, "num_kv_heads": 3, "d_head": 4, "window": (3, None), "num_layers": 3,
    },
    "a table of distances, capped scores of normed heads": {
        "positions": "relative", "relative_buckets": 4, "relative_reach": 4, "qk_norm": True, "softcap": 2.0,
        "bias": False, "residual": "post",
    },
    "turns by layer, of some lanes": {
        "rotary": (jf.Rotary(base=50.0, width=2), jf.Rotary(base=9.0, width=2, scaling="linear", factor=4.0)),
        "window": (2, None), "num_layers": 3, "norm": "rmsnorm", "qk_norm": True, "gated": True,
    },
    "sandwich, capped logits, biases of q, k and v alone": {
        "residual": "sandwich", "norm": "rmsnorm", "bias": False, "qkv_bias": True, "logit_softcap": 3.0,
        "embed_scale": True, "gated": True,
    },
    "parallel, a head of its own with a bias": {
        "residual": "parallel", "tie_embeddings": False, "head_bias": True, "rotary": jf.Rotary(base=50.0, width=2),
    },
    "slopes, normed embeddings, scaled logits": {
        "positions": "alibi", "embed_norm": True, "logit_scale": 0.25, "head_bias": True, "qkv_bias": False,
    },
    "post with a final norm, pre without": {
        "residual": "post", "final_norm": True, "positions": "sinusoidal", "embed_norm": True,
    },
    "parallel without a final norm": {"residual": "parallel", "final_norm": False, "norm": "rmsnorm"},
    "a window everywhere, stretched turns": {
        "rotary": jf.Rotary(base=100.0, scaling="yarn", factor=4.0, original_len=512), "window": 2, "d_head": 16,
    },
}  # fmt: skip
IDS = draw.ids(2, 6)


def expected_logits(model, params, ids, *args, **kwargs):
    config = model.config.to_dict()
    params = jf.trees.unstack_layers(params) if config["scan_layers"] else params
    return oracle.decoder(params, config, np.asarray(ids), *args, **kwargs)


@pytest.mark.parametrize("name", COVERING)
def test_logits_are_the_oracles(name):
    model, params = draw.model(**COVERING[name])
    logits = draw.logits(model, params, IDS)
    assert logits.dtype == "float32"
    draw.close(logits, expected_logits(model, params, IDS), FLOAT32)


@pytest.mark.parametrize(
    ("name", "param_dtype"), [*((name, "float32") for name in COVERING), (next(iter(COVERING)), "bfloat16")]
)
def test_bfloat16_logits_are_the_oracles_to_rounding(name, param_dtype):
    """Errors are measured against the largest logit; the parameters are exact in bfloat16."""
    model, params = draw.model(**COVERING[name], dtype="bfloat16", param_dtype=param_dtype)
    logits, expected = draw.logits(model, params, IDS), expected_logits(model, params, IDS)
    assert logits.dtype == "float32"
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(param_dtype)}
    draw.close(logits / abs(expected).max(), expected / abs(expected).max(), BFLOAT16)


@given(draw.configs(dtype="float32", param_dtype="float32"))
@settings(deadline=None, max_examples=6, derandomize=True)  # each compiles: the same ones can come from the cache
def test_logits_of_any_config_are_the_oracles(config):
    model = jf.build(config)
    params = draw.params(model)
    ids = draw.ids(1, 5, vocab_size=config.vocab_size)
    expected = expected_logits(model, params, ids)
    scale = max(1, abs(expected).max())
    draw.close(draw.logits(model, params, ids) / scale, expected / scale, FLOAT32)


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rotary", "alibi", "relative"])
def test_positions_and_segments_are_the_oracles(positions):
    model, params = draw.model(positions=positions)
    at = np.array([[-1, -1, 0, 1, 2, 3], [3, 4, 5, 6, -1, -1]])
    logits = draw.logits(model, params, IDS, jnp.asarray(at))
    draw.close(logits[at >= 0], expected_logits(model, params, IDS, at)[at >= 0], FLOAT32)
    segments = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 3, 3, 3]])
    logits = draw.logits(model, params, IDS, segments=jnp.asarray(segments))
    expected = expected_logits(model, params, IDS, segments=segments)
    draw.close(logits[segments > 0], expected[segments > 0], FLOAT32)
    row = draw.logits(model, params, IDS, jnp.arange(6)[None] + 2)  # one row of positions for all
    draw.close(row, draw.logits(model, params, IDS, jnp.tile(jnp.arange(6) + 2, (2, 1))), 0)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt2", 124439808), ("llama", 6738415616), ("smollm2_135m", 134515008)]
)
def test_published_models_have_the_published_number_of_parameters(name, parameters):
    for scan in (False, True):
        model = jf.build(dataclasses.replace(jf.PRESETS[name], scan_layers=scan))
        shapes = jax.eval_shape(model.init, jax.random.key(0), IDS)
        assert jf.trees.num_parameters(shapes) == parameters


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny"])
def test_a_new_model_is_close_to_uniform_and_every_parameter_can_learn(name):
    config = dataclasses.replace(jf.PRESETS[name], num_layers=1)
    params = jax.jit(jf.build(config).init)(jax.random.key(0), IDS)["params"]

    def loss(params, model):
        return jf.losses.cross_entropy(model.apply({"params": params}, IDS), IDS).mean()

    for dtype in ("float32", "bfloat16"):
        model = jf.build(dataclasses.replace(config, dtype=dtype))
        value, gradients = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, model)
        assert abs(value - np.log(257)) < 1
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        silent = {jf.trees.path_name(path) for path, g in jax.tree.leaves_with_path(gradients) if not g.any()}
        assert silent <= {"decoder/layers_0/attn/k_proj/bias"}  # it moves all scores of a query alike


@pytest.mark.parametrize("positions", ["rotary", "alibi", "relative"])
def test_a_prefix_is_the_oracles(positions):
    model, params = draw.model(positions=positions)
    logits = draw.logits(model, params, IDS, mask=jf.Mask.prefix_lm(jnp.asarray([3, 0]), 6))
    draw.close(logits, expected_logits(model, params, IDS, prefix=np.array([3, 0])), FLOAT32)


def test_segments_that_come_again_are_new_documents():
    model, params = draw.model()
    again, new = (jnp.asarray([numbers]) for numbers in ([1, 1, 2, 1, 1, 0], [1, 1, 2, 3, 3, 0]))
    np.testing.assert_array_equal(
        draw.logits(model, params, IDS[:1], segments=again), draw.logits(model, params, IDS[:1], segments=new)
    )


def test_hidden_states_and_their_logits_come_apart():
    model, params = draw.model()
    x, cache = draw.apply(model, {"params": params}, IDS, method="hidden")
    assert cache is None
    draw.close(draw.apply(model, {"params": params}, x, method="unembed"), draw.logits(model, params, IDS), FLOAT32)


# What they refuse -----------------------------------------------------------------------------------------------------

BAD_IDS = {
    "too large": ([[0, 29]], "token id 29 is outside of the vocabulary of 29; ids are 0 to 28"),
    "much too large": ([[100, 1]], "token id 100 is outside"),
    "negative": ([[5, -1]], "token id -1 is outside of the vocabulary of 29"),
    "float": ([[1.0, 2.0]], "ids have type float.*; token ids must be integers"),
    "bool": ([[True, False]], "ids have type bool; token ids must be integers"),
    "one row": ([1, 2], r"ids have shape \(2,\); they must be \[batch, tokens\]"),
    "no tokens": (np.zeros((2, 0), int), r"ids have shape \(2, 0\)"),
    "no rows": (np.zeros((0, 2), int), r"ids have shape \(0, 2\)"),
}


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", BAD_IDS)
def test_what_is_no_batch_of_ids_is_refused(name, array, unchecked):
    model, params = draw.model()
    ids, message = BAD_IDS[name]
    cache = jf.init_cache(model.config, 1, 4)
    for more in ({}, {"cache": cache}):
        with pytest.raises(ValueError, match=message):
            model.apply({"params": params}, array(ids), **more)
    with pytest.raises(ValueError, match=message):
        model.init(jax.random.key(0), array(ids))


@pytest.mark.parametrize("name", ["float", "bool", "one row", "no tokens"])
def test_types_and_shapes_are_refused_under_jit_too(name, unchecked):
    model, params = draw.model()
    ids, message = BAD_IDS[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.apply, {"params": params}, jnp.asarray(ids))


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("bad", [29, 100, -1])
def test_an_id_outside_of_the_vocabulary_is_nan_under_jit(bad, positions):
    model, params = draw.model(positions=positions)
    logits = draw.logits(model, params, IDS.at[1, 2].set(bad))
    assert np.isnan(logits[1]).all()  # its whole row, earlier tokens too: 0 times NaN is NaN
    np.testing.assert_array_equal(logits[0], draw.logits(model, params, IDS)[0])


def test_numpy_parameters_and_ids_will_do(unchecked):
    model, params = draw.model(positions="learned")
    logits = model.apply({"params": jax.tree.map(np.asarray, params)}, np.asarray(IDS))
    draw.close(logits, draw.logits(model, params, IDS), FLOAT32)


def test_a_position_beyond_the_table_is_refused_and_nan_under_jit():
    model, params = draw.model(positions="learned", max_len=8)
    last = jnp.asarray([[2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5]])
    model.apply({"params": params}, IDS, last)
    with pytest.raises(ValueError, match="position 8 is beyond the learned table of max_len=8; shorten the text"):
        model.apply({"params": params}, IDS, last + 1)
    with pytest.raises(ValueError, match="position 8 is beyond the learned table"):
        model.apply({"params": params}, draw.ids(1, 9))
    logits = draw.logits(model, params, IDS, last + 1)
    assert np.isnan(logits[0]).all()
    np.testing.assert_array_equal(logits[1], draw.logits(model, params, IDS, last.at[1].add(1))[1])


def test_known_positions_are_checked_inside_of_jit_too():
    model, params = draw.model(positions="learned", max_len=8)

    def logits(at):
        return jax.eval_shape(lambda p: model.apply({"params": p}, IDS, at), params)  # at is closed over, not traced

    assert logits(jnp.arange(6)[None] + 2).shape == (2, 6, 29)
    with pytest.raises(ValueError, match="position 8 is beyond the learned table"):
        logits(jnp.arange(6)[None] + 3)


def test_packed_rows_have_no_cache():
    model, params = draw.model()
    with pytest.raises(ValueError, match="a cache holds one document a row; decode packed segments as rows"):
        model.apply({"params": params}, IDS, segments=jnp.ones_like(IDS), cache=jf.init_cache(model.config, 2, 8))
