"""Cached logits are the full ones: every kind of cache, scheme of positions, arrangement and grouping of heads.

Each batch holds every padding at once, as its rows, and texts are cut into prompts shorter and longer than the window.
"""

import functools

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import CACHED, INT8

import jaxformer as jf

T, S = 12, 6
TEXT = np.arange(T)
PADDED = np.array([
    TEXT,
    [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7],  # left
    [0, 1, 2, -1, -1, -1, -1, -1, 3, 4, 5, 6],  # right of the prompt
    [0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1],  # right of the text
])  # fmt: skip
SOURCE = np.array([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, -1, -1], [0, -1, -1, -1, -1, -1]])
ROWS = len(PADDED)
IDS, SOURCE_IDS = draw.ids(ROWS, T), draw.ids(ROWS, S, seed=1)
WINDOW = (5, 3)
LONG = [8, *[1] * 4]  # a prompt that is longer than the window, then token by token
CUTS = [LONG, [4, *[1] * 8], [4, 4, 4]]
KINDS = {"dense": None, "ring": WINDOW, "int8": None, "int8_ring": WINDOW}
SCHEMES = ["none", "learned", "sinusoidal", "rotary", "alibi", "relative"]
HEADS = {"multi-head": None, "grouped": 2, "multi-query": 1}


@functools.cache
def model(architecture, scheme, heads, window, scan):
    fields = {"positions": scheme, "num_kv_heads": HEADS[heads], "window": window, "scan_layers": scan}
    made = jf.build(draw.tiny(architecture=architecture, relative_buckets=4, relative_reach=5, **fields))
    shapes = (IDS,) if architecture == "decoder" else (SOURCE_IDS, IDS)
    params = draw.at_random(jax.eval_shape(made.init, jax.random.key(0), *shapes)["params"], seed=0)
    if architecture == "decoder":
        return made, params, np.asarray(draw.logits(made, params, IDS, jnp.asarray(PADDED)))
    full = draw.logits(made, params, SOURCE_IDS, IDS, jnp.asarray(SOURCE), jnp.asarray(PADDED))
    return made, params, np.asarray(full)


# Compiled without optimisation: hundreds of programs that run once.
@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def step(made, params, ids, positions, cache, source):
    apply = functools.partial(made.apply, {"params": params})
    if made.config.architecture == "decoder":
        return apply(ids, positions, cache=cache)
    memory = None if source is None else apply(*source, method="encode")
    return apply(ids, memory, positions, cache=cache, method="decode")


def decoded(made, params, kind, sizes):
    """The logits of all tokens, cut into pieces of these sizes."""
    is_pair = made.config.architecture == "encoder_decoder"
    cache = jf.init_cache(made.config, ROWS, T, kind=kind, source_len=S if is_pair else None)
    source = (SOURCE_IDS, jnp.asarray(SOURCE)) if is_pair else None
    out, start = [], 0
    for size in sizes:
        at = slice(start, start + size)
        logits, cache = step(made, params, IDS[:, at], jnp.asarray(PADDED[:, at]), cache, source)
        out.append(np.asarray(logits))
        start, source = start + size, None
    return np.concatenate(out, axis=1), cache


def check(made, params, full, kind, sizes):
    logits, cache = decoded(made, params, kind, sizes)
    assert cache.is_ring == kind.endswith("ring")
    assert cache.capacity == (max(WINDOW) if cache.is_ring else T)
    real = PADDED >= 0
    if kind.startswith("int8"):
        draw.close((logits - full)[real] / abs(full).max(), 0, INT8)
        assert abs(logits - full)[real].max() > 1e-5  # it is another cache
    else:
        draw.close(logits[real], full[real], CACHED)


@pytest.mark.parametrize("kind", ["dense", "ring", "int8"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_cached_logits_are_the_full_logits(architecture, scheme, heads, kind):
    check(*model(architecture, scheme, heads, KINDS[kind], scan=False), kind, LONG)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_however_the_text_is_cut_and_the_layers_are_run(architecture, scan, kind):
    for sizes in CUTS:
        check(*model(architecture, "rotary", "grouped", KINDS[kind], scan), kind, sizes)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_decoded_as_rows_of_their_own(kind):
    """A cache holds one document a row: packed logits are those of the rows, and packing over a cache is refused."""
    made, params, full = model("decoder", "rotary", "grouped", KINDS[kind], scan=False)
    lengths = [5, 7]
    ids = jnp.concatenate([IDS[0, : lengths[0]], IDS[3, : lengths[1]]])[None]
    segments = jnp.repeat(jnp.array([1, 2]), jnp.array(lengths), total_repeat_length=T)[None]
    packed = draw.logits(made, params, ids, segments=segments)
    logits, cache = decoded(made, params, kind, LONG)
    bound = INT8 * abs(full).max() if kind.startswith("int8") else CACHED
    draw.close(packed[0, : lengths[0]], logits[0, : lengths[0]], bound)
    draw.close(packed[0, lengths[0] :], logits[3, : lengths[1]], bound)
    with pytest.raises(ValueError, match="a cache holds one document a row; decode packed segments as rows"):
        made.apply({"params": params}, ids, segments=segments, cache=cache)
