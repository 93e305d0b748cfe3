"""Encoders and encoder-decoders against the oracle, and what must hold of them."""

import dataclasses
import functools

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import CACHED, FLOAT32

import jaxformer as jf
from jaxformer.encoder_decoder import Memory
from jaxformer.heads import mean_pooled

IDS, TARGET = draw.ids(2, 6), draw.ids(2, 5, seed=1)
LEFT, RIGHT = np.array([[-1, -1, 0, 1, 2, 3], range(6)]), np.array([[0, 1, 2, 3, -1, -1], range(6)])
TYPES = np.array([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
ENCODERS = {
    "post, types, a masked head": {
        "residual": "post", "positions": "learned", "num_token_types": 2, "embed_norm": True, "head": "masked_lm",
        "head_bias": True, "activation": "gelu", "num_kv_heads": None,
    },
    "narrow embeddings": {
        "residual": "post", "positions": "sinusoidal", "d_embed": 6, "embed_norm": True, "head": "masked_lm",
    },
    "classes of the text": {"head": "classifier", "num_labels": 3, "residual": "post", "num_token_types": 3},
    "classes of tokens": {"head": "token_classifier", "num_labels": 4, "positions": "alibi"},
    "a vector of the text": {"head": "pooler", "positions": "relative", "norm": "rmsnorm", "bias": False},
    "hidden states, windows and turns by layer": {
        "head": "none", "window": (2, None), "rotary": (jf.Rotary(base=9.0), jf.Rotary(base=90.0)), "gated": True,
    },
    "a head of its own": {"head": "lm", "tie_embeddings": False, "d_embed": 6, "residual": "parallel"},
}  # fmt: skip
PAIRS = {
    "original": {
        "residual": "post", "positions": "sinusoidal", "embed_scale": True, "activation": "relu", "num_kv_heads": None,
    },
    "relative, scaled logits": {
        "positions": "relative", "relative_buckets": 4, "relative_reach": 5, "norm": "rmsnorm", "bias": False,
        "attention_scale": 1.0, "logit_scale": 0.25, "num_decoder_layers": 1, "d_head": 6,
    },
    "learned, normed embeddings, another decoder": {
        "positions": "learned", "embed_norm": True, "head_bias": True, "decoder_d_ff": 20, "num_decoder_layers": 3,
        "embed_scale": True, "residual": "post", "final_norm": True,
    },
    "two vocabularies": {"target_vocab_size": 31, "tie_embeddings": False, "qk_norm": True, "gated": True},
    "two vocabularies, tied": {"target_vocab_size": 31, "positions": "alibi", "residual": "sandwich"},
}  # fmt: skip


def encoder(name="classes of tokens", **fields):
    model = jf.build(draw.tiny(architecture="encoder", **ENCODERS[name] | fields))
    return model, draw.params(model)


def pair(name="original", **fields):
    model = jf.build(draw.tiny(architecture="encoder_decoder", **PAIRS[name] | fields))
    shapes = jax.eval_shape(model.init, jax.random.key(0), IDS, TARGET)["params"]
    return model, draw.at_random(shapes, 0)


def unstacked(model, params):
    return jf.trees.unstack_layers(params) if model.config.scan_layers else params


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("at", [None, LEFT, RIGHT], ids=["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_the_oracles(name, at, scan):
    model, params = encoder(name, scan_layers=scan)
    types = TYPES if model.config.num_token_types else None
    places, token_types = (None if x is None else jnp.asarray(x) for x in (at, types))
    found = draw.logits(model, params, IDS, places, token_types=token_types)
    expected = oracle.encoder(unstacked(model, params), model.config.to_dict(), IDS, at, token_types=types)
    real = slice(None) if at is None or expected.shape[:2] != (2, 6) else at >= 0
    assert found.shape == expected.shape
    draw.close(np.asarray(found)[real], expected[real], FLOAT32 * max(1, abs(expected).max()))


def test_packed_documents_of_an_encoder_are_separate_texts():
    model, params = encoder()
    segments = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 2, 2, 2, 2]])
    found = draw.logits(model, params, IDS, segments=jnp.asarray(segments))
    draw.close(found[0, 2:5], draw.logits(model, params, IDS[:1, 2:5])[0], FLOAT32)
    draw.close(found[1, 1:], draw.logits(model, params, IDS[1:, 1:])[0], FLOAT32)


def test_hidden_states_are_there_whatever_the_head():
    model, params = encoder()
    bare = jf.build(dataclasses.replace(model.config, head="none", num_labels=None))
    hidden = draw.apply(model, {"params": params}, IDS, method="hidden")
    np.testing.assert_array_equal(hidden, draw.logits(bare, {k: params[k] for k in ("embed", "encoder")}, IDS))


def test_an_encoder_sees_both_sides():
    model, params = encoder("hidden states, windows and turns by layer", window=None)
    changed = IDS.at[:, 5].set((IDS[:, 5] + 1) % 29)
    assert (abs(draw.logits(model, params, changed) - draw.logits(model, params, IDS)).max(axis=-1) > 1e-4).all()


def test_the_mean_is_of_real_tokens():
    x = jnp.arange(12.0).reshape(2, 3, 2)
    at = jnp.asarray([[0, 1, -1], [-1, -1, -1]])
    np.testing.assert_array_equal(mean_pooled(x, at), [[1, 2], [0, 0]])
    np.testing.assert_array_equal(mean_pooled(x, jnp.arange(3)[None]), x.mean(axis=1))
    assert mean_pooled(x.astype(jnp.bfloat16), at).dtype == "float32"


def test_the_text_is_read_off_its_first_token_wherever_that_stands():
    model, params = encoder("classes of the text")
    alone = draw.logits(model, params, IDS[:1, 2:])
    padded = draw.logits(model, params, IDS[:1], jnp.asarray(LEFT[:1]))
    draw.close(padded, alone, FLOAT32)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"token_types": jnp.full((1, 6), 2)}, "token type 2 is outside of the table of 2; types are 0 to 1"),
        ({"token_types": jnp.zeros((1, 6))}, "token_types have type float32; they must be integers"),
        ({"positions": jnp.full((1, 6), 16)}, "position 16 is beyond the learned table"),
    ],
)
def test_what_an_encoder_cannot_take_is_refused(kwargs, message, unchecked):
    model, params = encoder("post, types, a masked head")
    with pytest.raises(ValueError, match=message):
        model.apply({"params": params}, IDS, **kwargs)
    model, params = encoder()
    with pytest.raises(ValueError, match="token_types are given, but the model has none"):
        model.apply({"params": params}, IDS, token_types=jnp.zeros((1, 6), jnp.int32))


