"""The main job, end to end in a tiny setting: what it writes, and that a stopped run is resumed bit by bit."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import train_lm
from tyro import cli as parse

import jaxformer as jf
from jaxformer import decoding
from jaxformer.checkpoint import Checkpointer

SCRIPT = Path(train_lm.__file__)
STEPS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i, word in enumerate(("keys", "cabinets", "stairs", "tables")):
        (folder / f"{word}.txt").write_text(
            "".join(f"The {word} number {n} are beside the door.\n" for n in range(40 + i))
        )
    return folder


def flags(text, out, *more):
    sizes = "--model.vocab-size 300 --model.d-model 16 --model.num-layers 1 --model.num-heads 2 --model.max-len 32"
    pace = f"--num-steps {STEPS} --warmup-steps 2 --batch-size 2 --eval-every 5 --checkpoint-every 4 --sample-tokens 8"
    dropout = "--model.dropout 0.1 --validation-fraction 0.3"
    return [*f"{sizes} {pace} {dropout} --data {text} --out {out}".split(), *more]


def settings(text, out, *more):
    return parse(train_lm.Settings, args=flags(text, out, *more))


def final_state(folder):
    """Every array of the newest checkpoint, by name."""
    model = jf.build(jf.Config.from_dict(Checkpointer(folder / "checkpoints").read_meta()["config"]))
    optimizer = jf.optim.adamw(lambda step: 0.1)
    with Checkpointer(folder / "checkpoints") as checkpointer:
        state = checkpointer.restore(jax.eval_shape(lambda: jf.init_state(model, optimizer, 0)))
    return {jf.trees.path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"]) for r in records if "loss" in r]


def assert_same_run(folder, reference):
    assert losses(folder) == losses(reference)
    ours, theirs = final_state(folder), final_state(reference)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_lm.main(settings(text, folder)) == 0
    return folder


def test_the_run_writes_all_that_it_promises(whole):
    summary = (whole / "summary.md").read_text()
    for row in ("validation loss", "5-gram", "tokens/s", "versions", "date"):
        assert row in summary
    assert [step for step, _ in losses(whole)] == list(range(1, STEPS + 1))
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert Checkpointer(whole / "checkpoints").latest_step == STEPS


def test_the_summary_holds_the_validation_loss_of_the_saved_model(whole, text):
    run_settings = settings(text, whole, "--resume")
    with Checkpointer(whole / "checkpoints") as checkpointer:
        run = train_lm.Run(run_settings, checkpointer)
        (stated,) = re.findall(r"\*\*([\d.]+) nats per byte\*\*", (whole / "summary.md").read_text())
        assert float(stated) == pytest.approx(run._nats_per_byte(run.state), abs=5e-5)


def test_a_run_compiles_its_step_once_and_its_decoding_once(text, tmp_path):
    decoding.run.clear_cache()
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        run = train_lm.Run(settings(text, tmp_path), checkpointer)
        assert run.train()
        run.report()
    assert run.train_step._cache_size() == 1
    assert run.eval_step._cache_size() == 1
    assert decoding.run._cache_size() == 1


@pytest.mark.parametrize("stop_at", [1, 4, 7, STEPS - 1])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_stopped_at_any_step_saves_and_resumes_bitwise(
    text, whole, tmp_path, capsys, monkeypatch, stop_at, number
):
    record = train_lm.Recorder.step

    def stop(self, step, metrics):
        record(self, step, metrics)
        if step == stop_at:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(train_lm.Recorder, "step", stop)
        assert train_lm.main(settings(text, tmp_path)) == 130
    assert f"Stopped; step {stop_at} of {STEPS} is saved" in capsys.readouterr().out
    assert Checkpointer(tmp_path / "checkpoints").latest_step == stop_at
    assert train_lm.main(settings(text, tmp_path, "--resume")) == 0
    assert_same_run(tmp_path, whole)


def start(text, out, *more):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    command = [sys.executable, str(SCRIPT), *flags(text, out, *more)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(process, condition, seconds=120):
    end = time.monotonic() + seconds
    while process.poll() is None and not condition():
        assert time.monotonic() < end, "the run did not get there"
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_killed_again_and_again_resumes_bitwise(text, whole, tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    killed = 0
    for lines, more in ((3, ()), (6, ("--resume",)), (9, ("--resume",))):
        process = start(text, tmp_path, *more)
        wait_for(process, lambda lines=lines: metrics.exists() and metrics.read_text().count('"loss"') >= lines)
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), output
        killed += process.returncode != 0
        if Checkpointer(tmp_path / "checkpoints").latest_step is None:
            process = start(text, tmp_path)
            wait_for(process, lambda: any((tmp_path / "checkpoints").glob("4/_CHECKPOINT_METADATA")))
            process.kill()
            process.communicate()
    assert killed, "no kill came in time"
    process = start(text, tmp_path, "--resume")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert_same_run(tmp_path, whole)


def test_a_new_run_never_writes_over_another(text, whole):
    with pytest.raises(ValueError, match=rf"holds a run at step {STEPS}; add --resume"):
        train_lm.main(settings(text, whole))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--learning-rate", "0.5"), "learning_rate is 0.5, but the run .* began with 0.005"),
        (("--model.d-model", "32"), "model.d_model is 32, but the run .* began with 16"),
        (("--num-steps", "13"), "num_steps is 13, but the run .* began with 12"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(text, whole, change, message):
    with pytest.raises(ValueError, match=message):
        train_lm.main(settings(text, whole, "--resume", *change))


def test_a_run_is_not_resumed_on_other_text(text, whole, tmp_path):
    changed = tmp_path / "text"
    changed.mkdir()
    for file in text.iterdir():
        (changed / file.name).write_text(file.read_text().replace("beside", "behind"))
    run_settings = dataclasses.replace(settings(text, whole, "--resume"), data=(str(changed),))
    meta = Checkpointer(whole / "checkpoints").read_meta()
    with pytest.raises(ValueError, match="has changed since the run"):
        train_lm.read_text(run_settings, meta)


def test_a_prompt_without_room_is_refused_before_training(text, tmp_path):
    with pytest.raises(
        ValueError, match=r"prompt '(keys ){40}' with 8 new tokens is \d+ tokens long, over .*max_len=32"
    ):
        train_lm.main(settings(text, tmp_path, "--prompts", "keys " * 40))
    assert not list(tmp_path.iterdir())


def test_a_run_without_prompts_has_no_samples(text, whole):
    run = train_lm.Run(settings(text, whole, "--resume", "--prompts"), Checkpointer(whole / "checkpoints"))
    assert run._samples() == []


def test_a_finished_run_resumed_for_its_report_changes_no_record(text, tmp_path):
    assert train_lm.main(settings(text, tmp_path)) == 0
    before = (tmp_path / "metrics.jsonl").read_text()
    assert train_lm.main(settings(text, tmp_path, "--resume")) == 0
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert "tokens/s not measured" in (tmp_path / "summary.md").read_text()


def test_a_diverged_run_stops_with_its_step_and_keeps_its_checkpoint(text, tmp_path, monkeypatch):
    record = train_lm.Recorder.step

    def spoil(self, step, metrics):
        record(self, step, metrics | {"loss": jax.numpy.nan} if step == 6 else metrics)

    monkeypatch.setattr(train_lm.Recorder, "step", spoil)
    with pytest.raises(ValueError, match=r"loss of step 6 is nan: training has diverged.*lower learning_rate"):
        train_lm.main(settings(text, tmp_path))
    assert Checkpointer(tmp_path / "checkpoints").latest_step == 4


def test_an_interrupted_report_says_how_to_go_on(text, tmp_path, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_lm, "kneser_ney_nats_per_byte", interrupt)
        assert train_lm.main(settings(text, tmp_path)) == 130
    assert f"Stopped; step {STEPS} of {STEPS} is saved. Go on with:" in capsys.readouterr().out
    assert train_lm.main(settings(text, tmp_path, "--resume")) == 0


@pytest.mark.parametrize("rate", ["nan", "0", "-1", "inf"])
def test_a_learning_rate_that_cannot_train_is_refused(text, tmp_path, rate):
    with pytest.raises(SystemExit):
        settings(text, tmp_path, "--learning-rate", rate)


def test_the_readmes_command_continues_a_text_from_the_run(whole):
    readme = (SCRIPT.parent.parent / "README.md").read_text()
    (command,) = [line for line in readme.splitlines() if line.startswith("jaxformer generate ")]
    name, *arguments = shlex.split(command.replace("runs/train_lm", str(whole)))
    program = Path(sys.executable).parent / name
    made = subprocess.run([program, *arguments, "--max-new-tokens", "5"], capture_output=True, text=True, check=True)
    assert made.stdout.startswith("The function returns")
    assert len(made.stdout) > len("The function returns\n")


def test_resuming_needs_a_checkpoint(text, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        train_lm.main(settings(text, tmp_path / "nothing", "--resume"))


def test_bad_input_is_one_line_and_no_traceback(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    process = start(tmp_path / "empty.txt", tmp_path / "out")
    output, _ = process.communicate()
    assert process.returncode == 1
    assert re.fullmatch(r"error: .*empty\.txt is empty; .*\n", output.splitlines(keepends=True)[-1])
    assert "Traceback" not in output
