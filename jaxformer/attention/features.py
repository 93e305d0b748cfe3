"""Feature maps phi for linear attention: the weight of key k for query q is phi(q) . phi(k), and not e^(q . k).

elu:     phi(x) = elu(x) + 1                                          (Katharopoulos et al. 2020, equation 7)
random:  phi(x) = e^(w x - |x|^2 / 2) / sqrt(M), M random rows w      (Choromanski et al. 2021, lemma 1)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

FeatureMap = Callable[[Array], Array]
"""phi: float32 [... H] -> features [... M] that are not negative, or their products would be no weights."""


def elu_plus_one(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    """Returns elu(x) + 1, which is x + 1 above 0 and e^x below."""
    # Not (e^x - 1) + 1, which is 0 below -17. The inner choice keeps e^x finite where it is not used.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))


FEATURE_MAPS: dict[str, FeatureMap] = {"elu": elu_plus_one, "relu": jax.nn.relu, "softmax": jax.nn.softmax}
"""Feature maps without parameters, M = H; softmax is over the lanes of a head."""


def random_features(key: Key[Array, ""], width: int, features: int) -> FeatureMap:
    """Draws a feature map by which linear attention estimates softmax attention.

    Its products are e^(x . y) on average over keys, and their spread falls with the square root of `features`. It grows
    with e^|x + y|^2: keep queries and keys small. The same draw must serve queries and keys, and every step.

    Args:
      width: H, the width of a head.
      features: M, the number of random rows.

    Returns:
      phi, a pytree.

    References:
      Choromanski et al. 2021, "Rethinking Attention with Performers", lemmas 1 and 2.
    """
    return jax.tree_util.Partial(_exponentials, jax.random.normal(key, (features, width)))


def _exponentials(rows: Float[Array, "M H"], x: Float[Array, "*B H"]) -> Float[Array, "*B M"]:
    exponents = jnp.einsum("...H,MH->...M", x, rows) - jnp.square(x).sum(axis=-1, keepdims=True) / 2
    return jnp.exp(exponents) / jnp.sqrt(rows.shape[0])
