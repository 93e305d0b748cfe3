"""BLOOM (BigScience Workshop 2022): ALiBi, normalised embeddings, q, k and v in one tensor, head by head."""

from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, flag, number, rate, size
from jaxformer.convert.names import LAYER, QKV, Names, Rule, fused, norm, projection

FILE = "transformer.h.{i}"

NAMES = Names(
    (
        Rule("transformer.word_embeddings.weight", "embed/token/embedding", "V D"),
        *norm("transformer.word_embeddings_layernorm", "embed/norm"),
        *norm(f"{FILE}.input_layernorm", f"{LAYER}/attn_norm"),
        *fused(f"{FILE}.self_attention.query_key_value", QKV, "(N M H) D -> M D N H", "(N M H) -> M N H"),
        *projection(f"{FILE}.self_attention.dense", f"{LAYER}/attn/o_proj", "D (N H) -> N H D", "D"),
        *norm(f"{FILE}.post_attention_layernorm", f"{LAYER}/mlp_norm"),
        *projection(f"{FILE}.mlp.dense_h_to_4h", f"{LAYER}/mlp/up_proj", "F D -> D F", "F"),
        *projection(f"{FILE}.mlp.dense_4h_to_h", f"{LAYER}/mlp/down_proj", "D F -> F D", "D"),
        *norm("transformer.ln_f", "decoder/final_norm"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
    ),
    prefix="transformer.",
)

FAMILY = Family(
    "bloom",
    "BloomForCausalLM",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        # No length bounds ALiBi; the published models were trained with 2048.
        "max_len": size("seq_length", default=2048),
        "d_model": size("hidden_size", "n_embed"),
        "num_layers": size("n_layer", "num_hidden_layers", most=MOST_LAYERS),
        "num_heads": size("n_head", "num_attention_heads"),
        "norm_eps": number("layer_norm_epsilon"),
        "dropout": rate("hidden_dropout"),
        "attention_dropout": rate("attention_dropout"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed={
        "residual": "pre",
        "norm": "layernorm",
        "positions": "alibi",
        "embed_norm": True,
        "activation": "gelu_tanh",
    },
    only={"apply_residual_connection_post_layernorm": False},
)
