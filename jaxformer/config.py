"""Everything that chooses a model, as one frozen dataclass of strings and numbers.

No arrays and no behaviour live here: a `Config` is JSON in both directions, is hashable (so that it can be a static
argument of `jax.jit`), and is checked when it is made. Sizes change with `dataclasses.replace(PRESETS["gpt2"],
num_layers=24)`. The names that a field accepts are the `Literal` types below; each has one table elsewhere that gives
every name its meaning (a test holds the two together).
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

Architecture = Literal["decoder"]
Residual = Literal["pre", "post"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["none", "learned", "sinusoidal", "rotary"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
DType = Literal["float32", "bfloat16"]

_CHOICES: dict[str, Any] = {
    "architecture": Architecture,
    "residual": Residual,
    "norm": Norm,
    "positions": Positions,
    "activation": Activation,
    "dtype": DType,
    "param_dtype": DType,
}
_OPTIONAL_SIZES = ("num_kv_heads", "d_head", "d_ff")
_SIZES = ("vocab_size", "max_len", "d_model", "num_layers", "num_heads", *_OPTIONAL_SIZES)
_FLAGS = ("embed_scale", "gated", "bias", "tie_embeddings", "scan_layers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What the model is, and how it is run.

    Sizes that follow from others may stay None; `sizes` holds every size under its letter, with the defaults filled in.

    Raises:
      ValueError: a value that no model can have; the message names the value, the requirement and the remedy.
    """

    # What the model is.
    architecture: Architecture = "decoder"
    """The arrangement of stacks; decoder: one causal stack."""
    vocab_size: int
    """Number of token ids."""
    max_len: int
    """Context length in tokens: rows of a learned position table, and the most that `generate` will hold."""
    d_model: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key/value heads, a divisor of num_heads (1: multi-query). None: num_heads."""
    d_head: int | None = None
    """Width of one head. None: d_model / num_heads."""
    d_ff: int | None = None
    """Width of the feed-forward layer. None: 4 * d_model."""
    residual: Residual = "pre"
    """Where the norm stands: pre, x + f(norm(x)); post, norm(x + f(x))."""
    norm: Norm = "layernorm"
    """layernorm takes the mean away and scales; rmsnorm only scales."""
    norm_eps: float = 1e-5
    """Added to the variance, or to the mean square."""
    positions: Positions = "rotary"
    """How tokens know their place: none, a learned table or sinusoids added to the embeddings, or turned q and k."""
    rotary_base: float = 10000.0
    """Wavelength base of rotary positions."""
    activation: Activation = "gelu_tanh"
    """The nonlinearity of the feed-forward layer."""
    gated: bool = False
    """Multiply the activation by a second projection (GLU variants)."""
    bias: bool = True
    """Biases in projections and in layernorm."""
    attention_scale: float | None = None
    """Factor on q . k before the softmax. None: d_head ** -0.5."""
    embed_scale: bool = False
    """Multiply token embeddings by sqrt(d_model)."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""
    dropout: float = 0.0
    """Rate on embeddings and on each sublayer's output; active when a dropout key is passed."""

    # How it is run.
    dtype: DType = "float32"
    """Type of activations and products. Norms, rotary angles, softmax, logits and loss are float32 always."""
    param_dtype: DType = "float32"
    """Type in which parameters are stored."""
    attention: str = "auto"
    """Key of `attention.IMPLEMENTATIONS`, or auto; auto on long rows has no forward-mode derivative, einsum has."""
    scan_layers: bool = False
    """Run the layers with one `nn.scan` over stacked parameters: program size constant in depth."""

    def __post_init__(self) -> None:
        self._check_types()
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {list(get_args(choices))}")
        if self.d_head is None and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of num_heads={self.num_heads}; set d_head explicitly"
            )
        sizes = self.sizes
        if self.num_heads % sizes["K"]:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "each key/value head serves the same number of query heads"
            )
        if self.positions == "rotary" and sizes["H"] % 2:
            raise ValueError(f"rotary positions turn pairs of lanes, but d_head={sizes['H']} is odd; make it even")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"sinusoidal positions fill pairs of lanes, but d_model={self.d_model} is odd; make it even"
            )

    def _check_types(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_SIZES:
                continue
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        for name in ("norm_eps", "rotary_base", "attention_scale"):
            value = getattr(self, name)
            if value is None and name == "attention_scale":
                continue
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a positive finite number")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} must be a number from 0 up to, but without, 1")
        if not isinstance(self.attention, str):
            raise ValueError(f"attention={self.attention!r} must be the name of an implementation, or 'auto'")

    @property
    def sizes(self) -> dict[str, int]:
        """Every size under its dimension letter: V, D, L, N, K, H, F, and P for the rows of a position table."""
        return {
            "V": self.vocab_size,
            "P": self.max_len,
            "D": self.d_model,
            "L": self.num_layers,
            "N": self.num_heads,
            "K": self.num_kv_heads or self.num_heads,
            "H": self.d_head or self.d_model // self.num_heads,
            "F": self.d_ff or 4 * self.d_model,
        }

    @property
    def scale(self) -> float:
        """The factor on q . k: `attention_scale`, or 1 / sqrt(H) (Vaswani et al. 2017, equation 1)."""
        return self.sizes["H"] ** -0.5 if self.attention_scale is None else self.attention_scale

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict of JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Config":
        """Makes a Config from untrusted JSON fields.

        Raises:
          ValueError: an unknown or missing field (named, with the closest valid name), or a value out of range.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; the fields are {sorted(known)}"
                raise ValueError(f"config field {name!r} is unknown{hint}")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise ValueError(f"config lacks {missing}; a model cannot be built without them")
        return cls(**fields)


_GPT2 = Config(
    vocab_size=50257,
    max_len=1024,
    d_model=768,
    num_layers=12,
    num_heads=12,
    residual="pre",
    norm="layernorm",
    norm_eps=1e-5,
    positions="learned",
    activation="gelu_tanh",
)
_LLAMA = Config(
    vocab_size=32000,
    max_len=2048,
    d_model=4096,
    num_layers=32,
    num_heads=32,
    d_ff=11008,
    residual="pre",
    norm="rmsnorm",
    norm_eps=1e-6,
    positions="rotary",
    activation="silu",
    gated=True,
    bias=False,
    tie_embeddings=False,
)
_SMOLLM2_135M = dataclasses.replace(
    _LLAMA,
    vocab_size=49152,
    max_len=8192,
    d_model=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    d_ff=1536,
    norm_eps=1e-5,
    rotary_base=100000.0,
    tie_embeddings=True,
)


def _tiny(config: Config, **sizes: Any) -> Config:
    return dataclasses.replace(config, vocab_size=257, max_len=128, d_model=64, num_layers=2, num_heads=4, **sizes)


PRESETS: dict[str, Config] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "smollm2_135m": _SMOLLM2_135M,
    "gpt2_tiny": _tiny(_GPT2),
    "llama_tiny": _tiny(_LLAMA, num_kv_heads=2, d_ff=192),
}
"""Published models, and tiny ones of their kind for tests and first steps."""