# Source and target ----------------------------------------------------------------------------------------------------

TARGET_AT = np.array([[0, 1, 2, -1, -1], range(5)])


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("at", [None, LEFT], ids=["none", "left"])
@pytest.mark.parametrize("name", PAIRS)
def test_encoder_decoders_are_the_oracles(name, at, scan):
    model, params = pair(name, scan_layers=scan)
    target_at = None if at is None else TARGET_AT
    places = () if at is None else (jnp.asarray(at), jnp.asarray(target_at))
    found = draw.logits(model, params, IDS, TARGET, *places)
    expected = oracle.encoder_decoder(unstacked(model, params), model.config.to_dict(), IDS, TARGET, at, target_at)
    real = slice(None) if at is None else target_at >= 0
    assert found.dtype == "float32"
    draw.close(np.asarray(found)[real], expected[real], FLOAT32 * max(1, abs(expected).max()))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("at", [None, LEFT], ids=["none", "left"])
@pytest.mark.parametrize("name", PAIRS)
def test_decoding_over_a_cache_is_the_whole_pass_and_encodes_once(name, at, scan):
    model, params = pair(name, scan_layers=scan)
    at = None if at is None else jnp.asarray(at)
    full = draw.logits(model, params, IDS, TARGET, at)
    memory = draw.apply(model, {"params": params}, IDS, at, method="encode")
    cache, out = jf.init_cache(model.config, 2, 7, source_len=6), []
    for start, stop in ((0, 2), (2, 3), (3, 5)):
        given = memory if start == 0 else None
        logits, cache = draw.apply(
            model, {"params": params}, TARGET[:, start:stop], given, cache=cache, method="decode"
        )
        out.append(logits)
    draw.close(jnp.concatenate(out, axis=1), full, CACHED)
    assert cache.length == 5


