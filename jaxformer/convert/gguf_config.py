"""The metadata of a GGUF file as the config.json of the same model.

    <architecture>.embedding_length -> hidden_size,   .block_count -> num_hidden_layers,   .rope.freq_base -> rope_theta

A GGUF file leaves out what its architecture implies (activations, which layers have a window); a config.json says it.
Every key of the architecture that a file holds must have been read in the end: an unknown one may change the model.

References:
  https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable
from math import isfinite, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxformer.convert.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one a pair of lanes: a setting that is stored as a tensor."""

_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


class Fields:
    """Typed reads of the keys of a file's architecture, and which of them nobody has read.

    Raises:
      ValueError: no architecture, or one that is not known.
    """

    def __init__(self, file: GGUFFile):
        self.file = file
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in CONFIGS:
            raise ValueError(f"{file.path}: general.architecture is {name!r}; known are {', '.join(CONFIGS)}")
        self.architecture = name
        self.unread = {key for key in file.metadata if key.startswith(f"{self.architecture}.")}

    def has(self, name: str) -> bool:
        """Returns whether the file holds this key of its architecture."""
        return f"{self.architecture}.{name}" in self.file.metadata

    def size(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1.

        Args:
          name: the key without its architecture.
          default: in place of a missing key; None: it must be there.
        """
        value = self._read(name, default)
        if type(value) is not int or value < 1:
            raise self._error(name, f"is {value!r} and not a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive number: the shortest decimal that gives the file's float32 (1e-5, not 9.99999975e-6)."""
        value = self._read(name, default)
        if type(value) not in (int, float) or not isfinite(value) or value <= 0:
            raise self._error(name, f"is {value!r} and not a positive number")
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if single == value else float(value)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Returns one of the choices, of which the first stands for a missing key."""
        value = self._read(name, choices[0])
        if not isinstance(value, str) or value not in choices:
            raise self._error(name, f"is {value!r}; known are {', '.join(choices)}")
        return value

    def same(self, name: str, wanted: int) -> None:
        """Refuses a key that is there and says something else."""
        if (value := self.size(name, wanted)) != wanted:
            raise self._error(name, f"is {value}, but can only be {wanted} here")

    def check_all_read(self) -> None:
        """Refuses a file that says more than was asked."""
        if self.unread:
            raise ValueError(
                f"{self.file.path} holds {', '.join(sorted(self.unread)[:5])}, which nothing here understands; "
                "without it the model might be another one"
            )

    def _read(self, name: str, default: Any) -> Any:
        key = f"{self.architecture}.{name}"
        self.unread.discard(key)
        value = self.file.metadata.get(key, default)
        if value is None:
            raise self._error(name, "is missing")
        return value

    def _error(self, name: str, what: str) -> ValueError:
        return ValueError(f"{self.file.path}: {self.architecture}.{name} {what}")


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Says a file's metadata in the words of a config.json.

    The flat keys of Hugging Face's hub files are written (`rope_theta`, `rope_scaling`), and `layer_types` where layers
    differ. A window that the file does not hold is not made up: Mistral 7B 0.1 comes out as `llama`, without one.

    Raises:
      ValueError: metadata that are missing, of another type or out of range, or that are not understood; each named.
    """
    fields = Fields(file)
    config = CONFIGS[fields.architecture](fields)
    config["vocab_size"] = _vocab_size(fields)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields.check_all_read()
    for name, ours in _IDS.items():
        key = f"tokenizer.ggml.{ours}"
        if key in file.metadata:
            value = file.metadata[key]
            if type(value) is not int or value < 0:
                raise ValueError(f"{file.path}: {key} is {value!r} and not the id of a token")
            config[name] = value
    return config


def _vocab_size(fields: Fields) -> int:
    """The rows of the embeddings; what the metadata say is optional, and must agree."""
    info = fields.file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise ValueError(f"{fields.file.path} has no table token_embd.weight; it holds no language model")
    fields.same("vocab_size", info.shape[0])
    return info.shape[0]


def _num_layers(fields: Fields) -> int:
    """Checked against the file first, because lists of that length are made."""
    number = fields.size("block_count")
    if number > len(fields.file.tensors):
        raise ValueError(
            f"{fields.file.path}: {fields.architecture}.block_count is {number}, but there are only "
            f"{len(fields.file.tensors)} tensors"
        )
    return number


# One function for each architecture -----------------------------------------------------------------------------------


def _rotary_decoder(fields: Fields) -> dict[str, Any]:
    """What the architectures with rotary positions and RMSNorm have in common."""
    width, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    if width % heads and not fields.has("attention.key_length"):
        raise ValueError(
            f"{fields.file.path}: {fields.architecture}.attention.key_length is missing, and embedding_length={width} "
            f"is not a multiple of attention.head_count={heads}"
        )
    d_head = fields.size("attention.key_length", max(1, width // heads))
    fields.same("attention.value_length", d_head)
    fields.same("rope.dimension_count", d_head)
    return {
        "hidden_size": width,
        "num_hidden_layers": _num_layers(fields),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": d_head,
        "intermediate_size": fields.size("feed_forward_length"),
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _llama(fields: Fields) -> dict[str, Any]:
    config = _rotary_decoder(fields) | {"model_type": "llama", "hidden_act": "silu"}
    config["rope_theta"] = fields.number("rope.freq_base", 10000.0)
    scaling = _rope_scaling(fields, ("none", "linear", "yarn"))
    if ROPE_FACTORS in fields.file.tensors:
        if scaling:
            raise ValueError(f"{fields.file.path} scales its rotary positions by rope.scaling and by {ROPE_FACTORS}")
        scaling = _by_factors(fields.file, config["rope_theta"], config["head_dim"])
    return config | {"rope_scaling": scaling, "attention_bias": False, "mlp_bias": False}


def _qwen(fields: Fields) -> dict[str, Any]:
    config = _rotary_decoder(fields) | {"model_type": fields.architecture, "hidden_act": "silu"}
    config["rope_theta"] = fields.number("rope.freq_base")
    config["rope_scaling"] = _rope_scaling(fields, ("none", "linear", "yarn"))
    return config | {"use_sliding_window": False}


def _gemma(fields: Fields, *, layers_of_27b: int) -> dict[str, Any]:
    config = _rotary_decoder(fields) | {"hidden_activation": "gelu_pytorch_tanh"}
    config["sliding_window"] = fields.size("attention.sliding_window")
    # No key says the scale of the scores. Only the model of 27 billion weights scales by another width than head_dim.
    is_27b = config["num_hidden_layers"] == layers_of_27b
    by_width = max(1, config["hidden_size"] // config["num_attention_heads"])
    config["query_pre_attn_scalar"] = by_width if is_27b else config["head_dim"]
    return config


def _gemma2(fields: Fields) -> dict[str, Any]:
    config = _gemma(fields, layers_of_27b=46) | {"model_type": "gemma2"}
    config["rope_theta"] = fields.number("rope.freq_base", 10000.0)
    config["attn_logit_softcapping"] = fields.number("attn_logit_softcapping")
    config["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    return config | {"layer_types": _layer_types(config["num_hidden_layers"], 2)}


def _gemma3(fields: Fields) -> dict[str, Any]:
    config = _gemma(fields, layers_of_27b=62) | {"model_type": "gemma3_text"}
    config["rope_theta"] = fields.number("rope.freq_base")
    config["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 10000.0)
    config["rope_scaling"] = _rope_scaling(fields, ("none", "linear"))
    if fields.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    period = fields.size("attention.sliding_window_pattern", 6)
    return config | {"layer_types": _layer_types(config["num_hidden_layers"], period)}


def _gpt2(fields: Fields) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": fields.size("embedding_length"),
        "n_layer": _num_layers(fields),
        "n_head": fields.size("attention.head_count"),
        "n_inner": fields.size("feed_forward_length"),
        "n_positions": fields.size("context_length"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


CONFIGS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
}
"""How to read each architecture, by the name that the file gives it."""


def _layer_types(number: int, period: int) -> list[str]:
    """The last layer of each period sees everything, those before it a window."""
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(number)]


# Rotary positions -----------------------------------------------------------------------------------------------------


def _rope_scaling(fields: Fields, kinds: tuple[str, ...]) -> dict[str, Any] | None:
    kind = fields.choice("rope.scaling.type", kinds)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.size("rope.scaling.original_context_length")
    return scaling


def _by_factors(file: GGUFFile, theta: float, d_head: int) -> dict[str, Any] | None:
    """Finds the published setting that gives the stored divisors: LLaMA 3's, which differ in the largest divisor."""
    factors = file.tensor(ROPE_FACTORS)
    if (factors == 1).all():
        return None
    factor = float(factors.max())
    if factors.shape != (d_head // 2,) or not np.allclose(factors, _llama3_factors(theta, d_head, factor), rtol=1e-4):
        raise ValueError(
            f"{file.path}: {ROPE_FACTORS} are not the factors of LLaMA 3.1 and later for rope_theta={theta} and "
            f"head_dim={d_head}; load the model's safetensors, where the scaling stands in config.json"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3_factors(theta: float, d_head: int, factor: float) -> NDArray[np.float64]:
    """Pairs that turn more than 4 times in 8192 tokens keep their speed; below once, it is divided by the factor."""
    with np.errstate(all="ignore"):  # whatever a file may hold, the comparison with these says no
        turns = 8192 / (2 * pi) * theta ** (-np.arange(0, d_head, 2) / d_head)
        kept = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        return 1 / (kept + (1 - kept) / factor)
