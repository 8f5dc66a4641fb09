"""Small random models, made without compiling an initialiser for every parameter."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def filled(make: Callable[[], Any], seed: int = 7) -> Any:
    """The module that `make` describes: gains near one, matrices that keep the size of what they multiply."""
    module = nnx.eval_shape(make)
    normal = np.random.default_rng(seed).normal

    def fill(like):
        values = 1 + 0.1 * normal(size=like.shape) if like.ndim == 1 else normal(size=like.shape) / like.shape[-1]**0.5
        return jnp.asarray(values, like.dtype)

    nnx.update(module, jax.tree.map(fill, nnx.state(module)))
    return module
