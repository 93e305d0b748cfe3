"""Layers that share their parameters (Lan et al. 2020, "ALBERT", section 3.1): one copy of each, used several times."""

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.tree_util import Partial
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer.trees import stack_layers

IDS = draw.ids(2, 6)
FIELDS = {"num_layers": 4, "window": (3, None), "rotary": (jf.Rotary(base=100.0), jf.Rotary(base=10.0))}


def repeated(params, times):
    """The parameters of the model that has a copy for each layer."""
    blocks = params["decoder"]
    layers = {f"layers_{i}": blocks[f"layers_{i // times}"] for i in range(4)}
    return params | {"decoder": {**layers, "final_norm": blocks["final_norm"]}}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("distinct", [1, 2, 4])
def test_each_block_serves_as_so_many_layers_in_a_row(distinct, scan):
    model, params = draw.model(num_distinct_layers=distinct, **FIELDS)
    assert [name for name in params["decoder"] if "layers" in name] == [f"layers_{i}" for i in range(distinct)]
    copies = repeated(params, 4 // distinct)
    expected = oracle.decoder(copies, draw.tiny(**FIELDS).to_dict(), IDS)
    draw.close(oracle.decoder(params, model.config.to_dict(), IDS), expected, 0)
    if scan:
        model, params = (
            jf.build(draw.tiny(num_distinct_layers=distinct, scan_layers=True, **FIELDS)),
            stack_layers(params),
        )
    draw.close(draw.logits(model, params, IDS), expected, FLOAT32)


@pytest.mark.parametrize("scan", [False, True])
def test_a_cache_holds_every_layer(scan):
    model, params = draw.model(num_distinct_layers=2, scan_layers=scan, **FIELDS)
    cache = jf.init_cache(model.config, 2, 8)
    assert jf.cache_bytes(model.config, 2, 8) == jf.cache_bytes(draw.tiny(**FIELDS), 2, 8)
    found = []
    for part in (IDS[:, :3], IDS[:, 3:5], IDS[:, 5:]):
        logits, cache = draw.logits(model, params, part, cache=cache)
        found.append(logits)
    draw.close(np.concatenate(found, axis=1), draw.logits(model, params, IDS), FLOAT32)


def test_gradients_are_the_sums_over_the_layers_that_share():
    model, params = draw.model(num_distinct_layers=2, **FIELDS)

    def loss(params, model):
        return jf.losses.cross_entropy(model.apply({"params": params}, IDS), IDS).mean()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    shared, copies = gradient(params, model), gradient(repeated(params, 2), jf.build(draw.tiny(**FIELDS)))
    for i in range(2):
        of_two = [copies["decoder"][f"layers_{2 * i + k}"] for k in range(2)]
        jax.tree.map(lambda a, x, y: draw.close(a, x + y, FLOAT32), shared["decoder"][f"layers_{i}"], *of_two)


def test_each_layer_can_be_read_and_edited_by_itself():
    model, params = draw.model(num_distinct_layers=2, **FIELDS)
    _, read = draw.apply(model, {"params": params}, IDS, mutable=("intermediates",))
    _, streams = oracle.decoder(repeated(params, 2), draw.tiny(**FIELDS).to_dict(), IDS, with_streams=True)
    taps = read["intermediates"]["decoder"]
    draw.close(np.concatenate([taps["layers_0"]["x"], taps["layers_1"]["x"]]), streams[1:], FLOAT32)
    # Zero the stream after the last layer but one: what is left is that of one layer on nothing.
    factors = jnp.array([0.0, 1.0])
    edits = {"decoder": {"layers_1": {"x": Partial(jnp.multiply, factors)}}}
    found = draw.logits(model, params, IDS)
    edited = draw.apply(model, {"params": params, "edits": edits}, IDS)
    copies = {"decoder": {"layers_2": {"x": Partial(jnp.multiply, jnp.float32(0.0))}}}
    expected = draw.apply(jf.build(draw.tiny(**FIELDS)), {"params": repeated(params, 2), "edits": copies}, IDS)
    draw.close(edited, expected, FLOAT32)
    assert abs(edited - found).max() > 0.1


def test_shared_layers_have_dropout_of_their_own():
    model, params = draw.model(num_distinct_layers=1, num_layers=2, dropout=0.5)
    _, read = draw.apply(
        model, {"params": params}, IDS, rngs={"dropout": jax.random.key(0)}, mutable=("intermediates",)
    )
    x = read["intermediates"]["x"]
    streams = jnp.concatenate([x[None], read["intermediates"]["decoder"]["layers_0"]["x"]])
    untouched = np.diff(streams, axis=0) == 0
    assert 0.05 < untouched[0].mean() < 0.6
    assert (untouched[0] != untouched[1]).any()


@pytest.mark.parametrize(("fields", "message"), [
    ({"num_layers": 4, "num_distinct_layers": 3}, "num_layers=4 is not a multiple of num_distinct_layers=3"),
    ({"num_layers": 2, "num_distinct_layers": 4}, "num_layers=2 is not a multiple of num_distinct_layers=4"),
    ({"num_distinct_layers": 0}, "num_distinct_layers"),
    (
        {"architecture": "encoder_decoder", "num_layers": 4, "num_decoder_layers": 3, "num_distinct_layers": 2},
        "num_decoder_layers=3 is not a multiple",
    ),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        draw.tiny(**fields)