def test_no_target_depends_on_a_later_one_and_each_on_all_of_the_source():
    model, params = pair()
    full = draw.logits(model, params, IDS, TARGET)
    later = draw.logits(model, params, IDS, TARGET.at[:, 3].set((TARGET[:, 3] + 1) % 29))
    np.testing.assert_array_equal(later[:, :3], full[:, :3])
    assert (abs(later - full)[:, 3:].max(axis=-1) > 1e-4).all()
    for s in range(6):
        other = draw.logits(model, params, IDS.at[:, s].set((IDS[:, s] + 1) % 29), TARGET)
        assert (abs(other - full).max(axis=-1) > 1e-5).all()


def test_packed_pairs_are_separate_pairs():
    model, params = pair()
    source, target = np.array([[1, 1, 2, 2, 2, 0]]), np.array([[1, 1, 1, 2, 2]])
    found = draw.logits(
        model, params, IDS[:1], TARGET[:1], segments=jnp.asarray(source), target_segments=jnp.asarray(target)
    )
    draw.close(found[0, :3], draw.logits(model, params, IDS[:1, :2], TARGET[:1, :3])[0], FLOAT32)
    draw.close(found[0, 3:], draw.logits(model, params, IDS[:1, 2:5], TARGET[:1, 3:])[0], FLOAT32)


def test_gradients_reach_every_parameter_of_both_stacks():
    model, params = pair("two vocabularies")
    gradients = jax.jit(jax.grad(lambda p: jnp.square(model.apply({"params": p}, IDS, TARGET)).sum()))(params)
    silent = {jf.trees.path_name(path) for path, g in jax.tree.leaves_with_path(gradients) if not np.any(g)}
    assert {name for name in silent if not name.endswith("k_proj/bias")} == set()


def test_what_an_encoder_decoder_cannot_take_is_refused(unchecked):
    model, params = pair()
    run = functools.partial(model.apply, {"params": params}, method="decode")
    memory = Memory(jnp.zeros((2, 6, 16)), jnp.asarray(LEFT))
    with pytest.raises(ValueError, match="there is no source to attend to; pass the memory"):
        run(TARGET)
    with pytest.raises(ValueError, match="there is no source to attend to"):
        run(TARGET, cache=jf.init_cache(model.config, 2, 7, source_len=6))
    with pytest.raises(ValueError, match=r"room for a source of \(2, 4\), and this one is \(2, 6\); make it with"):
        run(TARGET, memory, cache=jf.init_cache(model.config, 2, 7, source_len=4))
    with pytest.raises(ValueError, match="packed together or not at all"):
        run(TARGET, memory, segments=jnp.ones((2, 5), jnp.int32))
    with pytest.raises(ValueError, match="token id 29 is outside of the vocabulary of 29"):
        run(jnp.full((2, 5), 29), memory)
    with pytest.raises(ValueError, match="source_len=None with architecture='encoder_decoder'"):
        jf.init_cache(model.config, 2, 7)
    with pytest.raises(ValueError, match="source_len=6 with architecture='decoder'"):
        jf.init_cache(draw.tiny(), 2, 7, source_len=6)
