"""Training state on disk: what it takes to go on, or to use the model, in one folder for each saved step.

    FOLDER/<step>/params, training (step, optimizer state), meta (JSON: config, tokenizer, data position, settings)

Orbax writes in the background and renames a folder when it is complete, so that a run killed in the middle of a save
leaves the checkpoints before it whole. Restoring asks for shapes, types and shardings of its own: a state saved on one
mesh comes back on another.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jaxformer.train import TrainState
from jaxformer.trees import path_name

_DAMAGE = (ValueError, KeyError, OSError)
"""What orbax raises for files that are missing, cut short or not of its format."""


class Checkpointer:
    """Saves to and restores from one folder; a context manager, because saves finish in the background.

    Args:
      folder: made when something is first saved.
      keep: how many of the newest checkpoints stay.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2):
        self.folder = Path(folder).absolute()
        self._keep = keep

    @property
    def _manager(self) -> ocp.CheckpointManager:
        return self._writer if "_writer" in vars(self) else self._reader

    # Only who saves clears away unfinished folders: to a reader they may be a save under way in another process.
    @cached_property
    def _reader(self) -> ocp.CheckpointManager:
        return self._open(create=False)

    @cached_property
    def _writer(self) -> ocp.CheckpointManager:
        return self._open(max_to_keep=self._keep, cleanup_tmp_directories=True)

    def _open(self, **options: Any) -> ocp.CheckpointManager:
        # Named handlers, so that a manager that has saved nothing can read shapes.
        handlers = {
            "params": ocp.StandardCheckpointHandler(),
            "training": ocp.StandardCheckpointHandler(),
            "meta": ocp.JsonCheckpointHandler(),
        }
        return ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(**options), item_handlers=handlers
        )

    @property
    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, after waiting for a save under way; None where there is none."""
        if not self.folder.exists():
            return None
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def save(self, state: TrainState, meta: Mapping[str, Any]) -> None:
        """Starts to save a state and JSON values; the state may be donated right after.

        Raises:
          ValueError: a step that is not later than the newest one saved.
        """
        step = int(state.step)
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            training=ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state}),
            meta=ocp.args.JsonSave(dict(meta)),
        )
        if not self._writer.save(step, args=args):
            raise ValueError(
                f"{self.folder} holds step {self.latest_step} already, so step {step} was not saved; "
                "resume from it or use another folder"
            )

    def read_meta(self, *names: str) -> dict[str, Any]:
        """Returns the JSON values of the newest checkpoint, which must hold these names.

        Raises:
          FileNotFoundError: no complete checkpoint.
          ValueError: a damaged one, or one that lacks a name.
        """
        meta = self._restore(meta=ocp.args.JsonRestore()).meta
        if not isinstance(meta, dict):
            raise ValueError(f"{self.folder / str(self.latest_step)} is damaged: its meta is no JSON object")
        missing = sorted(set(names) - meta.keys())
        if missing:
            raise ValueError(
                f"{self.folder / str(self.latest_step)} lacks {missing} in its meta; it is damaged, or another "
                "program wrote it: use the folder of a run of experiments/train_lm.py"
            )
        return meta

    def restore(self, target: TrainState) -> TrainState:
        """Returns the newest state in the shapes, types and shardings of `target` (arrays or their shapes).

        Raises:
          FileNotFoundError: no complete checkpoint.
          ValueError: a damaged one, or leaves that are missing, left over or of another shape, by name.
        """
        training = {"step": target.step, "opt_state": target.opt_state}
        self._check_tree("params", target.params)
        self._check_tree("training", training)
        found = self._restore(
            params=ocp.args.StandardRestore(_abstract(target.params)),
            training=ocp.args.StandardRestore(_abstract(training)),
        )
        return TrainState(found.training["step"], found.params, found.training["opt_state"])

    def restore_params(self, target: Any) -> Any:
        """Returns the newest parameters alone; see `restore`."""
        self._check_tree("params", target)
        return self._restore(params=ocp.args.StandardRestore(_abstract(target))).params

    def _newest(self) -> int:
        step = self.latest_step
        if step is None:
            raise FileNotFoundError(
                f"{self.folder} holds no complete checkpoint; a run writes its first one at its first save"
            )
        return step

    def _restore(self, **items: Any) -> Any:
        step = self._newest()
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            # Of an array that is cut short orbax raises Exception itself.
            if type(error) is Exception or isinstance(error, _DAMAGE):
                raise self._damaged(step, error) from error
            raise

    def _check_tree(self, item: str, target: Any) -> None:
        step = self._newest()
        try:
            saved = _shapes(self._manager.item_metadata(step)[item].tree)
        except (*_DAMAGE, AttributeError, TypeError) as error:
            raise self._damaged(step, error) from error
        wanted = _shapes(target)
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f"{item}/{name} is {saved.get(name, 'missing')} in {self.folder / str(step)}, but "
                    f"{wanted.get(name, 'not wanted')} by this model; restore with the config that was saved"
                )

    def _damaged(self, step: int, error: Exception) -> ValueError:
        reason = str(error).partition("\n")[0]
        return ValueError(
            f"{self.folder / str(step)} is damaged ({type(error).__name__}: {reason}); "
            "delete that folder to go on from the checkpoint before it"
        )

    def close(self) -> None:
        """Waits for saves to finish."""
        for name in ("_reader", "_writer"):
            if name in vars(self):
                vars(self)[name].close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _shapes(tree: Any) -> dict[str, list[int]]:
    return {path_name(path): list(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _abstract(tree: Any) -> Any:
    first = SingleDeviceSharding(jax.devices()[0])

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or first)

    return jax.tree.map(one, tree)
