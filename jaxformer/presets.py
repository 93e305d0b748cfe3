"""Published models as configs, and tiny ones of their kind for tests and first steps."""

import dataclasses
from typing import Any

from jaxformer.config import Config
from jaxformer.rotary import Rotary

_GPT2 = Config(
    vocab_size=50257,
    max_len=1024,
    d_model=768,
    num_layers=12,
    num_heads=12,
    residual="pre",
    norm="layernorm",
    norm_eps=1e-5,
    positions="learned",
    activation="gelu_tanh",
)
_LLAMA = Config(
    vocab_size=32000,
    max_len=2048,
    d_model=4096,
    num_layers=32,
    num_heads=32,
    d_ff=11008,
    residual="pre",
    norm="rmsnorm",
    norm_eps=1e-6,
    positions="rotary",
    activation="silu",
    gated=True,
    bias=False,
    tie_embeddings=False,
)
_SMOLLM2_135M = dataclasses.replace(
    _LLAMA,
    vocab_size=49152,
    max_len=8192,
    d_model=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    d_ff=1536,
    norm_eps=1e-5,
    rotary=Rotary(base=100000.0),
    tie_embeddings=True,
)


def _tiny(config: Config, **sizes: Any) -> Config:
    return dataclasses.replace(config, vocab_size=257, max_len=128, d_model=64, num_layers=2, num_heads=4, **sizes)


PRESETS: dict[str, Config] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "smollm2_135m": _SMOLLM2_135M,
    "gpt2_tiny": _tiny(_GPT2),
    "llama_tiny": _tiny(_LLAMA, num_kv_heads=2, d_ff=192),
}
"""Published models, and tiny ones of their kind for tests and first steps."""
