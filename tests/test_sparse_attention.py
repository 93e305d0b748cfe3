"""Block-sparse attention: the oracle's under mask and layout, with the gradients of einsum under the same pairs."""

from functools import partial

import draw
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from tolerances import BFLOAT16, CACHED, FLOAT32

import jaxformer as jf
from jaxformer.attention import IMPLEMENTATIONS, attention
from jaxformer.attention.grid import make_grid, worklist
from jaxformer.attention.sparse import block_sparse_attention, fixed, local, strided

LAYOUTS = {"local": local(6, 1), "strided": strided(6, 3), "fixed": fixed(6, 3), "fixed, two": fixed(6, 3, 2)}


def pairs(layout, block, T, S):
    """The layout token by token."""
    return np.kron(layout, np.ones((block, block), bool))[:T, :S]


def test_layouts_are_the_papers_patterns():
    """Sections 4.2 and 4.3 of Child et al. 2019, block by block: i sees j in either half of the pattern."""
    for i, j in np.ndindex(12, 12):
        for stride in (2, 3, 4):
            near = abs(i - j) < stride
            assert strided(12, stride)[i, j] == (near or (i - j) % stride == 0)
            for c in range(1, stride):
                summary = j % stride in range(stride - c, stride)
                assert fixed(12, stride, c)[i, j] == (j // stride == i // stride or summary)
        assert local(12, 2)[i, j] == (abs(i - j) <= 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_block_sparse_attention_is_the_oracles(name, causal, dtype, rng):
    T, block, layout = 43, 8, LAYOUTS[name]
    q, k, v = (jnp.asarray(rng.normal(size=(2, T, n, 4)), dtype) for n in (4, 2, 2))
    at = np.stack([np.arange(T), np.arange(T) - 5]).clip(-1)
    mask = jf.Mask(jnp.asarray(at), jnp.asarray(at), causal=causal)
    bias = rng.normal(size=(1, 4, T, T)).astype(np.float32)
    run = jax.jit(partial(block_sparse_attention, layout=layout, block=block, scale=0.6, softcap=3.0))
    z = run(q, k, v, mask, jnp.asarray(bias))
    allowed = oracle.allowed(at, at, causal=causal) & pairs(layout, block, T, T)
    exact = (np.asarray(x, np.float64) for x in (q, k, v))
    draw.close(
        z, oracle.attention(*exact, allowed, bias, scale=0.6, softcap=3.0), {"float32": FLOAT32}.get(dtype, BFLOAT16)
    )
    empty = np.broadcast_to(~allowed.any(axis=(1, 3)), (2, T))
    np.testing.assert_array_equal(z[empty], 0)


def test_gradients_are_those_of_einsum_with_the_other_pairs_hidden(rng):
    T, block, layout = 43, 8, LAYOUTS["strided"]
    q, k, v, weights = (jnp.asarray(rng.normal(size=(2, T, n, 4)), jnp.float32) for n in (4, 2, 2, 4))
    bias, mask = jnp.asarray(rng.normal(size=(1, 4, T, T)), jnp.float32), jf.Mask.causal(T)
    hidden = jnp.where(pairs(layout, block, T, T), 0, -jnp.inf)

    def sparse(q, k, v, bias):
        z = block_sparse_attention(q, k, v, mask, bias, layout=layout, block=block, scale=0.6)
        return (z * weights).sum()

    def dense(q, k, v, bias):
        return (attention(q, k, v, mask, bias + hidden, scale=0.6, implementation="einsum") * weights).sum()

    found, expected = (jax.jit(jax.value_and_grad(f, argnums=range(4)))(q, k, v, bias) for f in (sparse, dense))
    jax.tree.map(lambda a, b: draw.close(a, b, CACHED), found, expected)


def test_only_blocks_of_the_layout_are_worked_on():
    layout, T = strided(16, 4), 64
    count, blocks = worklist(make_grid(jf.Mask.causal(T), 4, 4, layout).active())
    worked = np.zeros((16, 16), bool)
    for i in range(16):
        worked[i, blocks[i, : count[i]]] = True
    np.testing.assert_array_equal(worked, layout & np.tril(np.ones((16, 16), bool)))


def test_a_model_attends_by_a_layout_of_the_users(monkeypatch):
    sparse = partial(block_sparse_attention, layout=local(4, 0), block=2)
    monkeypatch.setitem(IMPLEMENTATIONS, "blocks of two", sparse)
    model, params = draw.model(attention="blocks of two")
    ids = draw.ids(2, 8)
    segments = jnp.asarray([[1, 1, 2, 2, 3, 3, 4, 4]])  # positions go on through them, and pairs see each other only
    plain = jf.build(draw.tiny())
    at = jnp.arange(8)[None]
    expected = draw.logits(plain, params, ids, at, mask=jf.Mask(at, at, segments, segments, causal=True))
    draw.close(draw.logits(model, params, ids), expected, FLOAT32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layout": local(3, 0)},
            r"the layout is of \(3, 3\) blocks, but 8 queries and 8 keys are \(4, 4\) blocks of 2",
        ),
        ({"block": 0}, "block=0 holds no token"),
        (
            {"pattern_fn": lambda pattern: pattern},
            "never holds the pattern; read or edit it with implementation='einsum'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    q = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(
            q, q, q, jf.Mask.causal(8), **{"layout": local(4, 0), "block": 2, "scale": 1.0} | options
        )
