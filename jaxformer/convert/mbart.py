"""mBART (Liu et al. 2020): BART with norms before the sublayers and after the last."""

from jaxformer.convert import bart
from jaxformer.convert.family import Family

FAMILY = Family(
    "mbart",
    "MBartForConditionalGeneration",
    bart.NAMES,
    keys=bart.KEYS,
    fixed=bart.FIXED | {"residual": "pre", "positions": "learned", "embed_norm": True},
    only={
        "is_encoder_decoder": True,
        "normalize_before": True,
        "normalize_embedding": True,
        "add_final_layer_norm": True,
        "static_position_embeddings": False,
    },
    read=bart.read,
    write=bart.writes(pad_token_id=1, decoder_start_token_id=2),
)
