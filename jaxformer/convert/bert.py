"""BERT (Devlin et al. 2019): a post-norm encoder whose embeddings are normalised, with types of tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxformer.convert.family import Family
from jaxformer.convert.keys import MOST_LAYERS, Fields, activation, number, rate, size
from jaxformer.convert.names import ENCODER_LAYER, Change, Names, Rule, norm, projection


def embeddings(file: str, letter: str = "D", positions: Change | None = None) -> Iterator[Rule]:
    """Yield the rules of the embeddings.

    Args:
      file: what the names of all tensors begin with.
      letter: of their width.
      positions: what is done to the table of positions.
    """
    yield Rule(f"{file}.embeddings.word_embeddings.weight", "embed/token/embedding", f"V {letter}")
    yield Rule(f"{file}.embeddings.position_embeddings.weight", "embed/position/embedding", f"P {letter}", positions)
    yield Rule(f"{file}.embeddings.token_type_embeddings.weight", "embed/type/embedding", f"A {letter}")
    yield from norm(f"{file}.embeddings.LayerNorm", "embed/norm", letter)


def encoder(file: str, positions: Change | None = None) -> Iterator[Rule]:
    """Yield the rules of embeddings and layers, whose names begin with `file`; positions: as of `embeddings`."""
    yield from embeddings(file, positions=positions)
    layer = f"{file}.encoder.layer.{{i}}"
    for theirs, ours in {"query": "q", "key": "k", "value": "v"}.items():
        at = f"{ENCODER_LAYER}/attn/{ours}_proj"
        yield from projection(f"{layer}.attention.self.{theirs}", at, "(N H) D -> D N H", "(N H) -> N H")
    yield from projection(f"{layer}.attention.output.dense", f"{ENCODER_LAYER}/attn/o_proj", "D (N H) -> N H D", "D")
    yield from norm(f"{layer}.attention.output.LayerNorm", f"{ENCODER_LAYER}/attn_norm")
    yield from projection(f"{layer}.intermediate.dense", f"{ENCODER_LAYER}/mlp/up_proj", "F D -> D F", "F")
    yield from projection(f"{layer}.output.dense", f"{ENCODER_LAYER}/mlp/down_proj", "D F -> F D", "D")
    yield from norm(f"{layer}.output.LayerNorm", f"{ENCODER_LAYER}/mlp_norm")


OLD_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
TOKEN_CLASSES = projection("classifier", "classifier/label_proj", "Y D -> D Y", "Y")
NAMES = Names(
    (
        *encoder("bert"),
        *projection("bert.pooler.dense", "pooler/pooler_proj", "O D -> D O", "O"),
        *projection("bert.pooler.dense", "classifier/pooler/pooler_proj", "O D -> D O", "O"),
        *TOKEN_CLASSES,
        *projection("cls.predictions.transform.dense", "lm_head/transform_proj", "E D -> D E", "E"),
        *norm("cls.predictions.transform.LayerNorm", "lm_head/transform_norm", "E"),
        Rule("cls.predictions.decoder.weight", "lm_head/kernel", "V E -> E V"),
        Rule("cls.predictions.bias", "lm_head/bias", "V"),
    ),
    prefix="bert.",
    # Besides the buffer: what belongs to a head other than the one that is asked for, and a second name of a bias.
    buffers=r"embeddings\.position_ids|pooler\.dense\.\w+|cls\.(?!predictions\.decoder\.weight).*|classifier\.\w+",
    old_endings=OLD_ENDINGS,
)

KEYS = {
    "vocab_size": size("vocab_size"),
    "d_model": size("hidden_size"),
    "num_layers": size("num_hidden_layers", most=MOST_LAYERS),
    "num_heads": size("num_attention_heads"),
    "d_ff": size("intermediate_size"),
    "num_token_types": size("type_vocab_size"),
    "activation": activation("hidden_act"),
    "norm_eps": number("layer_norm_eps"),
    "dropout": rate("hidden_dropout_prob"),
    "attention_dropout": rate("attention_probs_dropout_prob"),
}
FIXED = {"architecture": "encoder", "residual": "post", "norm": "layernorm", "positions": "learned", "embed_norm": True}
# Untied, two tensors would claim to be the bias of the logits.
ONLY = {"is_decoder": False, "position_embedding_type": "absolute", "tie_word_embeddings": True}


def read(source: Mapping[str, Any], fields: Fields) -> Fields:
    """Say that the logits of tokens have a bias."""
    return {"head_bias": fields["head"] == "masked_lm"}


FAMILY = Family(
    "bert",
    "BertForMaskedLM",
    NAMES,
    keys=KEYS | {"max_len": size("max_position_embeddings")},
    fixed=FIXED,
    only=ONLY,
    read=read,
    heads={
        "masked_lm": ("BertForMaskedLM", "BertForPreTraining"),
        "pooler": ("BertModel",),
        "classifier": ("BertForSequenceClassification",),
        "token_classifier": ("BertForTokenClassification",),
        "none": ("BertModel",),
    },
)
