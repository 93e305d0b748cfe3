"""Checkpoints that are unfinished, damaged, or of another model: what is whole is found, and errors say what to do."""

import dataclasses
import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint import META, restored, same, saved, shapes, state

import jaxformer as jf
from jaxformer.checkpoint import Checkpointer


def test_a_checkpoint_that_was_not_finished_does_not_count_and_is_cleared_by_the_next_save(tmp_path):
    states = [state(step, seed=step) for step in (1, 2, 3)]
    saved(tmp_path, *states[:2])
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step == 1
        same(checkpointer.restore(shapes(states[0])), states[0])
        checkpointer.save(states[2], META)
    assert sorted(child.name for child in tmp_path.iterdir()) == ["1", "3"]
    same(restored(tmp_path, shapes(states[2])), states[2])


SAVER = """
import sys
import jax.numpy as jnp
import jaxformer as jf
from jaxformer.checkpoint import Checkpointer

with Checkpointer(sys.argv[1]) as checkpointer:
    for step in range(1, 10_000):
        params = {"up_proj": {"kernel": jnp.full((1000, 1000), step, jnp.float32)}}
        checkpointer.save(jf.TrainState(jnp.asarray(step), params, ()), {"step": step})
        print(step, flush=True)
"""


def test_a_run_killed_in_the_middle_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SAVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout:
            if int(line) == 4:  # which is under way, so that 3 is complete
                time.sleep(0.01)
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    kernel = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
    target = jf.TrainState(jax.ShapeDtypeStruct((), jnp.int32), {"up_proj": {"kernel": kernel}}, ())
    with Checkpointer(tmp_path) as checkpointer:
        step = checkpointer.latest_step
        assert step >= 3
        whole = checkpointer.restore(target)
        assert whole.step == step
        assert (whole.params["up_proj"]["kernel"] == step).all()
        assert checkpointer.read_meta() == {"step": step}
        later = dataclasses.replace(whole, step=whole.step + 1)
        checkpointer.save(later, {})
    same(restored(tmp_path, target), later)


@pytest.fixture
def quiet_threads(monkeypatch):
    """When one read of many fails, orbax leaves the others behind, and their threads complain to this hook."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    yield
    gc.collect()


def damaged(original, copy, path, how):
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    if how == "missing":
        (copy / path).unlink()
    else:
        content = (copy / path).read_bytes()
        (copy / path).write_bytes(content[: len(content) // 2] if how == "cut short" else b"")


def complaint(folder, expected):
    """What reading everything from the folder complains about; None if all is as expected."""
    with Checkpointer(folder) as checkpointer:
        try:
            same(checkpointer.restore(shapes(expected)), expected)
            assert checkpointer.read_meta() == META
        except ValueError as error:
            return str(error)
    return None


@pytest.mark.parametrize("how", ["cut short", "empty", "missing"])
@pytest.mark.usefixtures("quiet_threads")
def test_whatever_file_is_damaged_the_state_comes_back_whole_or_an_error_names_the_folder_and_the_remedy(how, tmp_path):
    rng = np.random.default_rng(0)
    kernels = {
        name: {"kernel": jnp.asarray(rng.normal(size=(30, 40)), jnp.float32)} for name in ("up_proj", "down_proj")
    }
    before = jf.TrainState(jnp.asarray(1), kernels, jf.optim.adamw(1e-3).init(kernels))
    original, copy = saved(tmp_path / "original", before), tmp_path / "copy"
    refused = set()
    for path in sorted(p.relative_to(original) for p in original.rglob("*") if p.is_file()):
        damaged(original, copy, path, how)
        message = complaint(copy, before)
        if message is not None:
            assert message.startswith(f"{copy / '1'} is damaged (")
            assert message.endswith("; delete that folder to go on from the checkpoint before it")
            assert "\n" not in message
            refused.add("/".join(path.parts[1:3]))
    assert {"meta/metadata", "params/_METADATA", "training/_METADATA"} <= refused
    assert {"params/manifest.ocdbt", "training/manifest.ocdbt"} <= refused
    if how != "missing":
        assert any(name.startswith("params/ocdbt.process_0") for name in refused)


def test_after_the_damaged_folder_is_deleted_the_checkpoint_before_it_is_the_newest(tmp_path):
    first, second = state(1), state(2, seed=2)
    saved(tmp_path, first, second)
    (tmp_path / "2" / "params" / "_METADATA").write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged"):
        restored(tmp_path, shapes(second))
    shutil.rmtree(tmp_path / "2")
    same(restored(tmp_path, shapes(first)), first)


def test_meta_that_is_no_object_is_damage(tmp_path):
    saved(tmp_path, state(1))
    (tmp_path / "1" / "meta" / "metadata").write_text(json.dumps([1, 2]))
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(ValueError, match="1 is damaged: its meta is no JSON object"),
    ):
        checkpointer.read_meta()


def changed(tree, name, change):
    """The tree with one leaf changed, or left out where the change is None."""
    tree = jax.tree.map(lambda leaf: leaf, tree)
    *parents, last = name.split("/")
    owner = functools.reduce(lambda node, parent: node[parent], parents, tree)
    if change is None:
        del owner[last]
    else:
        owner[last] = change(owner.get(last))
    return tree


KERNEL = "decoder/layers_1/attn/q_proj/kernel"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (KERNEL, None, rf"params/{KERNEL} is \[16, 4, 4\] in .*/4, but not wanted by this model"),
        (KERNEL, lambda leaf: leaf[:8], rf"params/{KERNEL} is \[16, 4, 4\] in .*/4, but \[8, 4, 4\] by this model"),
        ("decoder/other", lambda _: jnp.zeros(3), r"params/decoder/other is missing in .*/4, but \[3\] by this model"),
    ],
)
def test_a_leaf_that_is_missing_left_over_or_of_another_shape_is_named(name, change, message, tmp_path):
    before = state(4)
    saved(tmp_path, before)
    params = changed(before.params, name, change)
    with Checkpointer(tmp_path) as checkpointer:
        for read in (
            lambda: checkpointer.restore(dataclasses.replace(before, params=params)),
            lambda: checkpointer.restore_params(params),
        ):
            with pytest.raises(ValueError, match=message + "; restore with the config that was saved"):
                read()


def test_another_optimizer_is_an_error_that_names_a_leaf_of_its_state(tmp_path):
    before = state(4)
    saved(tmp_path, before)
    other = dataclasses.replace(before, opt_state=(before.opt_state, jnp.zeros(2)))
    with pytest.raises(ValueError, match=r"training/opt_state/\S+ is .* by this model; restore with the config"):
        restored(tmp_path, other)
