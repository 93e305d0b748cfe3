"""GPT-J (Wang and Komatsuzaki 2021): one norm before both sublayers, neighbouring lanes turn, biases here and there."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, activation, flag, number, rate, size
from jaxformer.convert.names import LAYER, Array, Change, Names, Rule, norm, projection
from jaxformer.convert.rope import same_rotary
from jaxformer.rotary import Rotary

FILE = "transformer.h.{i}"


def _halves(config: Config) -> Array:
    """Return which lane of the file comes where: first the even ones of those that turn, then the odd ones."""
    H = config.sizes["H"]
    width = same_rotary(config).width or H
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2), np.arange(width, H)])


INTERLEAVED = Change(
    load=lambda array, config: array[..., _halves(config)],
    save=lambda array, config: array[..., np.argsort(_halves(config))],
)

NAMES = Names(
    (
        Rule("transformer.wte.weight", "embed/token/embedding", "V D"),
        *norm(f"{FILE}.ln_1", f"{LAYER}/attn_norm"),
        *norm(f"{FILE}.ln_1", f"{LAYER}/mlp_norm"),
        Rule(f"{FILE}.attn.q_proj.weight", f"{LAYER}/attn/q_proj/kernel", "(N H) D -> D N H", INTERLEAVED),
        Rule(f"{FILE}.attn.k_proj.weight", f"{LAYER}/attn/k_proj/kernel", "(N H) D -> D N H", INTERLEAVED),
        Rule(f"{FILE}.attn.v_proj.weight", f"{LAYER}/attn/v_proj/kernel", "(N H) D -> D N H"),
        Rule(f"{FILE}.attn.out_proj.weight", f"{LAYER}/attn/o_proj/kernel", "D (N H) -> N H D"),
        *projection(f"{FILE}.mlp.fc_in", f"{LAYER}/mlp/up_proj", "F D -> D F", "F"),
        *projection(f"{FILE}.mlp.fc_out", f"{LAYER}/mlp/down_proj", "D F -> F D", "D"),
        *norm("transformer.ln_f", "decoder/final_norm"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
        Rule("lm_head.bias", "lm_head/bias", "V"),
    ),
    prefix="transformer.",
    buffers=r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
    zeros=(f"{LAYER}/attn/o_proj/bias",),
)


def _read(source: Mapping[str, Any], fields: Fields) -> Fields:
    return {"rotary": Rotary(width=size("rotary_dim").get(source))}


def _write(config: Config) -> Fields:
    return {"embd_pdrop": config.dropout, "rotary_dim": same_rotary(config).width or config.sizes["H"]}


FAMILY = Family(
    "gptj",
    "GPTJForCausalLM",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("n_positions"),
        "d_model": size("n_embd"),
        "num_layers": size("n_layer", most=MOST_LAYERS),
        "num_heads": size("n_head"),
        "d_ff": size("n_inner", default=None),
        "norm_eps": number("layer_norm_epsilon"),
        "activation": activation("activation_function"),
        "dropout": rate("resid_pdrop"),
        "attention_dropout": rate("attn_pdrop"),
        "tie_embeddings": flag("tie_word_embeddings", default=False),
    },
    fixed={
        "residual": "parallel",
        "norm": "layernorm",
        "positions": "rotary",
        "qkv_bias": False,
        "head_bias": True,
    },
    read=_read,
    write=_write,
)
