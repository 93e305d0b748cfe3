"""The schedule, the optimizer's arithmetic, and which parameters it decays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from draw import close, tiny
from hypothesis import given
from hypothesis import strategies as st
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.optim import adamw, decay_mask, warmup_cosine
from jaxformer.trees import path_name, stack_layers


def shapes(config):
    texts = [jax.ShapeDtypeStruct((1, 1), "int32")] * (2 if config.architecture == "encoder_decoder" else 1)
    return jax.eval_shape(jf.build(config).init, jax.random.key(0), *texts)["params"]


def leaves(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def stepped(optimizer, params, gradients, steps=1):
    """The parameters after some steps with the same gradients."""

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


@given(st.integers(0, 20), st.integers(1, 30), st.floats(1e-5, 1.0), st.floats(0, 1), st.integers(0, 60))
def test_the_schedule_is_the_oracles(warmup, after, peak, final_fraction, step):
    total = warmup + after
    schedule = warmup_cosine(peak, warmup, total, final_fraction)
    expected = oracle.warmup_cosine(step, peak=peak, warmup=warmup, total=total, final_fraction=final_fraction)
    close(schedule(step), expected, FLOAT32)


def test_the_schedule_starts_at_zero_peaks_after_the_warm_up_and_ends_at_a_tenth():
    schedule = warmup_cosine(0.5, 10, 110)
    close([schedule(step) for step in (0, 5, 10, 60, 110, 500)], [0, 0.25, 0.5, 0.275, 0.05, 0.05], FLOAT32)


@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (11, 10), (-1, 10), (0, 0)])
def test_a_warm_up_ends_before_the_run(warmup, total):
    with pytest.raises(ValueError, match=f"warmup_steps={warmup} must be at least 0 and below num_steps={total}"):
        warmup_cosine(1e-3, warmup, total)


def test_adamw_is_the_oracles_over_several_steps(rng):
    options = {"b1": 0.8, "b2": 0.97, "eps": 1e-3}
    names = ("kernel", "bias")
    params, gradients = ({n: jnp.asarray(rng.normal(size=(3, 4)), jnp.float32) for n in names} for _ in range(2))
    rate = warmup_cosine(0.1, 2, 5)
    made = stepped(
        adamw(rate, weight_decay=0.3, clip_norm=1e9, **options), {"proj": params}, {"proj": gradients}, steps=5
    )
    for name in names:
        x, m, v = params[name], 0, 0
        for step in range(5):
            x, m, v = oracle.adamw(
                x,
                gradients[name],
                m,
                v,
                step + 1,
                lr=oracle.warmup_cosine(step, peak=0.1, warmup=2, total=5, final_fraction=0.1),
                weight_decay=0.3 if name == "kernel" else 0.0,
                **options,
            )
        close(made["proj"][name], x, FLOAT32)


@pytest.mark.parametrize("size", [0.1, 1.0, 25.0])
def test_clipping_acts_on_the_norm_of_all_gradients_together(size, rng):
    """A large eps makes the step follow the size of the gradient, which AdamW otherwise divides out."""
    options = {"lr": 1.0, "b1": 0.9, "b2": 0.95, "eps": 100.0}
    tree = {"a": {"bias": rng.normal(size=5)}, "b": {"bias": rng.normal(size=(2, 3))}}
    gradients = jax.tree.map(lambda x: size * x / oracle.global_norm(tree), tree)
    assert oracle.global_norm(gradients) == pytest.approx(size)
    params = jax.tree.map(jnp.zeros_like, jax.tree.map(jnp.asarray, tree))
    made = stepped(adamw(1.0, eps=100.0, clip_norm=0.5), params, jax.tree.map(jnp.float32, gradients))
    clipped = oracle.clip_by_global_norm(gradients, 0.5)
    for name in tree:
        expected, *_ = oracle.adamw(0.0, clipped[name]["bias"], 0, 0, 1, **options)
        close(100 * made[name]["bias"], 100 * expected, FLOAT32)


@pytest.mark.parametrize("name", jf.PRESETS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_kernels_decay_and_everything_else_is_exactly_unchanged(name, scan_layers):
    """On the tree of every preset, made small in width: parameters 1, gradients 0, rate 1, decay 0.1."""
    preset = jf.PRESETS[name]
    sizes = {"vocab_size": 11, "max_len": 8, "num_layers": 2, "d_model": 24, "num_heads": 6, "d_ff": 16}
    kv_heads = preset.num_kv_heads and 3
    config = dataclasses.replace(preset, **sizes, num_kv_heads=kv_heads, scan_layers=scan_layers)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes(config))
    mask = leaves(decay_mask(params))
    made = leaves(stepped(adamw(1.0, weight_decay=0.1), params, jax.tree.map(jnp.zeros_like, params)))
    kinds = {path.rpartition("/")[2] for path in made}
    assert kinds == {"kernel", "scale", "embedding"} | ({"bias"} if config.bias else set())
    for path, leaf in made.items():
        decayed = path.endswith("/kernel")
        assert mask[path] is decayed
        np.testing.assert_array_equal(leaf, np.float32(1) - np.float32(0.1) if decayed else np.float32(1), path)


@pytest.mark.parametrize("name", jf.PRESETS)
def test_what_decays_is_all_that_multiplies_tokens_whether_layers_are_stacked_or_not(name):
    """Kernels alone: not embeddings, though they have two axes, and not scales, though stacked ones have."""
    loop = shapes(jf.PRESETS[name])
    mask = decay_mask(loop)
    roles = {path.split("/")[-2] for path, decayed in leaves(mask).items() if decayed}
    projections = {f"{kind}_proj" for kind in ("q", "k", "v", "o", "up", "down")}
    config = jf.PRESETS[name]
    head = set() if config.tie_embeddings else {"lm_head"}
    head |= {"transform_proj"} if config.head == "masked_lm" else set()
    head |= {"proj"} if config.d_embed else set()
    assert roles == projections | ({"gate_proj"} if config.gated else set()) | head
    stacked = jax.eval_shape(stack_layers, loop)
    again = decay_mask(stacked)
    assert jax.tree.structure(again) == jax.tree.structure(
        decay_mask(shapes(dataclasses.replace(config, scan_layers=True)))
    )
    first = {
        p.replace("layers_0", "layers"): m for p, m in leaves(mask).items() if "layers_" not in p or "layers_0/" in p
    }
    assert leaves(again) == first


def test_moments_are_float32_and_lie_beside_their_parameters():
    params = shapes(tiny(dtype="bfloat16"))
    state = jax.eval_shape(adamw(1e-3).init, params)
    for moment in ("mu", "nu"):
        moments = leaves(optax.tree.get(state, moment))
        assert {path: (leaf.shape, leaf.dtype) for path, leaf in moments.items()} == {
            path: (leaf.shape, jnp.dtype("float32")) for path, leaf in leaves(params).items()
        }


@pytest.mark.parametrize(("decay", "clip"), [(-0.1, 1.0), (0.1, 0.0), (0.1, -1.0), (np.nan, 1.0), (0.1, np.nan)])
def test_decay_and_clip_norm_are_checked(decay, clip):
    with pytest.raises(ValueError, match=f"weight_decay={decay} must not be negative and clip_norm={clip} must be"):
        adamw(1e-3, weight_decay=decay, clip_norm=clip)
