"""Every parameter has one layout, and a training step on eight devices is the step on one."""

import dataclasses

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32

import jaxformer as jf
from jaxformer import sharding

SIZES = {"N": "num_heads", "F": "d_ff", "V": "vocab_size"}


def parameter_shapes(config):
    texts = [draw.ids(1, 2)] * (2 if config.architecture == "encoder_decoder" else 1)
    params = jax.eval_shape(jf.build(config).init, jax.random.key(0), *texts)["params"]
    return {jf.trees.path_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(params)}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", jf.PRESETS)
def test_every_parameter_of_every_preset_has_letters_of_its_sizes(name, scan):
    config = dataclasses.replace(jf.PRESETS[name], scan_layers=scan, num_layers=2)
    shapes = parameter_shapes(config)
    for path, shape in shapes.items():
        letters = sharding.letters(path)
        sizes = config.sizes | {"L": config.num_blocks}
        assert [sizes[letter] for letter in letters] == list(shape), path
        assert letters.startswith("L") == (scan and "layers" in path)
    assert len(shapes) > 10


def test_every_rule_is_of_some_parameter_and_every_letter_has_an_axis():
    variants = (
        {"positions": "learned", "gated": True, "tie_embeddings": False},
        {"norm": "rmsnorm", "bias": False, "residual": "post", "qk_norm": True},
        {"positions": "relative", "embed_norm": True, "residual": "sandwich", "head_bias": True},
    )
    encoder = {"architecture": "encoder", "num_token_types": 2, "d_embed": 6}
    variants += (
        encoder | {"head": "masked_lm", "head_bias": True},
        encoder | {"head": "classifier", "num_labels": 3, "qk_norm": True},
    )
    found = {path for fields in variants for path in parameter_shapes(draw.tiny(**fields))}
    used = {rule for rule in sharding.RULES for path in found if sharding.re.search(rf"(^|/){rule[0]}$", path)}
    assert used == set(sharding.RULES)
    assert {letter for _, letters in sharding.RULES for letter in letters} <= set(sharding.LETTER_AXES)


@pytest.mark.parametrize("path", ["decoder/layers_0/attn/w_proj/kernel", "my_embed/embedding", "embed/embedding/x", ""])
def test_a_parameter_without_a_rule_is_refused_by_name(path):
    with pytest.raises(KeyError, match=f"0 sharding rules fit parameter '{path}'; give it exactly one"):
        sharding.letters(path)


def test_a_parameter_with_two_rules_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sharding, "RULES", (*sharding.RULES, (r"q_proj/\w+", "D")))
    with pytest.raises(KeyError, match="2 sharding rules fit parameter 'a/q_proj/kernel'"):
        sharding.letters("a/q_proj/kernel")


def test_a_mesh_has_all_axes_and_all_devices():
    mesh = sharding.make_mesh({"fsdp": 4, "tensor": 2})
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"model": 8}, r"mesh axes \['model'\] are unknown; choose from \['data', 'fsdp', 'tensor'\]"),
        ({"data": 4}, r"'data': 4, 'fsdp': 1, 'tensor': 1} has 4 places for 8 devices"),
        ({"data": 8, "tensor": 2}, "has 16 places for 8 devices"),
        ({}, "has 1 places for 8 devices"),
        ({"data": -8, "fsdp": -1}, r"sizes \{'data': -8, 'fsdp': -1\} must be at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(axes)


def test_sizes_that_an_axis_does_not_divide_are_refused_by_name():
    model = jf.build(draw.tiny(vocab_size=32, num_kv_heads=1))
    shapes = jax.eval_shape(model.init, jax.random.key(0), draw.ids(1, 2))["params"]
    with pytest.raises(ValueError, match="attn/k_proj/bias: size K=1 is not a multiple of mesh axis tensor=2"):
        sharding.shardings(shapes, sharding.make_mesh({"data": 4, "tensor": 2}))


def test_a_parameter_of_another_rank_is_refused_by_name():
    with pytest.raises(ValueError, match=r"embed/token/embedding has shape \(4, 4, 4\), but its rule says VE"):
        sharding.shardings({"embed": {"token": {"embedding": jnp.zeros((4, 4, 4))}}}, sharding.make_mesh({"data": 8}))


# The whole step -------------------------------------------------------------------------------------------------------

MESHES = {"data": {"data": 8}, "fsdp": {"fsdp": 8}, "all": {"data": 2, "fsdp": 2, "tensor": 2}}
CONFIG = draw.tiny(vocab_size=32, num_layers=1, gated=True, tie_embeddings=False, positions="learned", dropout=0.1)


def training(scan):
    model = jf.build(dataclasses.replace(CONFIG, scan_layers=scan))
    # A key bias moves all scores of a query alike, so that its gradient is rounding noise; at the usual eps Adam would
    # blow it up to whole steps.
    optimizer = jf.optim.adamw(1e-2, eps=1e-3)
    params = draw.params(model)
    state = jf.TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    rng = np.random.default_rng(0)
    ids = rng.integers(32, size=(8, 7)).astype(np.int32)
    segments = np.where(np.arange(7) < rng.integers(3, 7, size=(8, 1)), 1, 2).astype(np.int32)
    positions = np.asarray(jf.masks.positions_from_segments(jnp.asarray(segments)))
    batch = jf.data.Batch(ids[:, :-1], ids[:, 1:], np.ones((8, 6), np.float32), positions[:, :-1], segments[:, :-1])
    return jf.make_train_step(model, optimizer), state, batch


def steps(step, state, batch):
    for _ in range(2):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_on_eight_devices_is_the_step_on_one(mesh, scan):
    step, state, batch = training(scan)
    mesh = sharding.make_mesh(MESHES[mesh])
    layout = sharding.shardings(state, mesh)
    sharded = jax.device_put(jax.tree.map(np.array, state), layout)  # a copy: the step donates its state
    rows = jax.device_put(batch, NamedSharding(mesh, sharding.spec("BT")))
    expected, one_metrics = steps(step, state, batch)
    with jax.set_mesh(mesh):
        result, metrics = steps(step, sharded, rows)
    for (path, leaf), want in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(layout), strict=True):
        assert leaf.sharding.is_equivalent_to(want, leaf.ndim), path  # as they came, so they stay
    jax.tree.map(lambda a, b: draw.close(a, b, FLOAT32), (result.params, metrics), (expected.params, one_metrics))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(result)) == (mesh.shape["data"] == 8)
    assert result.step == 2


