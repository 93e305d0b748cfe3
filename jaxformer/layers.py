"""The parts of a block that know nothing of other tokens: projections, norms, feed-forward layers, embeddings.

LayerNorm(x) = (x - mean) / sqrt(var + eps) * scale + bias             (Ba et al. 2016, equation 4)
RMSNorm(x)   = x / sqrt(mean(x^2) + eps) * scale                       (Zhang and Sennrich 2019, equation 4)
MLP(x)       = down(f(up(x))),  gated: down(f(gate(x)) * up(x))        (Vaswani et al. 2017; Shazeer 2020)
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.config import Config
from jaxformer.taps import tap

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


class Projection(nn.Module):
    """A linear map written as one einsum over dimension letters, such as "BTD,DNH->BTNH".

    The kernel's shape is read off its letters. Kernels start normal with variance gain / fan_in, biases at 0.

    Attributes:
      gain: factor on the variance; layers that write to the residual stream pass 1 / (2 L), so that the stream does not
        grow with depth (Radford et al. 2019, section 2.3).
      out_dtype: type of the result; None: the config's compute type.
    """

    config: Config
    equation: str
    bias: bool
    gain: float = 1.0
    out_dtype: str | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        inputs, output = self.equation.split("->")
        x_letters, kernel_letters = inputs.split(",")
        sizes, dtype, param_dtype = self.config.sizes, self.config.dtype, self.config.param_dtype
        contracted = [i for i, letter in enumerate(kernel_letters) if letter in x_letters]
        init = nn.initializers.normal(np.sqrt(self.gain / np.prod([sizes[kernel_letters[i]] for i in contracted])))
        kernel = self.param("kernel", init, [sizes[letter] for letter in kernel_letters], param_dtype)
        out_dtype = jnp.dtype(self.out_dtype or dtype)
        # An einsum sums over the letters by alphabet, H before N, and so copies the kernel of o_proj in every call.
        axes = [x_letters.index(kernel_letters[i]) for i in contracted], contracted
        y = jnp.tensordot(x.astype(dtype), kernel.astype(dtype), axes, preferred_element_type=out_dtype)
        if self.bias:
            letters = [letter for letter in output if letter in kernel_letters]
            bias = self.param("bias", nn.initializers.zeros, [sizes[letter] for letter in letters], param_dtype)
            y = y + bias.astype(out_dtype)
        return y


class Bias(nn.Module):
    """Adds a vector to the last axis, for biases that stand apart from a projection; it starts at 0."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return x + self.param("bias", nn.initializers.zeros, x.shape[-1:], self.config.param_dtype).astype(x.dtype)


class LayerNorm(nn.Module):
    """Normalises the last axis to mean 0 and variance 1, in float32; the bias follows `config.bias`."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        config, width = self.config, x.shape[-1:]
        y = x.astype(jnp.float32)
        y = y - y.mean(axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + config.norm_eps)
        y = y * self.param("scale", nn.initializers.ones, width, config.param_dtype)
        if config.bias:
            y = y + self.param("bias", nn.initializers.zeros, width, config.param_dtype)
        return y.astype(config.dtype)


class RMSNorm(nn.Module):
    """Divides the last axis by its root mean square, in float32."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(axis=-1, keepdims=True) + self.config.norm_eps)
        y = y * self.param("scale", nn.initializers.ones, x.shape[-1:], self.config.param_dtype)
        return y.astype(self.config.dtype)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(config: Config, name: str | None = None) -> nn.Module:
    """Makes the config's norm as a submodule of this name; None: of the attribute that it is assigned to."""
    return NORMS[config.norm](config, name=name)


class MLP(nn.Module):
    """The feed-forward layer, applied to each token alone; taps `pre` (before the activation) and `hidden`."""

    config: Config

    @nn.compact
    def __call__(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config = self.config
        activation = ACTIVATIONS[config.activation]
        project = partial(Projection, config, bias=config.bias)
        up = project("BTD,DF->BTF", name="up_proj")(h)
        if config.gated:
            hidden = activation(tap(self, "pre", project("BTD,DF->BTF", name="gate_proj")(h))) * up
        else:
            hidden = activation(tap(self, "pre", up))
        gain = 1 / (2 * config.num_layers)
        return project("BTF,FD->BTD", gain=gain, name="down_proj")(tap(self, "hidden", hidden))


class Embed(nn.Module):
    """A table of vectors, [rows E]; the rows start normal with standard deviation E^-0.5."""

    config: Config
    rows: int

    def setup(self) -> None:
        width = self.config.sizes["E"]
        init = nn.initializers.normal(width**-0.5)
        self.embedding = self.param("embedding", init, (self.rows, width), self.config.param_dtype)

    def __call__(self, index: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Returns the rows of these numbers; a number outside of the table gives NaN, never another row."""
        table = jnp.asarray(self.embedding)  # parameters may be NumPy arrays, as read from a file
        rows = table.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        return rows.astype(self.config.dtype)

    def attend(self, x: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Returns the float32 products of x with every row: the logits of a tied output head."""
        table = self.embedding.astype(self.config.dtype)
        return jnp.einsum("BTE,VE->BTV", x, table, preferred_element_type=jnp.float32)
