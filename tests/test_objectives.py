"""What training minimises: the same numbers however they are computed."""

from functools import partial

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draw import close
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.data import Batch
from jaxformer.losses import in_blocks, weighted_mean
from jaxformer.objectives import next_token

B, T = 3, 7


def batch(seed=0):
    rng = np.random.default_rng(seed)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]], np.int32)
    ids, labels = (rng.integers(29, size=(B, T)).astype(np.int32) for _ in range(2))
    weights = np.where(segments > 0, rng.integers(1, 4, size=(B, T)) / 2, 0).astype(np.float32)
    return Batch(ids, labels, weights, oracle.positions_from_segments(segments).astype(np.int32), segments)


@partial(jax.jit, static_argnames=("model", "options"))
def value_and_grad(model, params, rows, options):
    def loss(params):
        return weighted_mean(*next_token(model, params, rows, **dict(options)))

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": False, "head_bias": True, "logit_softcap": 2.0}])
@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_logits_in_blocks_give_the_same_loss_and_gradients(block, fields):
    model, params = draw.model(**fields)
    options = (("label_smoothing", 0.1), ("z_loss", 1e-3))
    expected = value_and_grad(model, params, batch(), options)
    found = value_and_grad(model, params, batch(), (("block", block), *options))
    jax.tree.map(lambda a, b: close(a, b, FLOAT32), found, expected)


def test_smoothing_and_z_loss_reach_the_loss():
    model, params = draw.model()
    rows = batch()
    logits = oracle.decoder(params, model.config.to_dict(), rows.ids, rows.positions, rows.segments)
    options = {"label_smoothing": 0.2, "z_loss": 0.01}
    expected = oracle.cross_entropy(logits, rows.labels, rows.weights, **options)
    close(value_and_grad(model, params, rows, tuple(options.items()))[0], expected, FLOAT32)


def test_a_function_in_blocks_is_the_function(rng):
    x, y = jnp.asarray(rng.normal(size=(2, 5, 3)), jnp.float32), jnp.arange(10.0).reshape(2, 5)
    for block in (1, 2, 5, 9):
        found = in_blocks(lambda x, y: (x.sum(axis=-1) * y)[..., None] * jnp.ones(4), block, x, y)
        close(found, (x.sum(axis=-1) * y)[..., None] * np.ones(4), FLOAT32)
    with pytest.raises(ValueError, match="block=0 must be at least 1 column"):
        in_blocks(lambda x: x, 0, x)


def loss_memory(block, V, T):
    """Bytes that the compiled loss and its gradients take besides arguments and results."""
    model = jf.build(jf.Config(vocab_size=V, max_len=T, d_model=64, num_layers=1, num_heads=1, tie_embeddings=False))
    row = jax.ShapeDtypeStruct((1, T), jnp.int32)
    rows = Batch(row, row, jax.ShapeDtypeStruct((1, T), jnp.float32), row, row)
    params = jax.eval_shape(model.init, jax.random.key(0), row)["params"]
    program = value_and_grad.lower(model, params, rows, (("block", block),)).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_in_blocks_no_array_of_all_logits_exists():
    V, T = 8192, 1024
    whole, blocks = (loss_memory(block, V, T) for block in (None, 64))
    assert whole > 4 * V * T
    assert blocks < whole / 5
