"""BART (Lewis et al. 2020): post-norm stacks whose embeddings are normalised, learned positions from row 2 on."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxformer.config import Config
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, activation, flag, rate, size
from jaxformer.convert.names import ENCODER_LAYER, LAYER, Names, Rule, norm, projection
from jaxformer.convert.opt import FROM_ROW_2


def _attention(file: str, params: str) -> Iterator[Rule]:
    for name in "qkv":
        yield from projection(f"{file}.{name}_proj", f"{params}/{name}_proj", "(N H) D -> D N H", "(N H) -> N H")
    yield from projection(f"{file}.out_proj", f"{params}/o_proj", "D (N H) -> N H D", "D")


def stack(file: str, params: str, embed: str) -> Iterator[Rule]:
    """Yield the rules of one stack: of what is added to its tokens, its layers, and a final norm.

    Args:
      file: what the names of its tensors begin with.
      params: path of a layer.
      embed: path of the embeddings.
    """
    yield Rule(f"{file}.embed_positions.weight", f"{embed}/position/embedding", "P D", FROM_ROW_2)
    yield from norm(f"{file}.layernorm_embedding", f"{embed}/norm")
    for name, here in {"self_attn": "attn", "encoder_attn": "cross"}.items():
        yield from _attention(f"{file}.layers.{{i}}.{name}", f"{params}/{here}")
        yield from norm(f"{file}.layers.{{i}}.{name}_layer_norm", f"{params}/{here}_norm")
    yield from projection(f"{file}.layers.{{i}}.fc1", f"{params}/mlp/up_proj", "F D -> D F", "F")
    yield from projection(f"{file}.layers.{{i}}.fc2", f"{params}/mlp/down_proj", "D F -> F D", "D")
    yield from norm(f"{file}.layers.{{i}}.final_layer_norm", f"{params}/mlp_norm")
    yield from norm(f"{file}.layer_norm", f"{params.partition('/')[0]}/final_norm")


NAMES = Names(
    (
        Rule("model.shared.weight", "embed/token/embedding", "V D"),
        *stack("model.encoder", ENCODER_LAYER, "embed"),
        *stack("model.decoder", LAYER, "target_embed"),
        Rule("lm_head.weight", "lm_head/kernel", "V D -> D V"),
        Rule("final_logits_bias", "lm_head/bias", "1 V -> V"),
    ),
    prefix="model.",
    zeros_without_head=("lm_head/bias",),
    embeddings=("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
)

KEYS = {
    "vocab_size": size("vocab_size"),
    "max_len": size("max_position_embeddings"),
    "d_model": size("d_model"),
    "num_layers": size("encoder_layers", most=MOST_LAYERS),
    "num_decoder_layers": size("decoder_layers", most=MOST_LAYERS),
    "num_heads": size("encoder_attention_heads"),
    "d_ff": size("encoder_ffn_dim"),
    "decoder_d_ff": size("decoder_ffn_dim"),
    "activation": activation("activation_function"),
    "embed_scale": flag("scale_embedding", default=False),
    "dropout": rate("dropout"),
    "attention_dropout": rate("attention_dropout"),
    "tie_embeddings": flag("tie_word_embeddings", default=True),
}
FIXED = {
    "architecture": "encoder_decoder",
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "head_bias": True,
}


def read(source: Mapping[str, Any], fields: Fields) -> Fields:
    """Refuse stacks that differ in their heads."""
    heads = size("decoder_attention_heads").get(source)
    if heads != fields["num_heads"]:
        raise ValueError(
            f"decoder_attention_heads={heads} differs from encoder_attention_heads={fields['num_heads']}; stacks with "
            "different numbers of heads are not supported"
        )
    return {}


def writes(**ends: int) -> Callable[[Config], Fields]:
    """Return what writes the keys that no field has, among them ids that the classes of the family presume."""
    return lambda config: {"is_encoder_decoder": True, "decoder_attention_heads": config.num_heads, **ends}


FAMILY = Family(
    "bart",
    "BartForConditionalGeneration",
    NAMES,
    keys=KEYS,
    fixed=FIXED | {"residual": "post", "positions": "learned", "embed_norm": True},
    only={
        "is_encoder_decoder": True,
        "normalize_before": False,
        "normalize_embedding": True,
        "add_final_layer_norm": False,
        "static_position_embeddings": False,
    },
    read=read,
    write=writes(pad_token_id=1, decoder_start_token_id=2),
)
