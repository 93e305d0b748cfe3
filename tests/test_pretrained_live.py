"""Models that this package wrote, opened by `transformers` itself; only where that is installed."""

import os
from pathlib import Path

import draw
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/ref.npz"))
TOLERANCE = 1e-4


def theirs(folder, ids, target_ids=None):
    auto = transformers.AutoModelForCausalLM if target_ids is None else transformers.AutoModelForSeq2SeqLM
    model, report = auto.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert [names for names in report.values() if names] == []
    inputs = {"input_ids": ids} | ({} if target_ids is None else {"decoder_input_ids": target_ids})
    inputs = {name: torch.from_numpy(np.array(x, np.int64)) for name, x in inputs.items()}
    with torch.no_grad():
        return model.eval()(**inputs, use_cache=False).logits.numpy()


@pytest.mark.parametrize("name", NAMES)
def test_transformers_opens_what_was_saved_and_computes_the_same(name, tmp_path):
    model = jf.load(GOLDEN / name, dtype="float32")
    jf.save(tmp_path, model.config, model.params)
    lengths = (16, 9) if model.config.architecture == "encoder_decoder" else (16,)
    texts = [draw.ids(2, length, vocab_size=model.config.vocab_size) for length in lengths]
    draw.close(draw.logits(model.model, model.params, *texts), theirs(tmp_path, *texts), TOLERANCE)


OTHERS = {
    "window of every layer": {"window": 4},
    "windows of upper layers": {"window": (None, 4), "qkv_bias": True},
    "scaled, with heads of another width": {"d_head": 8, "rotary": jf.Rotary(scaling="linear", factor=2.0)},
    "stretched, less loud": {
        "rotary": jf.Rotary(scaling="yarn", factor=2.0, original_len=8, slow=0.5, fast=4.0, magnitude=1.1)
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_made_here_is_the_same_there(name, tmp_path):
    llama = {"norm": "rmsnorm", "bias": False, "gated": True, "activation": "silu", "tie_embeddings": False}
    model, params = draw.model(**llama, **OTHERS[name])
    jf.save(tmp_path, model.config, params)
    ids = draw.ids(2, 12)
    draw.close(draw.logits(model, params, ids), theirs(tmp_path, ids), TOLERANCE)


def test_a_bfloat16_model_stays_one(tmp_path):
    model = jf.load(GOLDEN / "llama")
    jf.save(tmp_path, model.config, model.params)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert there.dtype == torch.bfloat16
    assert model.params["embed"]["token"]["embedding"].dtype == jnp.bfloat16
