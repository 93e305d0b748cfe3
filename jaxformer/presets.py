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


_ORIGINAL = Config(
    architecture="encoder_decoder",
    vocab_size=37000,
    max_len=1024,
    d_model=512,
    num_layers=6,
    num_heads=8,
    residual="post",
    norm="layernorm",
    positions="sinusoidal",
    activation="relu",
    embed_scale=True,
    dropout=0.1,
)
_T5 = Config(
    architecture="encoder_decoder",
    vocab_size=32128,
    max_len=512,
    d_model=768,
    num_layers=12,
    num_heads=12,
    residual="pre",
    norm="rmsnorm",
    norm_eps=1e-6,
    positions="relative",
    activation="relu",
    bias=False,
    attention_scale=1.0,
    logit_scale=768**-0.5,
)
_T5_V1_1 = dataclasses.replace(
    _T5, d_ff=2048, activation="gelu_tanh", gated=True, tie_embeddings=False, logit_scale=None
)
_BART = Config(
    architecture="encoder_decoder",
    vocab_size=50265,
    max_len=1024,
    d_model=768,
    num_layers=6,
    num_heads=12,
    residual="post",
    norm="layernorm",
    norm_eps=1e-5,
    positions="learned",
    embed_norm=True,
    activation="gelu",
    head_bias=True,
)
_BERT = Config(
    architecture="encoder",
    head="masked_lm",
    vocab_size=30522,
    num_token_types=2,
    max_len=512,
    d_model=768,
    num_layers=12,
    num_heads=12,
    residual="post",
    norm="layernorm",
    norm_eps=1e-12,
    positions="learned",
    embed_norm=True,
    activation="gelu",
    head_bias=True,
    dropout=0.1,
    attention_dropout=0.1,
)
_ROBERTA = dataclasses.replace(_BERT, vocab_size=50265, num_token_types=1, norm_eps=1e-5)
_DISTILBERT = dataclasses.replace(_BERT, num_token_types=None, num_layers=6)
_ALBERT = dataclasses.replace(
    _BERT,
    vocab_size=30000,
    d_embed=128,
    num_distinct_layers=1,
    activation="gelu_tanh",
    dropout=0.0,
    attention_dropout=0.0,
)


def _tiny(config: Config, **sizes: Any) -> Config:
    return dataclasses.replace(config, vocab_size=257, max_len=128, d_model=64, num_layers=2, num_heads=4, **sizes)


PRESETS: dict[str, Config] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "smollm2_135m": _SMOLLM2_135M,
    "original": _ORIGINAL,
    "t5": _T5,
    "t5_v1_1": _T5_V1_1,
    "bart": _BART,
    "bert": _BERT,
    "roberta": _ROBERTA,
    "distilbert": _DISTILBERT,
    "albert": _ALBERT,
    "gpt2_tiny": _tiny(_GPT2),
    "llama_tiny": _tiny(_LLAMA, num_kv_heads=2, d_ff=192),
}
"""Published models, and tiny ones of their kind for tests and first steps."""
