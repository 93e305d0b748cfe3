"""A state dict of torch.nn.Transformer: PyTorch's own logits, and tensors that come back bit by bit."""

import dataclasses
from pathlib import Path

import draw
import jax.numpy as jnp
import numpy as np
import pytest
from test_pretrained import REFERENCE

import jaxformer as jf
from jaxformer.convert import original, safetensors

GOLDEN = Path(__file__).parent / "golden" / "torch" / "original"
CONFIG = jf.Config(
    architecture="encoder_decoder",
    vocab_size=56,
    target_vocab_size=50,
    max_len=16,
    d_model=24,
    d_ff=40,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=4,
    residual="post",
    final_norm=True,
    positions="learned",
    activation="relu",
    embed_scale=True,
    tie_embeddings=False,
    head_bias=True,
)
WHERE = {"source": "source", "target": "target", "head": "head", "positions": ("places.0", "places.1")}
NAMES = original.names("transformer", **WHERE)


def tensors():
    return {name: np.array(x, np.float32) for name, x in safetensors.load(GOLDEN / "state_dict.safetensors").items()}


def test_the_logits_are_pytorchs():
    wanted = np.load(GOLDEN / "ref.npz")
    params = original.params(CONFIG, tensors(), NAMES)
    positions = jnp.where(wanted["mask"] > 0, wanted["mask"].cumsum(axis=1) - 1, -1)
    ids, target_ids = (jnp.asarray(wanted[key], jnp.int32) for key in ("ids", "target_ids"))
    draw.close(draw.logits(jf.build(CONFIG), params, ids, target_ids, positions), wanted["logits"], REFERENCE)


def test_a_state_dict_comes_back_bit_by_bit():
    before = tensors()
    after = original.state_dict(CONFIG, original.params(CONFIG, before, NAMES), NAMES)
    assert set(after) == set(before)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)


def test_sinusoids_are_ignored_by_name_and_nothing_else_is():
    more = tensors() | {"waves.table": np.ones((5, 1, 24), np.float32)}
    with pytest.raises(ValueError, match=r"no model of this config has the tensors 'waves\.table'"):
        original.params(CONFIG, more, NAMES)
    original.params(CONFIG, more, original.names("transformer", **WHERE, buffers=r"waves\..*"))


@pytest.mark.parametrize("shared", [False, True], ids=["two tables", "one table"])
def test_a_tied_head_repeats_the_table_of_the_target(shared):
    """PyTorch writes tied weights under both of their names."""
    config = dataclasses.replace(CONFIG, tie_embeddings=True, target_vocab_size=None if shared else 50)
    names = original.names("transformer", **WHERE | ({"target": "source"} if shared else {}))
    given = tensors()
    given["head.weight"] = given["source.weight" if shared else "target.weight"].copy()
    if shared:
        del given["target.weight"]
        given["head.bias"] = np.zeros(56, np.float32)
    params = original.params(config, given, names)
    assert "kernel" not in params["lm_head"]
    given["head.weight"][3, 3] += 1
    with pytest.raises(ValueError, match=r"ties 'head\.weight' to the embedding, but they differ"):
        original.params(config, given, names)


@pytest.mark.parametrize(("name", "message"), [
    ("transformer.decoder.layers.1.multihead_attn.in_proj_bias", r"'.*layers\.1\.multihead_attn\.in_proj_bias'"),
    ("transformer.encoder.norm.weight", r"'transformer\.encoder\.norm\.weight' of shape \(24,\) is missing"),
    ("head.weight", r"'head\.weight' of shape \(50, 24\) is missing"),
])  # fmt: skip
def test_a_tensor_that_is_not_there_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        original.params(CONFIG, {key: x for key, x in tensors().items() if key != name}, NAMES)
