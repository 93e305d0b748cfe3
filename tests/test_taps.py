"""Reading and replacing activations by name, in a small module of their own and in a whole model."""

import re

import draw
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.tree_util import Partial
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer import blocks, layers, models, multi_head
from jaxformer.taps import COLLECTIONS, tap, tapped

SAME = 1e-6  # two programs of the same arithmetic


class Layer(nn.Module):
    """y = 3 x, tapped, plus 1."""

    @nn.compact
    def __call__(self, x, _=None):
        return tap(self, "y", 3 * x) + 1, None


class Model(nn.Module):
    """Three layers in a loop or a scan."""

    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            scanned = nn.scan(Layer, variable_axes=dict(COLLECTIONS), length=3)
            return scanned(name="layers")(x, None)[0]
        for i in range(3):
            x, _ = Layer(name=f"layers_{i}")(x)
        return x


LOOP, SCAN = Model(scan=False), Model(scan=True)
X = jnp.asarray([1.0, 2.0])
TREES = {
    LOOP: {"layers_1": {"y": Partial(jnp.add, 10.0)}},
    SCAN: {"layers": {"y": Partial(jnp.add, jnp.asarray([0.0, 10.0, 0.0]))}},
}
EDITED = [np.asarray([3.0, 6.0]), np.asarray([22.0, 31.0]), np.asarray([69.0, 96.0])]
PLAIN = [np.asarray([3.0, 6.0]), np.asarray([12.0, 21.0]), np.asarray([39.0, 66.0])]


def read(model, variables, x):
    """The output, and the three taps whatever the arrangement."""
    out, variables = model.apply(variables, x, mutable=["intermediates"])
    stored = variables["intermediates"]
    return out, [stored["layers"]["y"][i] if model.scan else stored[f"layers_{i}"]["y"] for i in range(3)]


@pytest.mark.parametrize("model", [LOOP, SCAN], ids=["loop", "scan"])
class TestEveryTransformation:
    def test_reading_and_editing_compose(self, model):
        for variables, expected in (({}, PLAIN), ({"edits": TREES[model]}, EDITED)):
            for f in (read, jax.jit(read, static_argnums=0)):
                out, taps = f(model, variables, X)
                draw.close(taps, expected, SAME)  # what is stored is the value after its edit
                draw.close(out, expected[2] + 1, SAME)

    def test_under_vmap(self, model):
        rows = jnp.stack([X, 2 * X, X + 1])
        out, taps = jax.vmap(lambda x: read(model, {"edits": TREES[model]}, x))(rows)
        for i, row in enumerate(rows):
            one, taps_of_one = read(model, {"edits": TREES[model]}, row)
            draw.close(out[i], one, SAME)
            draw.close([t[i] for t in taps], taps_of_one, SAME)

    def test_under_grad(self, model):
        """Through an edit to its own array: what is added in layer 1 is tripled in layer 2."""

        def total(edits, x):
            return model.apply({"edits": edits}, x).sum()

        by_edit, by_x = jax.grad(total, argnums=(0, 1))(TREES[model], X)
        (gradient,) = jax.tree.leaves(by_edit)
        draw.close(np.ravel(gradient), [18.0, 6.0, 2.0] if model.scan else [6.0], SAME)
        draw.close(by_x, [27.0, 27.0], SAME)
        cut = {"y": Partial(jnp.zeros_like)}
        blocked = {"layers": cut} if model.scan else {"layers_0": cut}
        draw.close(jax.grad(total, argnums=1)(blocked, X), [0.0, 0.0], 0)


@pytest.mark.parametrize(
    ("edit", "returned"),
    [(Partial(lambda y: y[:1]), "float32[1]"), (Partial(lambda y: y.astype(jnp.bfloat16)), "bfloat16[2]")],
)
def test_an_edit_that_changes_shape_or_type_is_refused_by_name(edit, returned):
    message = f"the edit of layers_2/y returned {returned}; it must keep float32[2]"
    with pytest.raises(ValueError, match=re.escape(message)):
        LOOP.apply({"edits": {"layers_2": {"y": edit}}}, X)


def test_a_tap_knows_whether_anyone_looks():
    class Asks(nn.Module):
        @nn.compact
        def __call__(self):
            return tapped(self, "y")

    assert not Asks().apply({})
    assert not Asks().apply({"edits": {"z": Partial(jnp.negative)}})
    assert Asks().apply({"edits": {"y": Partial(jnp.negative)}})
    assert Asks().apply({}, mutable=["intermediates"])[0]


