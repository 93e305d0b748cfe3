"""From final hidden states to what a model returns: logits of the vocabulary, a vector of the text, classes.

lm          logits = scale * W x + b          W: the embedding matrix again if tied (Press and Wolf 2017)
masked_lm   logits = scale * W norm(f(U x + c)) + b                             (Devlin et al. 2019, section 3.1)
pooler      tanh(U x + c) of the first token;   classifier: W pooler + b
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.attention import softcapped
from jaxformer.config import Config
from jaxformer.embeddings import Embeddings
from jaxformer.layers import ACTIVATIONS, Projection, make_norm


class LMHead(nn.Module):
    """Logits of every token id, in float32.

    Attributes:
      rows: number of token ids.
    """

    config: Config
    rows: int

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], embed: Embeddings) -> Float[Array, "B T V"]:
        config = self.config
        if config.head == "masked_lm":
            x = Projection(config, "BTD,DE->BTE", bias=config.bias, name="transform_proj")(x)
            x = make_norm(config, "transform_norm")(ACTIVATIONS[config.activation](x))
        if config.tie_embeddings:
            logits = embed.attend(x)
        else:
            width = x.shape[-1]
            init = nn.initializers.normal(width**-0.5)
            kernel = self.param("kernel", init, (width, self.rows), config.param_dtype).astype(config.dtype)
            logits = jnp.einsum("BTE,EV->BTV", x, kernel, preferred_element_type=jnp.float32)
        if config.logit_scale is not None:
            logits = logits * config.logit_scale
        if config.head_bias:
            logits = logits + self.param("bias", nn.initializers.zeros, (self.rows,), config.param_dtype)
        return softcapped(logits, config.logit_softcap)


class Pooler(nn.Module):
    """A vector of the whole text, made of the hidden state of its first token (the one at position 0)."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]) -> Float[Array, "B O"]:
        first = jnp.broadcast_to((positions == 0).argmax(axis=1), x.shape[:1])
        x = jnp.take_along_axis(x, first[:, None, None], axis=1)
        return jnp.tanh(Projection(self.config, "BTD,DO->BTO", bias=True, name="pooler_proj")(x))[:, 0]


class Classifier(nn.Module):
    """Float32 logits of classes: of the text by its pooler, or of each token."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]) -> Float[Array, "B *T Y"]:
        config = self.config
        if config.head == "classifier":
            x = Pooler(config, name="pooler")(x, positions)[:, None]
        x = nn.Dropout(config.dropout, deterministic=not self.has_rng("dropout"))(x)
        y = Projection(config, "BTD,DY->BTY", bias=True, out_dtype="float32", name="label_proj")(x)
        return y[:, 0] if config.head == "classifier" else y


def mean_pooled(x: Float[Array, "B T D"], positions: Int[Array, "#B T"]) -> Float[Array, "B D"]:
    """Returns the mean of the hidden states of real tokens, float32: the usual sentence embedding.

    A row without any token gets 0. Normalise it for cosines (Reimers and Gurevych 2019, "Sentence-BERT", section 3).
    """
    real = jnp.broadcast_to(positions >= 0, x.shape[:2])[..., None]
    total = jnp.where(real, x.astype(jnp.float32), 0).sum(axis=1)
    return total / jnp.maximum(real.sum(axis=1), 1)
