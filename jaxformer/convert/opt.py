"""OPT (Zhang et al. 2022): GPT-2's shape with ReLU, tensors of their own for q, k, v, and positions from row 2 on."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, activation, flag, rate, size
from jaxformer.convert.names import LAYER, Change, Names, Rule, norm, projection

FILE = "model.decoder.layers.{i}"

FROM_ROW_2 = Change(
    load=lambda array, config: array[2:],
    save=lambda array, config: np.concatenate([np.zeros_like(array[:1]).repeat(2, axis=0), array]),
    extra_rows=2,
)
"""The rows before the first position's are of padding, whose values nothing depends on; they are written as 0."""

NAMES = Names(
    (
        Rule("model.decoder.embed_tokens.weight", "embed/token/embedding", "V D"),
        Rule("model.decoder.embed_positions.weight", "embed/position/embedding", "P D", FROM_ROW_2),
        *norm(f"{FILE}.self_attn_layer_norm", f"{LAYER}/attn_norm"),
        *projection(f"{FILE}.self_attn.q_proj", f"{LAYER}/attn/q_proj", "(N H) D -> D N H", "(N H) -> N H"),
        *projection(f"{FILE}.self_attn.k_proj", f"{LAYER}/attn/k_proj", "(N H) D -> D N H", "(N H) -> N H"),
        *projection(f"{FILE}.self_attn.v_proj", f"{LAYER}/attn/v_proj", "(N H) D -> D N H", "(N H) -> N H"),
        *projection(f"{FILE}.self_attn.out_proj", f"{LAYER}/attn/o_proj", "D (N H) -> N H D", "D"),
        *norm(f"{FILE}.final_layer_norm", f"{LAYER}/mlp_norm"),
        *projection(f"{FILE}.fc1", f"{LAYER}/mlp/up_proj", "F D -> D F", "F"),
        *projection(f"{FILE}.fc2", f"{LAYER}/mlp/down_proj", "D F -> F D", "D"),
        *norm("model.decoder.final_layer_norm", "decoder/final_norm"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
    ),
    prefix="model.",
)


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    inner = size("word_embed_proj_dim", default=None).get(source) or fields["d_model"]
    if inner != fields["d_model"]:
        raise ValueError(
            f"word_embed_proj_dim={inner} differs from hidden_size={fields['d_model']}: embeddings projected to "
            "the model's width (OPT 350m) are not supported"
        )
    return {}


FAMILY = Family(
    "opt",
    "OPTForCausalLM",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("max_position_embeddings"),
        "d_model": size("hidden_size"),
        "num_layers": size("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": size("num_attention_heads"),
        "d_ff": size("ffn_dim"),
        "activation": activation("activation_function"),
        "dropout": rate("dropout"),
        "attention_dropout": rate("attention_dropout"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed={"residual": "pre", "norm": "layernorm", "norm_eps": 1e-5, "positions": "learned"},
    only={
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    read=_read,
    write=lambda config: {"word_embed_proj_dim": config.d_model},
)