# A whole model --------------------------------------------------------------------------------------------------------

IDS = draw.ids(2, 5)
NAMES = {"x", "attn/q", "attn/k", "attn/v", "attn/pattern", "attn/z", "mlp/pre", "mlp/hidden"}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_unread_taps_cost_nothing(scan, gated, monkeypatch):
    model, params = draw.model(scan_layers=scan, gated=gated)

    def text(**options):
        return jax.jit(lambda p, ids: model.apply({"params": p}, ids, **options)).lower(params, IDS).as_text()

    with_taps = text()
    assert text(mutable=["intermediates"]) != with_taps
    for module in (blocks, layers, models, multi_head):
        monkeypatch.setattr(module, "tap", lambda module, name, value: value)
    monkeypatch.setattr(multi_head, "tapped", lambda module, name: False)
    assert text() == with_taps


def names_of(intermediates, layer):
    return {jf.trees.path_name(path) for path, _ in jax.tree.leaves_with_path(intermediates["decoder"][layer])}


@pytest.mark.parametrize("residual", ["pre", "post"])
def test_the_taps_of_a_model_are_the_oracles_activations(residual):
    model, params = draw.model(residual=residual)
    logits, read = draw.apply(model, {"params": params}, IDS, mutable=("intermediates",))
    expected, streams = oracle.decoder(params, model.config.to_dict(), IDS, with_streams=True)
    stored = read["intermediates"]
    draw.close(logits, expected, FLOAT32)
    draw.close([stored["x"], *(stored["decoder"][f"layers_{i}"]["x"] for i in range(2))], streams, FLOAT32)
    for i in range(2):
        assert names_of(stored, f"layers_{i}") == NAMES
        pattern = stored["decoder"][f"layers_{i}"]["attn"]["pattern"]
        draw.close(pattern.sum(axis=-1), np.ones((2, 4, 5)), FLOAT32)
        np.testing.assert_array_equal(pattern[:, :, np.triu(np.ones((5, 5), bool), 1)], 0)


def test_a_scan_has_the_taps_of_the_loop():
    model, params = draw.model()
    scanned = jf.build(draw.tiny(scan_layers=True))
    _, loop = draw.apply(model, {"params": params}, IDS, mutable=("intermediates",))
    stacked = {"params": jf.trees.stack_layers(params)}
    _, scan = draw.apply(scanned, stacked, IDS, mutable=("intermediates",))
    assert names_of(scan["intermediates"], "layers") == NAMES
    expected = jf.trees.stack_layers(loop["intermediates"])
    jax.tree.map(lambda a, b: draw.close(a, b, SAME), scan["intermediates"], expected)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_edit_acts_and_acts_alike_in_a_loop_and_a_scan(name):
    """One layer's activation scaled, the others left alone: another result, the same one for both arrangements."""
    model, params = draw.model(gated=True)
    scanned = jf.build(draw.tiny(gated=True, scan_layers=True))
    *owner, last = name.split("/")

    def nested(leaf):
        return {owner[0]: {last: leaf}} if owner else {last: leaf}

    loop = {"decoder": {"layers_0": nested(Partial(jnp.multiply, jnp.asarray(0.5)))}}
    scan = {"decoder": {"layers": nested(Partial(jnp.multiply, jnp.asarray([0.5, 1.0])))}}
    edited = draw.apply(model, {"params": params, "edits": loop}, IDS)
    same = draw.apply(scanned, {"params": jf.trees.stack_layers(params), "edits": scan}, IDS)
    draw.close(same, edited, SAME)
    assert abs(edited - draw.logits(model, params, IDS)).max() > 100 * FLOAT32


def test_the_pattern_of_cached_attention_cannot_be_edited():
    model, params = draw.model()
    edits = {"decoder": {"layers_0": {"attn": {"pattern": Partial(jnp.zeros_like)}}}}
    cache = jf.init_cache(model.config, 2, 8)
    with pytest.raises(ValueError, match="no pattern to edit or to drop; run the whole text without a cache"):
        jax.eval_shape(model.apply, {"params": params, "edits": edits}, IDS, cache=cache)
