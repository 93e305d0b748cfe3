"""Decoding over a cache gives the logits of the full forward pass, however the text is cut and wherever padding is."""

import importlib
from functools import partial

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import BFLOAT16, CACHED, FLOAT32

import jaxformer as jf

SCHEMES = ["none", "learned", "sinusoidal", "rotary", "alibi", "relative"]
CAPACITY = 11  # more than the text, and no multiple of the block
IDS = draw.ids(2, 8)
TEXT = np.arange(8)
PADDINGS = {
    "none": np.array([TEXT, TEXT]),
    "left": np.array([[-1, -1, -1, 0, 1, 2, 3, 4], TEXT]),
    "right of the prompt": np.array([[0, -1, -1, -1, 1, 2, 3, 4], TEXT]),
    "right of the text": np.array([[0, 1, 2, 3, 4, 5, -1, -1], [0, 1, 2, -1, -1, -1, -1, -1]]),
}
CUTS = {"token by token": [1] * 8, "chunks": [4, 4], "prompt and tokens": [4, 1, 1, 1, 1], "uneven": [1, 4, 1, 1, 1]}


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of 4 slots: the loop over them takes several steps, the last of which overlaps the one before."""
    cached = importlib.import_module("jaxformer.attention.cached")
    before, cached.BLOCK = cached.BLOCK, 4
    yield
    cached.BLOCK = before


@partial(jax.jit, static_argnums=0)
def step(model, params, ids, positions, cache):
    return model.apply({"params": params}, ids, positions, cache=cache)


def decoded(model, params, positions, sizes, capacity=CAPACITY, **options):
    """The logits of all tokens, cut into pieces of these sizes."""
    cache, out, start = jf.init_cache(model.config, 2, capacity, **options), [], 0
    ids, positions = np.asarray(IDS), np.asarray(positions)
    for size in sizes:
        at = slice(start, start + size)
        logits, cache = step(model, params, ids[:, at], positions[:, at], cache)
        out.append(np.asarray(logits))
        start += size
    assert cache.length == start
    np.testing.assert_array_equal(cache.positions[:, :start], positions[:, :start])
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cached_logits_are_the_full_logits(scheme, scan, padding, cut):
    model, params = draw.model(positions=scheme, scan_layers=scan)
    at = PADDINGS[padding]
    full = draw.logits(model, params, IDS, jnp.asarray(at))
    logits = decoded(model, params, at, CUTS[cut])
    assert logits.dtype == "float32"
    draw.close(logits[at >= 0], full[at >= 0], CACHED)


@pytest.mark.parametrize("fields", [
    {"residual": "post", "norm": "rmsnorm", "gated": True, "bias": False, "num_kv_heads": 1, "tie_embeddings": False},
    {"num_kv_heads": None, "attention_scale": 0.9, "embed_scale": True, "d_head": 6},
    {"window": (3, None), "qk_norm": True, "softcap": 2.0, "rotary": (jf.Rotary(base=9.0), jf.Rotary(base=90.0))},
    {"window": (3, None), "rotary": (jf.Rotary(base=9.0), jf.Rotary(base=90.0)), "scan_layers": True},
    {"window": 3, "positions": "alibi"},
])  # fmt: skip
def test_cached_logits_are_the_full_logits_of_other_models(fields):
    model, params = draw.model(**fields)
    at = PADDINGS["left"]
    full = draw.logits(model, params, IDS, jnp.asarray(at))
    draw.close(decoded(model, params, at, CUTS["prompt and tokens"])[at >= 0], full[at >= 0], CACHED)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_bfloat16_caches_are_right_to_rounding(dtype, cache_dtype):
    model, params = draw.model(dtype=dtype)
    at = PADDINGS["left"]
    full = np.asarray(draw.logits(model, params, IDS, jnp.asarray(at)))
    logits = decoded(model, params, at, CUTS["prompt and tokens"], dtype=cache_dtype)
    draw.close(logits[at >= 0] / abs(full).max(), full[at >= 0] / abs(full).max(), BFLOAT16)


def test_positions_go_on_from_the_length_by_themselves():
    model, params = draw.model()
    full = draw.logits(model, params, IDS)
    cache = jf.init_cache(model.config, 2, CAPACITY)
    for at in (slice(0, 5), slice(5, 8)):
        logits, cache = draw.logits(model, params, IDS[:, at], cache=cache)
        draw.close(logits, full[:, at], CACHED)
    np.testing.assert_array_equal(cache.positions[0], [*range(8), -1, -1, -1])


@pytest.mark.parametrize("capacity", [8, 12])
def test_the_capacity_changes_nothing(capacity):
    model, params = draw.model()
    full = draw.logits(model, params, IDS)
    draw.close(decoded(model, params, PADDINGS["none"], [4, 1, 1, 1, 1], capacity), full, CACHED)


def test_what_is_stored_in_padding_is_irrelevant():
    model, params = draw.model()
    at = jnp.asarray(PADDINGS["left"])
    one, _ = step(model, params, IDS, at, jf.init_cache(model.config, 2, CAPACITY))
    other, _ = step(model, params, jnp.where(at < 0, 9, IDS), at, jf.init_cache(model.config, 2, CAPACITY))
    np.testing.assert_array_equal(other[PADDINGS["left"] >= 0], one[PADDINGS["left"] >= 0])


def test_taps_and_edits_work_over_a_cache():
    model, params = draw.model()
    edits = {"decoder": {"layers_1": {"attn": {"z": jax.tree_util.Partial(jnp.multiply, jnp.asarray(0.5))}}}}
    full, read = draw.apply(model, {"params": params, "edits": edits}, IDS, mutable=("intermediates",))
    cache = jf.init_cache(model.config, 2, CAPACITY)
    (logits, _), cached = draw.apply(
        model, {"params": params, "edits": edits}, IDS, cache=cache, mutable=("intermediates",)
    )
    draw.close(logits, full, CACHED)
    layers, cached_layers = (found["intermediates"]["decoder"] for found in (read, cached))
    for name in ("layers_0", "layers_1"):
        del layers[name]["attn"]["pattern"]  # the one thing that attention over a cache never holds
        jax.tree.map(partial(draw.close, atol=CACHED), cached_layers[name], layers[name])


# Running over ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [8, 6])
def test_more_tokens_than_capacity_is_an_error_that_names_both_numbers(held):
    model, params = draw.model()
    _, cache = step(model, params, IDS[:, :held], None, jf.init_cache(model.config, 2, 8))
    with pytest.raises(ValueError, match=rf"\b{held + 4}\b.* capacity of 8; make it larger with init_cache"):
        model.apply({"params": params}, IDS[:, :4], cache=cache)


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_more_tokens_than_capacity_under_jit_is_nan_from_then_on(scan):
    model, params = draw.model(scan_layers=scan)
    cache = jf.init_cache(model.config, 2, 8)
    for number, start in enumerate([0, 4, 4, 4]):
        at = slice(start, start + 4)
        logits, cache = step(model, params, IDS[:, at], PADDINGS["left"][:, at], cache)
        assert np.isfinite(logits).all() if number < 2 else np.isnan(logits).all()
    assert cache.length == 16


def test_a_chunk_that_fits_in_part_is_nan_as_a_whole():
    model, params = draw.model()
    _, cache = step(model, params, IDS[:, :4], TEXT[None, :4], jf.init_cache(model.config, 2, 7))
    logits, _ = step(model, params, IDS[:, 4:], TEXT[None, 4:], cache)
    assert np.isnan(logits).all()


def test_an_implementation_without_a_cached_form_is_refused_over_a_cache(monkeypatch):
    monkeypatch.setitem(jf.attention.IMPLEMENTATIONS, "mine", lambda q, *_, **__: jnp.zeros_like(q))
    for name, error in (("mine", ValueError), ("unheard of", KeyError)):
        model = jf.build(draw.tiny(attention=name))
        with pytest.raises(error, match=f"attention implementation '{name}'"):
            jf.generate(model, draw.model()[1], draw.ids(1, 3), max_new_tokens=2)


@pytest.mark.parametrize("fields", [{}, {"positions": "relative", "softcap": 2.0}, {"window": 3, "kind": "ring"}])
def test_the_gradient_through_a_cache_is_that_of_the_full_pass(fields):
    kind = fields.get("kind", "dense")
    model, params = draw.model(**{name: value for name, value in fields.items() if name != "kind"})
    at = jnp.asarray(PADDINGS["left"])
    weights = jnp.where(at >= 0, 1.0, 0.0)[..., None] * draw.exact(np.random.default_rng(0), (1, 1, 29))

    def full(params):
        return (model.apply({"params": params}, IDS, at) * weights).sum()

    def cached(params):
        cache = jf.init_cache(model.config, 2, CAPACITY, kind=kind)
        total = 0.0
        for part in (slice(0, 5), slice(5, 6), slice(6, 8)):
            logits, cache = model.apply({"params": params}, IDS[:, part], at[:, part], cache=cache)
            total += (logits * weights[:, part]).sum()
        return total

    expected, actual = (jax.jit(jax.grad(loss))(params) for loss in (full, cached))
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda ours, theirs: draw.close(ours / largest, theirs / largest, FLOAT32), actual, expected)
