"""Train a decoder-only language model on text, from nothing but text.

    python experiments/train_lm.py

It learns a vocabulary, splits train and validation by document, trains, and writes into its output folder:
checkpoints (model, optimizer, data position, config and tokenizer together), metrics.jsonl, loss.png and summary.md.
The default text is the English prose that every Python installation carries, so nothing is downloaded. The yardstick
is a byte-level 5-gram model of the same text, fitted in the same run. Ctrl-C saves; the same command with --resume
goes on.
"""

import dataclasses
import importlib.util
import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from baselines import kneser_ney_nats_per_byte
from report import Recorder, write_report
from rich.console import Console

import jaxformer as jf
from jaxformer.checkpoint import Checkpointer
from jaxformer.corpus import fingerprint, python_prose, python_source, read_documents, split_documents
from jaxformer.data import Windows, check_vocabulary, encode_documents, eval_batches, train_batches
from jaxformer.tokenizers import Tokenizer

CORPORA: dict[str, Callable[[], list[str]]] = {"stdlib-prose": python_prose, "stdlib-code": python_source}
FINAL_FRACTION = 0.05
"""What is left of the peak learning rate at the last step."""
FREE = ("out", "resume", "prompts", "sample_tokens", "temperature", "top_p", "eval_every", "checkpoint_every")
"""Settings that do not change what is trained, and may differ when a run is resumed."""

MODEL = jf.Config(
    vocab_size=1024,
    max_len=128,
    d_model=128,
    num_layers=4,
    num_heads=2,
    norm="rmsnorm",
    positions="rotary",
    activation="relu",
    bias=False,
)

