"""Training state on disk: what was saved comes back bit for bit, or an error says what is wrong."""

import contextlib
from pathlib import Path

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.checkpoint import Checkpointer
from jaxformer.trees import path_name

META = {"config": {"d_model": 16}, "text": "ä\n", "numbers": [1, 2.5, None, True]}


def state(step=0, seed=0, **fields):
    _, params = draw.model(seed, vocab_size=32, **fields)
    opt_state = jf.optim.adamw(1e-3).init(params)
    # No moment is neutral, so that none can pass for another or for a fresh one.
    numbers = iter(range(1, 1000))
    opt_state = jax.tree.map(lambda leaf: leaf + jnp.asarray(next(numbers), leaf.dtype) / 64, opt_state)
    opt_state = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), opt_state, jf.optim.adamw(1e-3).init(params))
    return jf.TrainState(jnp.asarray(step, jnp.int32), params, opt_state)


def same(actual, expected):
    """Bit for bit, with the same types and the same classes of containers."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def saved(folder, *states, keep=2, meta=META):
    with Checkpointer(folder, keep=keep) as checkpointer:
        for one in states:
            checkpointer.save(one, meta)
    return folder


def restored(folder, target):
    with Checkpointer(folder) as checkpointer:
        return checkpointer.restore(target)


def shapes(tree):
    return jax.eval_shape(lambda: tree)


@pytest.mark.parametrize("fields", [{}, {"scan_layers": True}, {"param_dtype": "bfloat16"}])
def test_what_was_saved_comes_back_bit_for_bit(fields, tmp_path):
    before = state(step=3, **fields)
    saved(tmp_path, before)
    same(restored(tmp_path, shapes(before)), before)
    same(restored(tmp_path, before), before)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step == 3
        assert checkpointer.read_meta() == META
        same(checkpointer.restore_params(shapes(before.params)), before.params)


def test_the_newest_counts_and_as_many_stay_as_were_asked_for(tmp_path):
    states = [state(step, seed=step) for step in (1, 5, 10, 11)]
    for keep in (1, 3):
        folder = saved(tmp_path / str(keep), *states, keep=keep)
        assert sorted(int(child.name) for child in folder.iterdir()) == [1, 5, 10, 11][-keep:]
        same(restored(folder, shapes(states[-1])), states[-1])


def test_a_save_can_be_read_at_once_by_the_one_that_saved(tmp_path):
    before = state(step=2)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step is None
        checkpointer.save(before, META)
        assert checkpointer.latest_step == 2
        same(checkpointer.restore(shapes(before)), before)
        assert checkpointer.read_meta() == META


@pytest.mark.parametrize("step", [7, 6, 0])
def test_a_step_that_is_not_later_is_refused_and_what_is_there_stays(step, tmp_path):
    first = state(7)
    saved(tmp_path, first)
    for checkpointer in (Checkpointer(tmp_path), Checkpointer(tmp_path)):
        with (
            checkpointer,
            pytest.raises(ValueError, match=rf"holds step 7 already, so step {step} was not saved; resume"),
        ):
            checkpointer.save(state(step, seed=1), META)
    same(restored(tmp_path, shapes(first)), first)


def test_a_state_may_be_donated_right_after_its_save(tmp_path):
    before = state(step=1)
    copy = jax.tree.map(np.array, before)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(before, META)
        after = before
        for _ in range(5):
            after = overwrite(after)
    same(restored(tmp_path, shapes(copy)), copy)


@pytest.mark.parametrize("there", [True, False])
def test_reading_from_an_empty_or_missing_folder_says_so_and_leaves_it_as_it_is(there, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    if there:
        folder.mkdir(parents=True)
    target = shapes(state())
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.latest_step is None
        for read in (checkpointer.read_meta, lambda: checkpointer.restore(target)):
            with pytest.raises(
                FileNotFoundError, match=f"{folder} holds no complete checkpoint; a run writes its first"
            ):
                read()
        with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
            checkpointer.restore_params(target.params)
    assert list(tmp_path.rglob("*")) == ([folder.parent, folder] if there else [])


def test_reading_changes_nothing_on_disk(tmp_path):
    saved(tmp_path, state(1))
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()  # perhaps a save under way in another process
    before = sorted(tmp_path.rglob("*"))
    restored(tmp_path, shapes(state()))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.read_meta()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_state_comes_back_on_any_other_mesh_bit_for_bit(tmp_path):
    """Saved on fsdp=8; restored on three axes, on one device, and on the mesh that it came from."""
    mesh = jf.sharding.make_mesh({"fsdp": 8})
    plain = state(5)
    before = jax.device_put(plain, jf.sharding.shardings(plain, mesh))
    assert not before.params["embed"]["token"]["embedding"].is_fully_replicated
    saved(tmp_path, before)
    for axes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}, {"tensor": 2, "data": 4}):
        asked = jf.sharding.shardings(plain, jf.sharding.make_mesh(axes))
        target = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), plain, asked)
        after = restored(tmp_path, target)
        same(after, plain)
        for (path, leaf), at in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(asked), strict=True):
            assert leaf.sharding == at, path_name(path)
    after = restored(tmp_path, shapes(plain))
    same(after, plain)
    assert {device for leaf in jax.tree.leaves(after) for device in leaf.devices()} == {jax.devices()[0]}


def test_types_are_those_that_were_asked_for(tmp_path):
    before = state(1)
    saved(tmp_path, before)
    asked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), before.params)
    with Checkpointer(tmp_path) as checkpointer:
        same(checkpointer.restore_params(asked), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), before.params))


def test_leaving_by_an_error_still_finishes_the_save(tmp_path):
    before = state(1)
    with contextlib.suppress(KeyboardInterrupt), Checkpointer(Path(tmp_path)) as checkpointer:
        checkpointer.save(before, META)
        raise KeyboardInterrupt
    same(restored(tmp_path, shapes(before)), before)
