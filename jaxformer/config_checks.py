"""What must hold of a `Config`; the messages name the value, the requirement and the remedy."""

from typing import Any

from jaxformer.checks import check_flag, check_positive, check_rate, check_size
from jaxformer.rotary import Rotary

Config = Any  # the class imports this file

_OPTIONAL_SIZES = (
    *("num_kv_heads", "d_head", "d_ff", "d_embed", "num_decoder_layers", "decoder_d_ff", "num_distinct_layers"),
    *("target_vocab_size", "num_labels", "num_token_types"),
)
_SIZES = (
    *("vocab_size", "max_len", "d_model", "num_layers", "num_heads", "relative_buckets", "relative_reach"),
    *_OPTIONAL_SIZES,
)
_FLAGS = ("embed_norm", "qk_norm", "embed_scale", "gated", "bias", "tie_embeddings", "head_bias", "scan_layers")
_OPTIONAL_FLAGS = ("final_norm", "qkv_bias")
_OPTIONAL_NUMBERS = ("attention_scale", "softcap", "logit_scale", "logit_softcap")
_RATES = ("dropout", "attention_dropout")


def check_positions(config: Config) -> None:
    """Refuses positions that the widths of the model do not allow."""
    width = config.sizes["H"]
    turned = {width if rotary.width is None else rotary.width for rotary in _entries(config.rotary)}
    if config.positions == "rotary":
        if any(number % 2 for number in turned):
            what = "rotary.width" if _entries(config.rotary)[0].width else "d_head"
            raise ValueError(f"rotary positions turn pairs of lanes, but {what}={max(turned)} is odd; make it even")
        if len(turned) > 1 or max(turned) > width:
            raise ValueError(
                f"rotary.width={sorted(turned)}: all layers turn the same number of lanes, at most d_head={width}"
            )
    if config.positions == "relative" and (
        config.relative_buckets % 2
        or config.relative_buckets < 4
        or config.relative_reach <= config.relative_buckets // 2
    ):
        raise ValueError(
            f"relative_buckets={config.relative_buckets} must be even and at least 4, and relative_reach="
            f"{config.relative_reach} beyond the half of them, which counts distances one by one"
        )
    name, lanes = ("d_model", config.d_model) if config.d_embed is None else ("d_embed", config.d_embed)
    if config.positions in ("sinusoidal", "sinusoidal_halves") and lanes % 2:
        raise ValueError(f"sinusoidal positions fill pairs of lanes, but {name}={lanes} is odd; make it even")


def check_arrangement(config: Config) -> None:
    """Refuses fields of one arrangement or head in another."""
    if config.architecture != "encoder" and config.head != "lm":
        raise ValueError(f"head={config.head!r} is for an encoder; a model with a decoder has head='lm'")
    if (config.head in ("classifier", "token_classifier")) != (config.num_labels is not None):
        raise ValueError(
            f"head={config.head!r} with num_labels={config.num_labels}: only classifiers have it, and must"
        )
    if config.architecture != "encoder_decoder":
        for name in ("num_decoder_layers", "decoder_d_ff", "target_vocab_size"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name}={getattr(config, name)} is for architecture='encoder_decoder'")
    distinct = config.num_distinct_layers
    for name in ("num_layers", "num_decoder_layers"):
        layers = getattr(config, name)
        if distinct is not None and layers is not None and layers % distinct:
            raise ValueError(
                f"{name}={layers} is not a multiple of num_distinct_layers={distinct}; each serves as often"
            )
    if config.d_embed is not None and config.tie_embeddings and config.head == "lm":
        raise ValueError(f"d_embed={config.d_embed}: a head tied to narrower embeddings needs head='masked_lm'")


def check_types(config: Config) -> None:
    """Refuses values that are not of their field's kind."""
    for name in _SIZES:
        check_size(name, getattr(config, name), optional=name in _OPTIONAL_SIZES)
    for name in (*_FLAGS, *_OPTIONAL_FLAGS):
        check_flag(name, getattr(config, name), optional=name in _OPTIONAL_FLAGS)
    for name in ("norm_eps", *_OPTIONAL_NUMBERS):
        check_positive(name, getattr(config, name), optional=name in _OPTIONAL_NUMBERS)
    for name in _RATES:
        check_rate(name, getattr(config, name))
    if not isinstance(config.attention, str):
        raise ValueError(f"attention={config.attention!r} must be the name of an implementation, or 'auto'")
    for name in ("window", "rotary"):
        if getattr(config, name) == ():
            raise ValueError(f"{name}=() is no pattern; give one entry for each layer that it repeats over")
    for window in _entries(config.window):
        check_size("window", window, optional=True)
    if not all(isinstance(rotary, Rotary) for rotary in _entries(config.rotary)):
        raise ValueError(f"rotary={config.rotary!r} must be a Rotary, or a tuple of them")


def _entries(pattern: Any) -> tuple[Any, ...]:
    """Returns all entries of a pattern over layers, also those beyond the number of layers."""
    return pattern if isinstance(pattern, tuple) else (pattern,)
