"""Small models at random for the tests: configs, parameters in which every leaf matters, token ids."""

import dataclasses
from functools import cache, partial
from typing import get_args

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.config import Positions

TINY = jf.Config(
    vocab_size=29,
    max_len=16,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    d_ff=24,
    rotary=jf.Rotary(base=100.0),
)


def tiny(**fields):
    return dataclasses.replace(TINY, **fields)


def variables(module, *args, seed=0, **kwargs):
    """Variables of a module, none of them at its neutral value, all of them exact in bfloat16."""
    shapes = jax.eval_shape(lambda *args: module.init(jax.random.key(0), *args, **kwargs), *args)
    return at_random(shapes, seed)


def params(model, seed=0):
    return at_random(_shapes(model), seed)


@cache
def _shapes(model):
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


FAN_IN_AXES = {"q_proj": [-3], "k_proj": [-3], "v_proj": [-3], "o_proj": [-3, -2]}


def at_random(shapes, seed):
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        *_, owner, kind = (key.key for key in path)
        x = rng.normal(size=leaf.shape)
        fan_in = np.prod([leaf.shape[axis] for axis in FAN_IN_AXES.get(owner, [-2])]) if kind == "kernel" else 1
        x = {"kernel": x / np.sqrt(fan_in), "scale": 1 + 0.3 * x, "bias": 0.3 * x, "embedding": 0.5 * x}[kind]
        return jnp.asarray(x, jnp.bfloat16).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)


def model(seed=0, **fields):
    """The tiny model with these fields, and parameters for it."""
    made = jf.build(tiny(**fields))
    return made, params(made, seed)


def ids(*shape, seed=0, vocab_size=TINY.vocab_size):
    return jnp.asarray(np.random.default_rng(seed).integers(vocab_size, size=shape), jnp.int32)


@partial(jax.jit, static_argnums=0, static_argnames=("method", "mutable"))
def apply(model, variables, *args, **kwargs):
    return model.apply(variables, *args, **kwargs)


def logits(model, params, *args, **kwargs):
    return apply(model, {"params": params}, *args, **kwargs)


def exact(rng, shape):
    """Numbers that bfloat16 holds exactly, as float32."""
    return np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32))


def close(actual, expected, atol):
    np.testing.assert_allclose(np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=0, atol=atol)


@st.composite
def rotaries(draw):
    """Rotary positions of every scaling, which turn all lanes."""
    scaling = draw(st.sampled_from(["none", "linear", "ntk", "by_parts", "yarn"]))
    base, factor = draw(st.floats(100.0, 1e6)), 1.0 if scaling == "none" else draw(st.floats(1.0, 8.0))
    return _unchecked(jf.Rotary, base=base, scaling=scaling, factor=factor, original_len=draw(st.integers(64, 4096)))


@st.composite
def configs(draw, **fixed):
    """Valid configs of small models."""
    positions = draw(st.sampled_from(list(get_args(Positions))))
    kv_heads, group, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    width *= 2 if positions in ("rotary", "sinusoidal", "sinusoidal_halves") else 1
    explicit = draw(st.booleans())
    d_model = draw(st.integers(1, 12)) * 2 if explicit else kv_heads * group * width
    layers = draw(st.integers(1, 4))
    fields = {
        "vocab_size": draw(st.integers(1, 40)),
        "max_len": draw(st.integers(8, 40)),
        "d_model": d_model,
        "num_layers": layers,
        "num_distinct_layers": draw(st.none() | st.sampled_from([n for n in range(1, layers + 1) if layers % n == 0])),
        "num_heads": kv_heads * group,
        "num_kv_heads": None if group == 1 and draw(st.booleans()) else kv_heads,
        "d_head": width if explicit else None,
        "d_ff": draw(st.none() | st.integers(1, 40)),
        "residual": draw(st.sampled_from(["pre", "post", "sandwich", "parallel"])),
        "norm": draw(st.sampled_from(["layernorm", "rmsnorm"])),
        "norm_eps": draw(st.floats(1e-6, 1.0)),
        "positions": positions,
        "rotary": draw(rotaries() | st.tuples(rotaries(), rotaries())),
        "window": draw(st.none() | st.integers(1, 9) | st.tuples(st.integers(1, 9), st.none())),
        "final_norm": draw(st.none() | st.booleans()),
        "qkv_bias": draw(st.none() | st.booleans()),
        "logit_scale": draw(st.none() | st.floats(0.1, 2.0)),
        "logit_softcap": draw(st.none() | st.floats(1.0, 50.0)),
        "softcap": draw(st.none() | st.floats(1.0, 50.0)),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
        "activation": draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"])),
        "attention_scale": draw(st.none() | st.floats(0.01, 1.0)),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "param_dtype": draw(st.sampled_from(["float32", "bfloat16"])),
    }
    names = ("embed_norm", "head_bias", "qk_norm", "gated", "bias", "embed_scale", "tie_embeddings", "scan_layers")
    flags = {name: draw(st.booleans()) for name in names}
    return _unchecked(jf.Config, **(fields | flags | fixed))


def _unchecked(make, **fields):
    # The check against annotations takes a random element of a tuple, and hypothesis allows no randomness but its own.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return make(**fields)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
