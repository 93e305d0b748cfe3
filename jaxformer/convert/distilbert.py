"""DistilBERT (Sanh et al. 2019): BERT without types of tokens and pooler, under names of its own."""

from collections.abc import Iterator

from jaxformer.convert import bert
from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, activation, rate, size
from jaxformer.convert.names import ENCODER_LAYER, Names, Rule, norm, projection

LAYER = "distilbert.transformer.layer.{i}"


def _layers() -> Iterator[Rule]:
    for name in "qkv":
        at = f"{ENCODER_LAYER}/attn/{name}_proj"
        yield from projection(f"{LAYER}.attention.{name}_lin", at, "(N H) D -> D N H", "(N H) -> N H")
    yield from projection(f"{LAYER}.attention.out_lin", f"{ENCODER_LAYER}/attn/o_proj", "D (N H) -> N H D", "D")
    yield from norm(f"{LAYER}.sa_layer_norm", f"{ENCODER_LAYER}/attn_norm")
    yield from projection(f"{LAYER}.ffn.lin1", f"{ENCODER_LAYER}/mlp/up_proj", "F D -> D F", "F")
    yield from projection(f"{LAYER}.ffn.lin2", f"{ENCODER_LAYER}/mlp/down_proj", "D F -> F D", "D")
    yield from norm(f"{LAYER}.output_layer_norm", f"{ENCODER_LAYER}/mlp_norm")


NAMES = Names(
    (
        Rule("distilbert.embeddings.word_embeddings.weight", "embed/token/embedding", "V D"),
        Rule("distilbert.embeddings.position_embeddings.weight", "embed/position/embedding", "P D"),
        *norm("distilbert.embeddings.LayerNorm", "embed/norm"),
        *_layers(),
        *bert.TOKEN_CLASSES,
        *projection("vocab_transform", "lm_head/transform_proj", "E D -> D E", "E"),
        *norm("vocab_layer_norm", "lm_head/transform_norm", "E"),
        Rule("vocab_projector.weight", "lm_head/kernel", "V E -> E V"),
        Rule("vocab_projector.bias", "lm_head/bias", "V"),
    ),
    prefix="distilbert.",
    # Besides the buffer: what belongs to a head other than the one that is asked for.
    buffers=r"embeddings\.position_ids|vocab_(?!projector\.weight)\w+\.\w+|(pre_)?classifier\.\w+|qa_outputs\.\w+",
)

FAMILY = Family(
    "distilbert",
    "DistilBertForMaskedLM",
    NAMES,
    keys={
        "vocab_size": size("vocab_size"),
        "max_len": size("max_position_embeddings"),
        "d_model": size("dim"),
        "num_layers": size("n_layers", most=MOST_LAYERS),
        "num_heads": size("n_heads"),
        "d_ff": size("hidden_dim"),
        "activation": activation("activation"),
        "dropout": rate("dropout"),
        "attention_dropout": rate("attention_dropout"),
    },
    fixed=bert.FIXED | {"norm_eps": 1e-12},
    only={"tie_word_embeddings": True},
    read=bert.read,
    heads={
        "masked_lm": ("DistilBertForMaskedLM",),
        "token_classifier": ("DistilBertForTokenClassification",),
        "none": ("DistilBertModel",),
    },
)
