"""Kernels are lowered for machines that are not here: what Triton and Mosaic refuse in a kernel's text shows."""

from functools import partial

import draw
import jax
import jax.numpy as jnp
import pytest
from position_biases import Linear, Table

import jaxformer as jf
from jaxformer.attention import IMPLEMENTATIONS
from jaxformer.attention.flash import flash_attention

B, T, N, K, H = 2, 300, 4, 2, 40
CALL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}
BIAS = {"none": None, "array": (1, N, T, T), "rows": (B, N, T, T), "linear": (N,), "table": (N, 8)}
MAKE = {"linear": Linear, "table": Table}


@pytest.mark.parametrize("precision", ["highest", None])
@pytest.mark.parametrize("bias", BIAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("platform", CALL)
def test_the_kernels_of_both_passes_are_lowered(platform, dtype, bias, precision):
    """A causal mask with a traced window and segments, grouped heads, a cap and each kind of bias at once."""
    shape = BIAS[bias]
    leaf = None if shape is None else jax.ShapeDtypeStruct(shape, jnp.float32)
    q, kv = (jax.ShapeDtypeStruct((B, T, heads, H), dtype) for heads in (N, K))
    segments, window = jax.ShapeDtypeStruct((B, T), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

    def z(given, segments, window):
        *qkv, leaf = given
        at = jnp.arange(T)[None]
        mask = jf.Mask(at, at, segments, segments, causal=True, window=window)
        made = MAKE[bias](leaf) if bias in MAKE else leaf
        target = "gpu" if platform == "cuda" else platform
        return flash_attention(*qkv, mask, made, scale=0.1, softcap=20.0, platform=target)

    def gradients(*args):
        return jax.grad(lambda *args: z(*args).astype(jnp.float32).sum())(*args)

    with jax.default_matmul_precision(precision):
        for function, kernels in ((z, 1), (gradients, 3)):
            traced = jax.jit(function).trace((q, kv, kv, leaf), segments, window)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert text.count(f"custom_call @{CALL[platform]}(") == kernels


@pytest.mark.parametrize(
    ("platform", "attention", "kernels"),
    [
        ("cuda", "chunked", (0, 0)),
        ("cuda", "flash", (6, 3)),
        ("tpu", "chunked", (0, 0)),
        ("tpu", "flash", (6, 3)),
        ("tpu", "splash", (3, 3)),  # functions under jit, which two layers share
    ],
)
@pytest.mark.parametrize("scan", [False, True])
def test_a_whole_training_step_is_lowered(platform, attention, kernels, scan, monkeypatch):
    """Packed rows, grouped heads, AdamW; `kernels` in a loop over two layers and in a scan."""
    target = "gpu" if platform == "cuda" else platform
    monkeypatch.setitem(IMPLEMENTATIONS, "flash", partial(flash_attention, platform=target))
    rows = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    model = jf.build(draw.tiny(attention=attention, d_head=64, scan_layers=scan, dtype="bfloat16"))
    optimizer = jf.optim.adamw(1e-3)
    batch = jf.data.Batch(rows, rows, jax.ShapeDtypeStruct((2, 256), jnp.float32), rows, rows)
    state = jax.eval_shape(lambda: jf.init_state(jf.build(draw.tiny(d_head=64, scan_layers=scan)), optimizer, seed=0))
    step = jax.jit(jf.make_train_step(model, optimizer).__wrapped__, donate_argnums=0)
    text = step.trace(state, batch).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"custom_call @{CALL[platform]}(") == kernels[scan]