@pytest.mark.parametrize("mesh", MESHES)
def test_a_state_is_made_in_its_shards(mesh):
    model = jf.build(CONFIG)
    mesh = sharding.make_mesh(MESHES[mesh])
    for name, make in jf.optim.OPTIMIZERS.items():
        optimizer = make(1e-2)
        state = jf.init_state(model, optimizer, seed=3, mesh=mesh)
        layout = sharding.shardings(state, mesh)
        for leaf, want in zip(jax.tree.leaves(state), jax.tree.leaves(layout), strict=True):
            assert leaf.sharding.is_equivalent_to(want, leaf.ndim), name
        one = jf.init_state(model, optimizer, seed=3)
        jax.tree.map(np.testing.assert_array_equal, state, one)


def collectives(program):
    return {kind for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
            if f" {kind}(" in program}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_parts_of_a_batch_stay_on_their_devices(mesh):
    """Rows are taken in turn: splitting the batch needs no communication of its own."""
    at_once, state, batch = training(scan=False)
    rows = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), batch)
    model, optimizer = jf.build(CONFIG), jf.optim.adamw(1e-2, eps=1e-3)
    in_parts = jf.make_train_step(model, optimizer, accumulate=2)
    mesh = sharding.make_mesh(MESHES[mesh])
    sharded = jax.device_put(jax.tree.map(np.array, state), sharding.shardings(state, mesh))
    placed = jax.device_put(rows, NamedSharding(mesh, sharding.spec("BT")))
    with jax.set_mesh(mesh):
        found, expected = (step.lower(sharded, placed).compile().as_text() for step in (in_parts, at_once))
    assert collectives(found) <= collectives(expected)


def test_optimizer_moments_lie_as_their_parameters_and_scalars_everywhere():
    _, state, _ = training(scan=True)
    layout = sharding.shardings(state, sharding.make_mesh(MESHES["all"]))
    kernel = layout.params["decoder"]["layers"]["attn"]["q_proj"]["kernel"]
    assert kernel.spec == P(None, "fsdp", "tensor", None)
    assert layout.params["embed"]["token"]["embedding"].spec == P("tensor", "fsdp")
    moments = [leaf for path, leaf in jax.tree.leaves_with_path(layout.opt_state) if "q_proj" in str(path)]
    assert [leaf.spec for leaf in moments].count(kernel.spec) == 2
    assert layout.step.spec == P()


def test_constraints_are_in_the_program_under_a_mesh_and_only_there():
    model, params = draw.model()

    def constraints():
        text = jax.jit(lambda p, ids: model.apply({"params": p}, ids)).lower(params, draw.ids(8, 4)).as_text()
        return text.count("sharding_constraint")

    assert constraints() == 0
    with jax.set_mesh(sharding.make_mesh(MESHES["all"])):
        assert constraints() == 1 + 2  # the embeddings and each layer's output
    foreign = Mesh(np.asarray(jax.devices()), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(foreign):
        assert constraints() == 0


def test_letters_make_a_partition():
    assert sharding.spec("DNH") == P("fsdp", "tensor", None)
    assert sharding.spec("BTD") == P(("data", "fsdp"), None, None)  # the batch has fsdp already
    with pytest.raises(KeyError, match="X"):
        sharding.spec("BX")


def test_a_batch_that_the_mesh_does_not_divide_is_left_whole():
    model, params = draw.model()
    expected = model.apply({"params": params}, draw.ids(1, 3))
    with jax.set_mesh(sharding.make_mesh({"data": 8})):
        draw.close(model.apply({"params": params}, draw.ids(1, 3)), expected, FLOAT32)
