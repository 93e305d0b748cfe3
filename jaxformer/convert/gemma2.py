"""Gemma 2 (Gemma Team 2024): norms on both sides of a sublayer, of scale 1 + w; capped scores; windows by turns."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.config import Config
from jaxformer.convert import llama
from jaxformer.convert.family import Family
from jaxformer.convert.keys import Fields, Key, activation, flag, number, size
from jaxformer.convert.llama import attention, gated_mlp, read_rope, write_rope
from jaxformer.convert.names import LAYER, Change, Names, Rule, norm
from jaxformer.convert.rope import read_layers, windows, write_layers

PLUS_ONE = Change(
    # In float32 at least: 1 + w in bfloat16 would lose most of w.
    load=lambda array, config: array.astype(np.result_type(array.dtype, np.float32)) + np.float32(1),
    save=lambda array, config: array.astype(np.result_type(array.dtype, np.float32)) - np.float32(1),
)

NAMES = Names(
    (
        Rule("model.embed_tokens.weight", "embed/token/embedding", "V D"),
        *norm("model.layers.{i}.input_layernorm", f"{LAYER}/attn_norm", change=PLUS_ONE),
        *attention(change=PLUS_ONE),
        *norm("model.layers.{i}.post_attention_layernorm", f"{LAYER}/attn_out_norm", change=PLUS_ONE),
        *norm("model.layers.{i}.pre_feedforward_layernorm", f"{LAYER}/mlp_norm", change=PLUS_ONE),
        *gated_mlp(),
        *norm("model.layers.{i}.post_feedforward_layernorm", f"{LAYER}/mlp_out_norm", change=PLUS_ONE),
        *norm("model.norm", "decoder/final_norm", change=PLUS_ONE),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
    ),
    prefix="model.",
    buffers=llama.BUFFERS,
)


def _scalar(scale: float) -> int:
    scalar = round(scale**-2)
    if scalar < 1 or scalar**-0.5 != scale:
        raise ValueError(f"query_pre_attn_scalar is an integer, but attention_scale={scale} is not 1 / sqrt of one")
    return scalar


KEYS = llama.KEYS | {
    "d_head": size("head_dim"),
    "activation": activation("hidden_activation", "hidden_act"),
    "attention_scale": Key(
        ("query_pre_attn_scalar",),
        read=lambda name, value: number(name).get({name: value}) ** -0.5,
        write=_scalar,
    ),
    "softcap": number("attn_logit_softcapping", default=None),
    "logit_softcap": number("final_logit_softcapping", default=None),
    "tie_embeddings": flag("tie_word_embeddings", default=True),
}
FIXED = llama.FIXED | {"residual": "sandwich", "embed_scale": True}
ONLY: Fields = {"attention_bias": False, "use_bidirectional_attention": False}


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    layers = fields["num_layers"]
    sliding = read_layers(source, layers, [i % 2 == 0 for i in range(layers)])
    return {"window": windows(source, sliding)} | read_rope(source, fields)


def _write(config: Config) -> Fields:
    return write_layers(config) | write_rope(config)


FAMILY = Family("gemma2", "Gemma2ForCausalLM", NAMES, keys=KEYS, fixed=FIXED, only=ONLY, read=_read, write=_write)