console = Console(soft_wrap=True, highlight=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Train a decoder-only language model on text."""

    out: Path = Path("runs/train_lm")
    """Folder of the run; made when it does not exist."""
    data: tuple[str, ...] = ("stdlib-prose",)
    """Text files or folders, or stdlib-prose (Python's reference and docstrings), or stdlib-code (its source). A file
    is one document; a long one is cut at blank lines into documents of at most 16 KiB."""
    tokenizer: Literal["bpe", "bytes"] = "bpe"
    """bpe learns model.vocab-size tokens from the training text; bytes takes the 256 bytes as they are."""
    model: jf.Config = MODEL
    """The model; model.max-len is also the length of a training row, in tokens."""
    num_steps: int = 1000
    """Optimizer steps."""
    batch_size: int = 16
    """Rows in a step."""
    learning_rate: float = 5e-3
    """Peak of the schedule."""
    warmup_steps: int = 40
    """Steps of linear rise to the peak; a cosine to 5 percent of it follows."""
    weight_decay: float = 0.1
    """AdamW's decay of matmul kernels."""
    validation_fraction: float = 0.05
    """Share of the text, by document, that is held out."""
    eval_every: int = 250
    """Steps between validations."""
    checkpoint_every: int = 250
    """Steps between checkpoints; one more follows at the end or at Ctrl-C."""
    prompts: tuple[str, ...] = ("The ", "Return the ", "If the argument is")
    """Beginnings of the samples."""
    sample_tokens: int = 64
    """Tokens of each sample."""
    temperature: float = 0.8
    """Of sampling; 0 takes the likeliest token."""
    top_p: float = 0.95
    """Mass of the nucleus that samples are drawn from."""
    seed: int = 0
    """Of the parameters, the split, the order of the data, dropout and the samples."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the newest checkpoint in the folder."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "eval_every", "checkpoint_every", "sample_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be a positive finite number")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file; give --out a folder for the run")

    def fixed(self) -> dict[str, Any]:
        """Returns, as JSON values, what must stay the same when a run is resumed."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in FREE}
        return json.loads(json.dumps(values))


class Run:
    """One run in its folder: what it reads, what it trains, and what it writes."""

    def __init__(self, settings: Settings, checkpointer: Checkpointer):
        self.settings, self.checkpointer = settings, checkpointer
        meta = read_meta(settings, checkpointer)
        self.train_text, self.validation_text = read_text(settings, meta)
        self.tokenizer = make_tokenizer(settings, self.train_text, meta)
        # A small text may yield fewer tokens than were asked for.
        self.config = dataclasses.replace(settings.model, vocab_size=self.tokenizer.vocab_size)
        self.model = jf.Decoder(self.config)
        self.schedule = jf.schedules.warmup_cosine(
            settings.learning_rate, settings.warmup_steps, settings.num_steps, FINAL_FRACTION
        )
        self.optimizer = jf.optim.adamw(self.schedule, weight_decay=settings.weight_decay)
        self.train_windows, self.validation_windows = map(self._windows, (self.train_text, self.validation_text))
        self.batches = train_batches(self.train_windows, settings.batch_size, settings.seed)
        self.validation_bytes = num_bytes(self.validation_text)
        self.fingerprint = fingerprint(self.train_text + self.validation_text)
        self.train_step = jf.make_train_step(self.model, self.optimizer, seed=settings.seed)
        self.eval_step = jf.make_eval_step(self.model)
        # Before training, so that a prompt without room does not fail after it.
        self.prompts = self._encode_prompts()
        self.sampler = jf.sampling.chain(
            jf.sampling.temperature(settings.temperature), jf.sampling.top_p(settings.top_p)
        )
        self.state = self._state(meta)
        self.recorder = Recorder(settings.out, int(self.state.step), settings.num_steps, console)

    def _windows(self, documents: list[str]) -> Windows:
        stream = encode_documents(self.tokenizer, documents)
        check_vocabulary(stream, self.config.vocab_size)
        return Windows(stream, self.config.max_len, self.tokenizer.end_id)

    def _encode_prompts(self) -> list[list[int]]:
        prompts = [[self.tokenizer.end_id, *self.tokenizer.encode(prompt)] for prompt in self.settings.prompts]
        for text, prompt in zip(self.settings.prompts, prompts, strict=True):
            total = len(prompt) + self.settings.sample_tokens
            if total > self.config.max_len:
                raise ValueError(
                    f"prompt {text!r} with {self.settings.sample_tokens} new tokens is {total} tokens long, over "
                    f"model.max_len={self.config.max_len}; shorten it or lower sample_tokens"
                )
        return prompts

    def _state(self, meta: dict[str, Any] | None) -> jf.TrainState:
        if meta is None:
            return jf.init_state(self.model, self.optimizer, self.settings.seed)
        self.batches.set_state(meta["data"])
        return self.checkpointer.restore(
            jax.eval_shape(lambda: jf.init_state(self.model, self.optimizer, self.settings.seed))
        )

    def train(self) -> bool:
        """Trains to the last step, or to Ctrl-C; returns whether the last step was reached."""
        with self.recorder:
            self.state = jf.fit(
                self.state, self.train_step, self.batches, self.settings.num_steps, callbacks=[self._after_step]
            )
        if self.checkpointer.latest_step != int(self.state.step):
            self._save(self.state)
        return int(self.state.step) == self.settings.num_steps

    def _after_step(self, step: int, state: jf.TrainState, metrics: dict[str, jax.Array]) -> None:
        self.recorder.step(step, {**metrics, "learning_rate": self.schedule(step - 1)})
        if step % self.settings.eval_every == 0 and step < self.settings.num_steps:
            with self.recorder.paused():
                self.recorder.validation(step, self._nats_per_byte(state))
        if step % self.settings.checkpoint_every == 0:
            with self.recorder.paused():
                self._save(state)

    def _nats_per_byte(self, state: jf.TrainState) -> float:
        batches = eval_batches(self.validation_windows, self.settings.batch_size)
        nats, _ = jf.evaluate(self.eval_step, state.params, batches)
        return nats / self.validation_bytes

    def _save(self, state: jf.TrainState) -> None:
        meta = {
            "config": self.config.to_dict(),
            "tokenizer": self.tokenizer.to_json(),
            "data": self.batches.get_state(),
            "settings": self.settings.fixed(),
            "fingerprint": self.fingerprint,
        }
        self.checkpointer.save(state, meta)

    def report(self) -> None:
        """Validates, samples, fits the yardstick and writes summary.md and loss.png."""
        self.recorder.validation(self.settings.num_steps, self._nats_per_byte(self.state))
        samples = self._samples()
        with console.status("fitting the 5-gram model"):
            baseline = kneser_ney_nats_per_byte(self.train_text, self.validation_text, order=5)
        facts = {
            "text": f"{' '.join(self.settings.data)}: {num_bytes(self.train_text):,} bytes to train on, "
            f"{self.validation_bytes:,} held out, by document",
            "vocabulary": f"{self.tokenizer.vocab_size} tokens ({self.settings.tokenizer})",
            "model": f"{jf.trees.num_parameters(self.state.params):,} parameters",
        }
        write_report(self.settings.out, self.recorder, baseline, samples, facts)
        console.print((self.settings.out / "summary.md").read_text(), markup=False)

    def _samples(self) -> list[tuple[str, str]]:
        """Returns the prompts with their continuations; they are one left-padded batch, so decoding compiles once."""
        prompts, end = self.prompts, self.tokenizer.end_id
        if not prompts:
            return []
        width = max(map(len, prompts))
        new = jf.generate(
            self.model,
            self.state.params,
            np.array([[end] * (width - len(p)) + p for p in prompts], np.int32),
            positions=np.array([[-1] * (width - len(p)) + list(range(len(p))) for p in prompts], np.int32),
            max_new_tokens=self.settings.sample_tokens,
            sampler=self.sampler,
            key=jax.random.key(self.settings.seed),
            eos_id=end,
        )
        rows = zip(self.settings.prompts, np.asarray(new.ids), np.asarray(new.lengths), strict=True)
        return [(prompt, self.tokenizer.decode(row[:length].tolist())) for prompt, row, length in rows]


def read_meta(settings: Settings, checkpointer: Checkpointer) -> dict[str, Any] | None:
    """Returns the newest checkpoint's meta for a resumed run, and None for a new one.

    Raises:
      ValueError: a new run into a folder that holds one, or a resumed run with other settings.
    """
    if not settings.resume:
        if checkpointer.latest_step is not None:
            raise ValueError(
                f"{settings.out} holds a run at step {checkpointer.latest_step}; "
                "add --resume to go on with it, or choose another --out"
            )
        return None
    meta = checkpointer.read_meta("settings", "data", "tokenizer", "fingerprint")
    began, now = flatten(meta["settings"]), flatten(settings.fixed())
    for name in sorted(began.keys() | now.keys()):
        if began.get(name) != now.get(name):
            raise ValueError(
                f"{name} is {now.get(name)!r}, but the run in {settings.out} began with {began.get(name)!r}; "
                "resume with the settings that it began with"
            )
    return meta


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"model": {"d_model": 8}} as {"model.d_model": 8}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def read_text(settings: Settings, meta: dict[str, Any] | None) -> tuple[list[str], list[str]]:
    """Returns the documents to train on and those held out; a resumed run must find the text that it began with."""
    documents = [d for name in settings.data for d in (CORPORA[name]() if name in CORPORA else read_documents([name]))]
    train, validation = split_documents(documents, settings.validation_fraction, settings.seed)
    if meta is not None and meta["fingerprint"] != fingerprint(train + validation):
        raise ValueError(f"the text of {' '.join(settings.data)} has changed since the run in {settings.out} began")
    return train, validation


def make_tokenizer(settings: Settings, documents: list[str], meta: dict[str, Any] | None) -> Tokenizer:
    """Learns the vocabulary from the training text, or takes the one that the run began with."""
    if meta is not None:
        return Tokenizer.from_json(meta["tokenizer"])
    if settings.tokenizer == "bytes":
        return Tokenizer.bytes()
    with console.status("learning the vocabulary"):
        return Tokenizer.train(documents, settings.model.vocab_size)


def num_bytes(documents: list[str]) -> int:
    """Counts the UTF-8 bytes of all documents."""
    return sum(len(document.encode()) for document in documents)


def main(settings: Settings) -> int:
    """Runs the job; returns the exit status."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the loss curve needs matplotlib; pip install 'jaxformer[plot]'")
    with Checkpointer(settings.out / "checkpoints") as checkpointer:
        run = Run(settings, checkpointer)
        console.print(f"{jf.trees.num_parameters(run.state.params):,} parameters, {settings.num_steps:,} steps")
        try:
            if run.train():
                run.report()
                return 0
        except KeyboardInterrupt:
            # A second Ctrl-C, or one during the report.
            if checkpointer.latest_step is None:
                raise
        command = [arg for arg in sys.argv if arg != "--resume"]
        console.print(
            f"\nStopped; step {checkpointer.latest_step} of {settings.num_steps} is saved. Go on with:\n"
            f"  python {shlex.join(command)} --resume",
            markup=False,
        )
        return 130


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Settings)))
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"error: {error.args[0] if isinstance(error, KeyError) else error}")
    except KeyboardInterrupt:
        sys.exit(130)
