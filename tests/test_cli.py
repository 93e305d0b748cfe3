"""`jaxformer generate`: the text of the library's own call, or one line that says what is wrong."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer import cli
from jaxformer.checkpoint import Checkpointer
from jaxformer.sampling import chain, temperature, top_p
from jaxformer.tokenizers import Tokenizer

CONFIG = jf.Config(vocab_size=257, max_len=24, d_model=8, num_layers=1, num_heads=2)
TOKENIZER = Tokenizer.bytes()
META = {"config": CONFIG.to_dict(), "tokenizer": TOKENIZER.to_json()}
PROMPT = "Zoë: "
WORDS = "abc\xe4"  # the last one takes two tokens


@functools.cache
def params():
    """Of a model that draws, whatever stands before, a letter, half of a letter or, one time in six, the end."""
    shapes = jax.eval_shape(jf.build(CONFIG).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    made = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    made["decoder"]["final_norm"]["bias"] += 1
    likely = np.array([*WORDS.encode(), TOKENIZER.end_id])
    made["embed"]["token"]["embedding"] = made["embed"]["token"]["embedding"].at[likely].set(2.0)
    return made


def save(folder, meta=META):
    state = jf.TrainState(jnp.asarray(3), params(), ())
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(state, meta)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"))


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command line with these arguments and returns what it printed."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["jaxformer", *map(str, arguments)])
        cli.main()
        return capsys.readouterr().out

    return call


def library(seed, t=0.8, p=0.95, new=None):
    ids = [TOKENIZER.end_id, *TOKENIZER.encode(PROMPT)]
    result = jf.generate(
        jf.build(CONFIG),
        params(),
        jnp.asarray([ids]),
        max_new_tokens=new or CONFIG.max_len - len(ids),
        sampler=chain(temperature(t), top_p(p)),
        key=jax.random.key(seed),
        eos_id=TOKENIZER.end_id,
    )
    return TOKENIZER.decode(result.ids[0, : int(result.lengths[0])].tolist())


def test_the_text_is_the_prompt_and_the_librarys_tokens_up_to_the_end(run, command):
    texts = [command("generate", run, PROMPT, "--seed", seed) for seed in range(6)]
    assert texts == [f"{PROMPT}{library(seed)}\n" for seed in range(6)]
    assert len(set(texts)) > 3
    assert all(set(text[len(PROMPT) : -1]) <= {*WORDS, "\ufffd"} for text in texts)
    assert len({len(text) for text in texts}) > 2  # some met an end, and not all the same number of tokens
    assert command("generate", run, PROMPT, "--seed", 0) == texts[0]


def test_every_setting_reaches_the_library(run, command):
    expected = library(5, t=3.0, p=0.5, new=7)
    assert expected != library(5, new=7)
    options = ["--temperature", 3.0, "--top-p", 0.5, "--max-new-tokens", 7, "--seed", 5]
    assert command("generate", run, PROMPT, *options) == f"{PROMPT}{expected}\n"


def test_temperature_zero_is_the_likeliest_text_under_every_seed(run, command):
    texts = {command("generate", run, PROMPT, "--temperature", 0, "--seed", seed) for seed in range(3)}
    assert texts == {f"{PROMPT}{'a' * (CONFIG.max_len - 7)}\n"}  # of equals the lowest id


def test_a_prompt_may_be_empty(run, command):
    assert set(command("generate", run, "", "--temperature", 0)) == {"a", "\n"}


def fails(call, message):
    with pytest.raises(SystemExit) as stopped:
        call()
    assert isinstance(stopped.value.code, str)  # Python prints it to stderr and exits with status 1
    assert "\n" not in stopped.value.code
    assert stopped.value.code.startswith("error: ")
    assert message in stopped.value.code


def test_a_folder_that_is_no_run_is_one_line(tmp_path, command):
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    fails(lambda: command("generate", missing, PROMPT), f"{missing} is no folder; give the one that")
    fails(lambda: command("generate", empty, PROMPT), f"{empty / 'checkpoints'} holds no complete checkpoint")
    assert list(tmp_path.rglob("*")) == [empty]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x" * 23], "the prompt is 24 tokens long, and the model's context is 24; shorten it"),
        (["x", "--max-new-tokens", "23"], "a prompt of 2 and 23 new tokens are 25, over the context of max_len=24"),
        (["x", "--max-new-tokens", "0"], "max_new_tokens=0 must be an integer of at least 1"),
        (["x", "--temperature", "-1"], "temperature -1.0 must be 0 (greedy) or a positive finite number"),
        (["x", "--top-p", "1.5"], "top_p=1.5 is not a probability"),
        (["a\udcff"], "lone surrogate"),  # what Python makes of an argument that is not UTF-8
    ],
)
def test_arguments_that_cannot_be_right_are_one_line_and_nothing_is_printed_before(
    arguments, message, run, command, capsys
):
    fails(lambda: command("generate", run, *arguments), message)
    assert capsys.readouterr().out == ""


DAMAGED = {
    "nothing": ({}, "is damaged: its meta holds no config"),
    "no tokenizer": ({"config": META["config"]}, "is damaged: its meta holds no tokenizer"),
    "a config that is none": (META | {"config": None}, "is damaged: its meta holds no config"),
    "a tokenizer that is none": (META | {"tokenizer": 5}, "is damaged: its meta holds no tokenizer"),
    "a tokenizer that is no JSON": (META | {"tokenizer": "{"}, "not the JSON of a tokenizer"),
    "an unknown field": (
        META | {"config": META["config"] | {"d_modle": 8}},
        "'d_modle' is unknown; did you mean 'd_model'?",
    ),
    "a missing field": (
        META | {"config": {"d_model": 8}},
        "config lacks ['vocab_size', 'max_len', 'num_layers', 'num_heads']",
    ),
    "a value of another type": (META | {"config": META["config"] | {"d_model": "8"}}, "d_model='8' must be an integer"),
    "another model": (META | {"config": META["config"] | {"d_ff": 5}}, "params/decoder/layers_0/mlp/down_proj/"),
    "an unknown attention": (
        META | {"config": META["config"] | {"attention": "mine"}},
        "attention implementation 'mine' is unknown",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_checkpoint_is_one_line(case, tmp_path, command):
    meta, message = DAMAGED[case]
    save(tmp_path, meta)
    fails(lambda: command("generate", tmp_path, PROMPT), message)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', "null"])
def test_a_damaged_meta_file_is_one_line_that_names_the_folder(content, tmp_path, command):
    save(tmp_path)
    (tmp_path / "checkpoints" / "3" / "meta" / "metadata").write_text(content)
    fails(lambda: command("generate", tmp_path, PROMPT), f"{tmp_path / 'checkpoints' / '3'} is damaged")


def test_an_interrupt_ends_without_a_message(run, command, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "stream", interrupted)
    with pytest.raises(SystemExit) as stopped:
        command("generate", run, PROMPT)
    assert stopped.value.code == 130


def test_an_unknown_command_is_refused(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        command("genreate", "x", "y")
    assert stopped.value.code == 2
    assert "generate" in capsys.readouterr().err
