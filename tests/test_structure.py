"""What holds of the source itself: who imports whom, where names of model families may stand, sizes and docstrings."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer as jf

ROOT = Path(__file__).parent.parent
ATTENTION = (
    *("arguments", "bias", "dropout", "indices", "einsum", "online", "grid", "chunked", "flash_kernels", "flash"),
    *("splash", "cudnn", "cached", "sparse", "features", "linear"),
)
FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "gptj", "phi", "opt", "bloom"),
    *("mpt", "t5", "bart", "mbart", "marian", "bert", "roberta", "distilbert", "albert"),
)
LEVELS = [
    [
        "checks",
        "rotary",
        "config_checks",
        "config",
        "presets",
        "masks",
        "trees",
        "storage",
        "cache",
        "taps",
        "sharding",
    ],
    [*(f"attention.{name}" for name in ATTENTION), "attention"],
    ["losses", "history", "transforms", "penalties", "sampling", "schedules", "optim", "int8"],
    ["layers", "positions", "biases", "embeddings", "heads", "multi_head", "blocks", "encoder_decoder", "models"],
    [
        "decoding",
        "prompts",
        "generate",
        "beam",
        "speculative",
        "score",
        "corpus",
        "tokenizers",
        "data",
        "corruption",
        "pairs",
        "objectives",
        "preference",
        "lora",
        "train",
        "checkpoint",
    ],
    [
        *("convert", "convert.files", "convert.shards", "convert.safetensors", "convert.gguf", "convert.pickles"),
        "convert.torch_file",
    ],
    ["convert.gguf_config", "convert.from_gguf", "convert.gguf_tokenizer"],
    [
        *(f"convert.{name}" for name in ("names", "tensors", "original", "keys", "rope", "family", *FAMILIES)),
        *("convert.families", "convert.special", "pretrained", "inspection"),
    ],
    ["cli"],
    ["jaxformer"],
]
ORDER = [name for level in LEVELS for name in level]
"""Each file imports only from files before it; `jaxformer` is the package's own __init__."""
FILES = {
    ".".join(path.relative_to(ROOT / "jaxformer").with_suffix("").parts).removesuffix("__init__").rstrip(".")
    or "jaxformer": path
    for path in sorted((ROOT / "jaxformer").rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imports(tree):
    """The files of the package that a file imports from, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "jaxformer":
                yield from (alias.name if alias.name in FILES else "jaxformer" for alias in node.names)
            elif node.module.startswith("jaxformer."):
                yield node.module.removeprefix("jaxformer.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "jaxformer":
                    yield alias.name.removeprefix("jaxformer.")


def test_every_file_has_its_place():
    assert set(FILES) <= set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_from_files_before_it(name):
    before = ORDER[: ORDER.index(name)]
    assert [found for found in imports(TREES[name]) if found not in before] == []


def test_the_walk_finds_imports():
    found = {name: set(imports(tree)) for name, tree in TREES.items()}
    assert {"layers", "attention", "masks"} <= found["multi_head"]
    assert "attention.einsum" in found["attention"]
    assert found["checks"] == set()
    assert list(imports(ast.parse("def f():\n  import jaxformer.train\n  from jaxformer import jit"))) == [
        "train",
        "jaxformer",
    ]


# Names of families ----------------------------------------------------------------------------------------------------

FAMILY = re.compile(
    r"(?<![a-z])(gpt|llama|(ro|al|distil)?bert|m?bart|m?t5(?!\d)|gemma|mi[sx]tral|qwen|smollm|pythia|falcon)",
    re.IGNORECASE,
)


def words(node):
    """Every identifier and every string of the code below a node; docstrings and comments are prose."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    for field in ("id", "attr", "arg", "name", "asname", "module", "value"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value
    for child in ast.iter_child_nodes(node):
        yield from words(child)


def family_names(name, tree):
    # The presets are the one place: assignments of presets.py outside of classes and functions.
    body = [node for node in tree.body if name != "presets" or not isinstance(node, ast.Assign | ast.AnnAssign)]
    return [word for node in body for word in words(node) if FAMILY.search(word)]


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("convert")])
def test_no_file_knows_a_model_family(name):
    assert family_names(name, TREES[name]) == []


CODE = ["if x == 'gpt2': y", "class LlamaBlock: x", "def f(bert_mode=1): x", "x.is_t5", "import my.bart", "T5Stack()"]


@pytest.mark.parametrize("code", CODE)
def test_the_search_finds_families(code):
    assert family_names("blocks", ast.parse(code))
    assert family_names("presets", ast.parse(f"def f():\n  {code}"))


def test_the_search_leaves_other_words_and_prose_alone():
    code = '"""As GPT-2 does."""\nhilbert = optimizer.opt_state["start5"]\n"""LLaMA again."""\ndef f():\n  "T5."'
    assert family_names("blocks", ast.parse(code)) == []
    assert family_names("presets", ast.parse("_GPT2 = 1\nPRESETS: dict = {'bert': 2}")) == []


# Size and prose -------------------------------------------------------------------------------------------------------

CALLED_BY_LIBRARIES = {"setup", "tree_flatten", "tree_unflatten"}
"""Methods that linen and jax.tree_util ask for; their meaning is documented there."""


def undocumented(tree, prefix=""):
    """Public classes, functions and methods without a docstring; properties of a class may speak for themselves."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {getattr(decorator, "id", None) for decorator in node.decorator_list}
        if node.name.startswith("_") or node.name in CALLED_BY_LIBRARIES or (prefix and "property" in decorators):
            continue
        if not ast.get_docstring(node):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node, f"{node.name}.")


@pytest.mark.parametrize("name", FILES)
def test_every_public_name_has_a_docstring(name):
    assert ast.get_docstring(TREES[name])
    assert list(undocumented(TREES[name])) == []


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_small(name):
    assert len(FILES[name].read_text().splitlines()) <= 300
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f.name for f in functions if f.end_lineno - f.lineno + 1 > 60] == []


# Importing ------------------------------------------------------------------------------------------------------------


def test_every_name_that_the_package_offers_is_there():
    assert sorted(jf.__all__) == sorted(set(jf.__all__))
    assert [name for name in jf.__all__ if getattr(jf, name, None) is None] == []
    assert set(jf.__all__) <= set(dir(jf))
    with pytest.raises(AttributeError, match="module 'jaxformer' has no attribute 'trian'"):
        _ = jf.trian


HEAVY = {"matplotlib", "torch", "tokenizers", "grain", "orbax", "tyro", "rich"}
MEASURE = """
import json, sys, time
import jax, flax.linen, optax
before, start = set(sys.modules), time.perf_counter()
import jaxformer
print(json.dumps([time.perf_counter() - start, sorted(set(sys.modules) - before)]))
"""


def test_importing_the_package_is_quick_and_brings_nothing_heavy():
    """Beside jax, flax and optax, which any user of it has; the fastest of three, because the machine may be busy."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=True
        )
        seconds, modules = json.loads(run.stdout.splitlines()[-1])
        assert "jaxformer.models" in modules
        assert {module.split(".")[0] for module in modules} & HEAVY == set()
        if seconds <= 0.3:
            return
    raise AssertionError(f"importing jaxformer added {seconds:.2f} s in the last of three tries")
