"""Low-rank updates: they begin as nothing, train alone, and become a plain model again."""

from functools import partial

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draw import close
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer import lora, sharding
from jaxformer.data import Batch
from jaxformer.objectives import next_token
from jaxformer.trees import path_name, stack_layers, unstack_layers

CONFIG = {"gated": True, "num_kv_heads": 1}


def leaves(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def text():
    ids = draw.ids(2, 9)
    positions = np.broadcast_to(np.arange(8), (2, 8)).astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.ones((2, 8), np.float32), positions, np.ones((2, 8), np.int32))


@partial(jax.jit, static_argnums=(0, 1))
def losses(objective, model, params):
    return objective(model, params, jax.tree.map(jnp.asarray, text()), None)[0]


def at_random(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), tree)


def test_at_first_the_model_is_the_base():
    _, params = draw.model(**CONFIG)
    factors = lora.init(jax.random.key(0), params, rank=3)
    jax.tree.map(np.testing.assert_array_equal, lora.merged({"base": params, "lora": factors}), params)
    kernels = {name for name in leaves(params) if name.startswith("decoder/") and name.endswith("kernel")}
    assert {name.rpartition("/")[0] for name in leaves(factors)} == kernels
    a = leaves(factors)["decoder/layers_0/mlp/up_proj/kernel/lora_a"]
    assert a.shape == (16, 3)
    assert 0.1 < np.asarray(a).std() * 4 < 2


@pytest.mark.parametrize("module", ["q_proj", "k_proj", "o_proj", "down_proj"])
def test_the_product_is_added_to_the_kernel_as_a_matrix(module):
    _, params = draw.model(**CONFIG)
    factors = at_random(lora.init(jax.random.key(0), params, rank=2, modules=[module]))
    made = leaves(lora.merged({"base": params, "lora": factors}, alpha=6.0))
    for name, kernel in leaves(params).items():
        if f"/{module}/kernel" not in name:
            np.testing.assert_array_equal(made[name], kernel)
            continue
        a, b = (np.float64(leaves(factors)[f"{name}/lora_{factor}"]) for factor in "ab")
        product = a.reshape(-1, 2) @ b.reshape(2, -1)
        close(made[name], np.float64(kernel) + 3 * product.reshape(kernel.shape), 1e-5)


def test_stacked_layers_have_factors_of_their_own():
    _, params = draw.model(**CONFIG)
    factors = at_random(lora.init(jax.random.key(0), stack_layers(params), rank=2))
    apart = unstack_layers(factors)
    stacked = lora.merged({"base": stack_layers(params), "lora": factors})
    loop = lora.merged({"base": params, "lora": apart})
    jax.tree.map(lambda a, b: close(a, b, 1e-5), stacked, stack_layers(loop))


def test_training_moves_the_factors_alone_and_the_merged_model_is_what_was_trained():
    model, base = draw.model(**CONFIG)
    params = {"base": jax.tree.map(jnp.copy, base), "lora": lora.init(jax.random.key(0), base, rank=4)}
    optimizer = lora.optimizer(jf.optim.adamw(1e-2))
    objective = lora.objective(next_token, alpha=8.0)
    step = jf.make_train_step(model, optimizer, objective=objective)
    state = jf.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    assert jf.trees.num_parameters(state.opt_state) < 2.1 * jf.trees.num_parameters(params["lora"]) + 9
    first = None
    for _ in range(60):
        state, metrics = step(state, text())
        first = metrics["loss"] if first is None else first
    assert metrics["loss"] < 0.5 * first
    jax.tree.map(np.testing.assert_array_equal, state.params["base"], base)
    plain = lora.merged(state.params, alpha=8.0)
    close(losses(next_token, model, plain), losses(objective, model, state.params), FLOAT32)
    assert jax.tree.structure(plain) == jax.tree.structure(base)


@pytest.mark.parametrize("scan", [False, True])
def test_factors_lie_on_a_mesh_as_their_kernels(scan):
    model = jf.build(draw.tiny(vocab_size=32, num_heads=2, num_kv_heads=2, scan_layers=scan))
    optimizer = lora.optimizer(jf.optim.adamw(1e-2))

    def init():
        base = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        params = {"base": base, "lora": lora.init(jax.random.key(1), base, rank=2)}
        return jf.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    layout = leaves(sharding.shardings(jax.eval_shape(init), sharding.make_mesh({"fsdp": 4, "tensor": 2})))
    layers = ("layers", (None,)) if scan else ("layers_0", ())
    at = f"params/lora/decoder/{layers[0]}/attn"
    assert layout[f"{at}/q_proj/kernel/lora_a"].spec == P(*layers[1], "fsdp", None)
    assert layout[f"{at}/q_proj/kernel/lora_b"].spec == P(*layers[1], None, "tensor", None)
    assert layout[f"{at}/o_proj/kernel/lora_a"].spec == P(*layers[1], "tensor", None, None)
    assert layout[f"{at}/o_proj/kernel/lora_b"].spec == P(*layers[1], None, "fsdp")


def test_what_cannot_be_is_refused():
    _, params = draw.model()
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        lora.init(jax.random.key(0), params, rank=0)
    with pytest.raises(
        ValueError, match=r"the stacks have no kernels of \['lm_head', 'w_proj'\]; choose of \['down_proj'"
    ):
        lora.init(jax.random.key(0), params, rank=1, modules=["q_proj", "w_proj", "lm_head"])
