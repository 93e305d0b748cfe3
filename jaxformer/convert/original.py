"""The original Transformer (Vaswani et al. 2017) as a state dict of PyTorch's `nn.Transformer`.

Such a module holds the stacks alone; what its owner put around them goes by names of their own, which `names` takes.
It ends each stack with a norm, also where layers are post-norm: the config then says `final_norm=True`.

    names = original.names("transformer", source="src_emb", target="tgt_emb", head="generator")
    params = original.params(config, load_torch("model.pt"), names)
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import Config
from jaxformer.convert.names import ENCODER_LAYER, LAYER, Array, Names, Rule, fused, norm, projection
from jaxformer.convert.tensors import to_params, to_tensors


def _attention(file: str, params: str) -> Iterator[Rule]:
    qkv = [f"{params}/{name}_proj" for name in "qkv"]
    # The tensors of the fused projection are no module's own: in_proj_weight, not in_proj.weight.
    for rule in fused("in_proj", qkv, "(M N H) D -> M D N H", "(M N H) -> M N H"):
        yield Rule(f"{file}.{rule.file.replace('.', '_')}", rule.params, rule.pattern)
    yield from projection(f"{file}.out_proj", f"{params}/o_proj", "D (N H) -> N H D", "D")


def _stack(file: str, params: str, sublayers: Mapping[str, str]) -> Iterator[Rule]:
    for i, (here, name) in enumerate(sublayers.items(), 1):
        if name:
            yield from _attention(f"{file}.layers.{{i}}.{name}", f"{params}/{here}")
        yield from norm(f"{file}.layers.{{i}}.norm{i}", f"{params}/{here}_norm")
    yield from projection(f"{file}.layers.{{i}}.linear1", f"{params}/mlp/up_proj", "F D -> D F", "F")
    yield from projection(f"{file}.layers.{{i}}.linear2", f"{params}/mlp/down_proj", "D F -> F D", "D")
    yield from norm(f"{file}.norm", f"{params.partition('/')[0]}/final_norm")


def names(
    transformer: str,
    *,
    source: str,
    target: str,
    head: str,
    positions: tuple[str, str] | None = None,
    buffers: str = "",
) -> Names:
    """Return the names of all tensors of a model around an `nn.Transformer`.

    Args:
      transformer: name of that module.
      source, target: names of the two `nn.Embedding`s of tokens; one name for both, if there is one.
      head: name of the `nn.Linear` that makes logits.
      positions: names of the two `nn.Embedding`s of positions, of source and target, if they are learned.
      buffers: regular expression of the names of other tensors, such as sinusoids, which are ignored.
    """
    rules = [Rule(f"{source}.weight", "embed/token/embedding", "V D")]
    if target != source:
        rules.append(Rule(f"{target}.weight", "target_embed/token/embedding", "V D"))
    for name, embed in zip(positions or (), ("embed", "target_embed"), strict=False):
        rules.append(Rule(f"{name}.weight", f"{embed}/position/embedding", "P D"))
    rules += _stack(f"{transformer}.encoder", ENCODER_LAYER, {"attn": "self_attn", "mlp": ""})
    rules += _stack(f"{transformer}.decoder", LAYER, {"attn": "self_attn", "cross": "multihead_attn", "mlp": ""})
    rules += projection(head, "lm_head", "V D -> D V", "V")
    return Names(tuple(rules), buffers=buffers)


def params(config: Config, tensors: Mapping[str, Array], names: Names) -> dict[str, Any]:
    """Return the float32 parameters of a model, in the layout of a loop over layers, from a state dict.

    Args:
      config: an encoder-decoder, which such a file does not describe: above all its heads, and the norm's epsilon.
      tensors: by name, as NumPy arrays; `convert.torch_file.load_torch` reads them from a file.

    Raises:
      ValueError: a tensor that is missing, that has no place, that is misshapen or holds NaN.
    """

    def put(path: str, array: Array) -> jax.Array:
        return jnp.asarray(np.array(array, np.float32, order="C"))

    return to_params(names, config, tensors, put)


def state_dict(config: Config, params: Mapping[str, Any], names: Names) -> dict[str, Array]:
    """Return the tensors of a state dict from the parameters of a model; the inverse of `params`.

    Raises:
      ValueError: parameters that are not those of the config.
    """
    return to_tensors(names, config, params)
