import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer import trees


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@st.composite
def layered(draw, depth=1):
    """A tree of layers, beside and below other things: arrays of several shapes and types."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from([(), (3, 1)]), min_size=1))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))

    def layer():
        leaves = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
        return {"norm": leaves, "scale": jnp.asarray(rng.normal(), jnp.float32)}

    tree = {f"layers_{i}": layer() for i in range(draw(st.sampled_from([1, 2, 11])))}
    tree["embed"] = jnp.asarray(rng.normal(size=3), jnp.float32)
    if depth:
        names = st.sampled_from(["decoder", "encoder", "layers_norm", "players_0"])
        tree |= draw(st.dictionaries(names, layered(depth=depth - 1), max_size=2))
    return tree


@given(layered())
@settings(deadline=None, max_examples=30)
def test_unstacking_undoes_stacking_bit_by_bit(tree):
    stacked = trees.stack_layers(tree)
    assert not any("layers_0" in trees.path_name(path).split("/") for path, _ in jax.tree.leaves_with_path(stacked))
    same(trees.unstack_layers(stacked), tree)
    same(trees.stack_layers(trees.unstack_layers(stacked)), stacked)
    assert trees.num_parameters(stacked) == trees.num_parameters(tree)


def test_the_leading_axis_is_the_number_of_the_layer():
    tree = {f"layers_{i}": {"w": jnp.full((2,), i)} for i in reversed(range(12))}
    np.testing.assert_array_equal(trees.stack_layers(tree)["layers"]["w"][:, 0], np.arange(12))


def test_a_tree_without_layers_is_left_as_it_is():
    tree = {"embed": {"embedding": jnp.ones(3)}, "layers_norm": jnp.ones(2), "layers_1x": jnp.ones(1)}
    same(trees.stack_layers(tree), tree)
    same(trees.unstack_layers(tree), tree)


def test_half_stacked_trees_and_gaps_are_refused():
    with pytest.raises(ValueError, match=r"both 'layers' and \[0\] of 'layers_i'"):
        trees.stack_layers({"layers": {"w": jnp.ones((1, 2))}, "layers_0": {"w": jnp.ones(2)}})
    with pytest.raises(ValueError, match=r"layers \[0, 2\] have a gap; stacking needs layers_0 \.\. layers_1"):
        trees.stack_layers({"decoder": {"layers_0": {"w": jnp.ones(2)}, "layers_2": {"w": jnp.ones(2)}}})
    with pytest.raises(ValueError, match=r"layers \[1\] have a gap"):
        trees.stack_layers({"layers_1": {"w": jnp.ones(2)}})


def test_stacked_layers_of_unequal_depth_are_refused():
    with pytest.raises(ValueError, match=r"'layers' have \[1, 3\] layers"):
        trees.unstack_layers({"decoder": {"layers": {"w": jnp.ones((1, 2)), "b": jnp.ones(3)}}})


@pytest.mark.parametrize("make", [jnp.zeros, jax.ShapeDtypeStruct])
def test_sizes_count_every_leaf(make):
    tree = {"a": make((3, 4), jnp.float32), "b": {"c": make((5,), jnp.bfloat16), "d": make((), jnp.int8)}}
    assert trees.num_parameters(tree) == 12 + 5 + 1
    assert trees.num_bytes(tree) == 48 + 10 + 1


def test_a_path_is_written_with_slashes():
    tree = {"decoder": {"layers_0": [{"kernel": 0}]}}
    ((path, _),) = jax.tree.leaves_with_path(tree)
    assert trees.path_name(path) == "decoder/layers_0/0/kernel"
