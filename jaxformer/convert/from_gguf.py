"""What a GGUF file holds, in the words of Hugging Face: a config and tensors, as a folder of safetensors has them.

    blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight

Some tensors have another form than Hugging Face's. `llama`: in each head, the rows of q and k are ordered for turning
neighbours (2i, 2i+1), not halves (i, i + H/2). `gemma`: norms multiply by 1 + w, and 1 + w is stored. `gpt2`: the
projections are [out, in].

References:
  https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxformer.convert.files import Header
from jaxformer.convert.gguf import GGUFFile
from jaxformer.convert.gguf_config import ROPE_FACTORS, read_config

Weights = NDArray[np.float32]


def as_folder(file: GGUFFile) -> tuple[dict[str, Any], Mapping[str, Weights]]:
    """Returns what Hugging Face's folder of the same model would hold.

    Biases that an architecture does not have in Hugging Face's form are refused like any unknown tensor.

    Returns:
      config: a dict as in config.json; `tie_word_embeddings` if there is no `output.weight`.
      tensors: by Hugging Face's names. Each is read and dequantised when it is asked for, and not kept: ask once.

    Raises:
      ValueError: an architecture, metadata or tensors that are missing or not understood. A tensor that is not as the
        config says gives it when it is asked for.
    """
    config = read_config(file)
    names = _names(file, config)
    if missing := [name for name in names.values() if name not in file.tensors]:
        raise ValueError(f"{file.path} lacks {len(missing)} tensors: {', '.join(missing[:5])}")
    if unknown := _unknown(file, names):
        raise ValueError(f"{file.path} has {len(unknown)} tensors more than known: {', '.join(unknown[:5])}")
    family = _family(file)
    return config, _Tensors(file, names, lambda name, weights: family.restore(name, weights, config))


def headers(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, Header]:
    """Return what the file says of its tensors, of which none is read.

    Args:
      config: as `gguf_config.read_config` makes it of the file.

    Returns:
      by Hugging Face's names, with the shapes that `as_folder` gives; tensors that have no such name by their own.
    """
    names = {name: own for name, own in _names(file, config).items() if own in file.tensors}
    found = {}
    for name, own in (names | {own: own for own in _unknown(file, names)}).items():
        shape, kind, _, size = file.tensors[own]
        is_turned = _family(file).restore is _inputs_first and name.endswith(_TURNED)
        found[name] = Header(shape[::-1] if is_turned else shape, kind, size)
    return found


class _Tensors(Mapping[str, Weights]):
    """Tensors of a file by other names, restored to another form."""

    def __init__(self, file: GGUFFile, names: Mapping[str, str], restore: Callable[[str, Weights], Weights]):
        self._file, self._names, self._restore = file, names, restore

    def __getitem__(self, name: str) -> Weights:
        return self._restore(name, self._file.tensor(self._names[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# Forms ----------------------------------------------------------------------------------------------------------------

Restore = Callable[[str, Weights, Mapping[str, Any]], Weights]


def _as_stored(name: str, weights: Weights, config: Mapping[str, Any]) -> Weights:
    return weights


def _rotating_halves(name: str, weights: Weights, config: Mapping[str, Any]) -> Weights:
    """Row 2i + j of a head becomes row i + j H/2, for j = 0 and 1."""
    heads = {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}
    if (number := heads.get(name.split("self_attn.")[-1])) is None:
        return weights
    N, H = config[number], config["head_dim"]
    if weights.ndim != 2 or weights.shape[0] != N * H or H % 2:
        raise ValueError(f"{name} has shape {weights.shape}; {N} heads of an even width make {N} * {H} rows")
    return weights.reshape(N, H // 2, 2, -1).swapaxes(1, 2).reshape(weights.shape)


def _norms_from_zero(name: str, weights: Weights, config: Mapping[str, Any]) -> Weights:
    return weights - np.float32(1) if name.endswith("norm.weight") else weights


_TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def _inputs_first(name: str, weights: Weights, config: Mapping[str, Any]) -> Weights:
    return weights.T if name.endswith(_TURNED) else weights


# Names ----------------------------------------------------------------------------------------------------------------


class _Family(NamedTuple):
    """The names of an architecture in Hugging Face's files.

    Args:
      outer: of tensors outside of the layers, but for the head's, which may be missing.
      layer: what the names of a layer's tensors start with, up to its number.
      inner: their ends.
      restore: gives Hugging Face's form of a tensor.
    """

    outer: tuple[str, ...]
    layer: str
    inner: tuple[str, ...]
    restore: Restore


_OUTER = ("model.embed_tokens.weight", "model.norm.weight")
_INNER = (
    *("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    *("self_attn.o_proj.weight", "post_attention_layernorm.weight"),
    *("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
)
_QKV_BIAS = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
_QK_NORM = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_SANDWICH = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
_HEAD = "lm_head.weight"


def _with_biases(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for name in names for part in ("weight", "bias"))


_FAMILIES = {
    "gemma2": _Family(_OUTER, "model.layers.", (*_INNER, *_SANDWICH), _norms_from_zero),
    "gemma3": _Family(_OUTER, "model.layers.", (*_INNER, *_SANDWICH, *_QK_NORM), _norms_from_zero),
    "gpt2": _Family(
        ("transformer.wte.weight", "transformer.wpe.weight", *_with_biases("transformer.ln_f")),
        "transformer.h.",
        _with_biases("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
        _inputs_first,
    ),
    "llama": _Family(_OUTER, "model.layers.", _INNER, _rotating_halves),
    "qwen2": _Family(_OUTER, "model.layers.", (*_INNER, *_QKV_BIAS), _as_stored),
    "qwen3": _Family(_OUTER, "model.layers.", (*_INNER, *_QK_NORM), _as_stored),
}


def _family(file: GGUFFile) -> _Family:
    return _FAMILIES[str(file.metadata["general.architecture"])]


def _names(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, str]:
    """Pairs Hugging Face's names of the config's tensors with the file's, which may or may not be there.

    The `gguf` package knows the file's name for each of Hugging Face's; its tables are asked for layer 0 only, because
    they grow with the number of layers.
    """
    import gguf

    family, num_layers = _family(file), config.get("num_hidden_layers") or config["n_layer"]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[str(file.metadata["general.architecture"])], 1)
    suffixes = (".weight", ".bias")
    names = {name: str(table.get_name(name, suffixes)) for name in family.outer}
    for end in family.inner:
        first = str(table.get_name(f"{family.layer}0.{end}", suffixes))
        names |= {f"{family.layer}{i}.{end}": first.replace(".0.", f".{i}.", 1) for i in range(num_layers)}
    head = table.get_name(_HEAD, suffixes)
    if head in file.tensors:
        names[_HEAD] = str(head)
    return names


def _unknown(file: GGUFFile, names: Mapping[str, str]) -> list[str]:
    known = {ROPE_FACTORS} if _family(file) is _FAMILIES["llama"] else set()  # the config tells of it
    return sorted(set(file.tensors) - set(names.values()) - known)
