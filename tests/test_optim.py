"""The arithmetic of optimizers, which parameters they decay, and which steps are left out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from draw import close, tiny
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.optim import OPTIMIZERS, adafactor, adamw, decay_mask, lion, muon, skip_spikes
from jaxformer.schedules import warmup_cosine
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


# Other directions -----------------------------------------------------------------------------------------------------


def test_lion_is_the_sign_of_a_moment(rng):
    x, m = rng.normal(size=(4, 3)).astype(np.float32), 0.0
    params, gradient = {"proj": {"kernel": x}}, rng.normal(size=(4, 3)).astype(np.float32)
    made = stepped(lion(0.1, weight_decay=0.3, clip_norm=1e9), params, {"proj": {"kernel": gradient}}, steps=4)
    for _ in range(4):
        x = x - 0.1 * (np.sign(0.9 * m + 0.1 * gradient) + 0.3 * x)
        m = 0.99 * m + 0.01 * gradient
    close(made["proj"]["kernel"], x, FLOAT32)


def test_adafactor_keeps_rows_and_columns_of_second_moments(rng):
    """Algorithm 4 of Shazeer and Stern, with the clipping and the relative step of algorithms 5 and 6."""
    x = rng.normal(size=(4, 3)).astype(np.float32)
    params, gradient = {"bias": x}, rng.normal(size=(4, 3)).astype(np.float32)
    optimizer = adafactor(0.1, clip_norm=1e9, min_dim_size_to_factor=2)
    made = stepped(optimizer, params, {"bias": gradient}, steps=3)
    rows, columns = np.zeros(4), np.zeros(3)
    for step in range(1, 4):
        beta, squared = 1 - step**-0.8, np.float64(gradient) ** 2 + 1e-30
        rows = beta * rows + (1 - beta) * squared.mean(axis=1)
        columns = beta * columns + (1 - beta) * squared.mean(axis=0)
        update = gradient / np.sqrt(np.outer(rows, columns) / rows.mean())
        update = update / max(1.0, np.sqrt((update**2).mean()))
        x = x - 0.1 * max(1e-3, np.sqrt((np.float64(x) ** 2).mean())) * update
    close(made["bias"], x, FLOAT32)


MUON = {"num_layers": 2, "gated": True, "num_kv_heads": 1, "positions": "learned"}


@pytest.mark.parametrize("scan_layers", [False, True])
def test_muon_takes_kernels_as_matrices_from_inputs_to_outputs(scan_layers, rng):
    """Each step's singular values are near 0.2 sqrt(the larger side): the gradient's shape is gone, its axes stay."""
    params = shapes(tiny(scan_layers=scan_layers, **MUON))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
    gradient = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    made = leaves(stepped(muon(1.0, clip_norm=1e9), params, gradient))
    for path, leaf in made.items():
        if not path.startswith("decoder/") or not path.endswith("kernel"):
            np.testing.assert_allclose(np.abs(leaf), 1.0, rtol=1e-4, err_msg=path)  # Adam's first step
            continue
        for layer in leaf if scan_layers else [leaf]:
            inputs = 2 if "o_proj" in path else 1
            matrix = np.asarray(layer).reshape(int(np.prod(layer.shape[:inputs])), -1)
            values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * np.sqrt(max(matrix.shape)))
            assert 0.6 < values.min() <= values.max() < 1.3, path


def test_a_stack_of_layers_is_optimized_as_its_layers_are(rng):
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes(tiny(num_layers=2))
    )
    gradient = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    for make in (adamw, lion, muon):
        apart = stack_layers(stepped(make(0.1), params, gradient, steps=2))
        together = stepped(make(0.1), stack_layers(params), stack_layers(gradient), steps=2)
        jax.tree.map(lambda a, b: close(a, b, FLOAT32), together, apart)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_decays_kernels_alone_and_checks_its_numbers(name):
    params = {"decoder": {"layers_0": {"mlp": {"up_proj": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}}}}
    made = leaves(stepped(OPTIMIZERS[name](0.5, weight_decay=0.2), params, jax.tree.map(jnp.zeros_like, params)))
    np.testing.assert_allclose(made["decoder/layers_0/mlp/up_proj/kernel"], 0.9, rtol=1e-6)
    np.testing.assert_array_equal(made["decoder/layers_0/mlp/up_proj/bias"], 1)
    with pytest.raises(ValueError, match=r"clip_norm=0\.0 must be positive"):
        OPTIMIZERS[name](0.5, clip_norm=0.0)


# Steps that are not taken ---------------------------------------------------------------------------------------------


def run_of(optimizer, params, gradients):
    """The parameters after each gradient, and the last state."""
    update, state, seen = jax.jit(optimizer.update), optimizer.init(params), []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen, state


def test_without_a_spike_nothing_changes(rng):
    gradients = [{"bias": jnp.asarray(rng.normal(size=3), jnp.float32)} for _ in range(6)]
    params = {"bias": jnp.ones(3)}
    found, state = run_of(skip_spikes(adamw(0.1), factor=100.0, after=2), params, gradients)
    expected, inner = run_of(adamw(0.1), params, gradients)
    jax.tree.map(np.testing.assert_array_equal, (found, state.inner), (expected, inner))
    assert (state.seen, state.skipped) == (6, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(bad, rng):
    gradients = [{"bias": jnp.asarray(rng.normal(size=3), jnp.float32)} for _ in range(4)]
    params = {"bias": jnp.ones(3)}
    broken = {"bias": jnp.asarray([0.0, bad, 1.0])}
    optimizer = skip_spikes(adamw(warmup_cosine(0.1, 1, 9)))
    found, state = run_of(optimizer, params, [*gradients[:2], broken, *gradients[2:]])
    expected, one = run_of(optimizer, params, gradients)
    jax.tree.map(np.testing.assert_array_equal, found[2], found[1])
    jax.tree.map(np.testing.assert_array_equal, (found[3:], state.inner), (expected[2:], one.inner))
    assert (state.seen, state.skipped, one.skipped) == (4, 1, 0)


def test_a_spike_is_left_out_and_a_new_level_is_accepted_after_a_while():
    sizes = [1.0] * 5 + [50.0] + [1.0] * 3 + [50.0] * 40
    optimizer = skip_spikes(optax.sgd(1.0), factor=10.0, decay=0.9, after=3)
    found, state = run_of(optimizer, {"bias": jnp.zeros(())}, [{"bias": jnp.asarray(size)} for size in sizes])
    steps = -np.diff([0.0, *[float(params["bias"]) for params in found]])
    np.testing.assert_array_equal(steps[:9], [1, 1, 1, 1, 1, 0, 1, 1, 1])
    skipped = int((steps == 0).sum())
    assert state.skipped == skipped
    assert 2 <= skipped < 10
    assert (steps[9 + skipped :] == 50).all()
    early = [1.0, 50.0, 1.0]
    _, state = run_of(optimizer, {"bias": jnp.zeros(())}, [{"bias": jnp.asarray(size)} for size in early])
    assert state.skipped == 0  # two norms are no usual size yet


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"factor": np.nan}, {"decay": 1.0}, {"after": 0}])
def test_rules_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="must be above 1 or None"):
        skip_spikes(optax.sgd(1.0), **options)
