"""The next token from logits, on the device: greedy, or sampled at a temperature from the most likely tokens."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.errors import ArgumentError

# Normal float32 numbers: devices may flush smaller ones to 0, of a temperature and of top_p.
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def sample(
    logits: jax.Array, key: jax.Array | None = None, temperature: jax.Array | None = None,
    top_p: jax.Array | None = None,
) -> jax.Array:
    """One token per row.

    Args:
      logits: [B, V] float32.
      key: of `jax.random`; None without a temperature.
      temperature: float32 scalar above 0: sample from `softmax(logits / temperature)`. None takes the largest logit,
        the lower id among equal ones.
      top_p: float32 scalar in (0, 1]: sample only from the smallest set of most likely tokens whose probabilities, at
        this temperature, sum to at least top_p ("nucleus", arXiv:1904.09751). Tokens as likely as its last one belong
        to it too. None keeps all.

    Returns:
      ids int32 [B].

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode.models.sampling import sample
      >>> logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
      >>> sample(logits).tolist()
      [0]
      >>> draw = lambda key: sample(logits, key, jnp.float32(1), jnp.float32(0.7))[0]
      >>> sorted(set(jax.vmap(draw)(jax.random.split(jax.random.key(0), 100)).tolist()))
      [0, 1]
    """
    if temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Differences to the largest logit are at most 0: over a tiny temperature they overflow to probability 0.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_p is not None:
        probabilities = jax.nn.softmax(scaled)
        descending = -jnp.sort(-probabilities, axis=-1)
        before = jnp.cumsum(descending, axis=-1) - descending  # of the more likely ones
        least = jnp.min(jnp.where(before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
        scaled = jnp.where(probabilities >= least, scaled, -jnp.inf)
    return jax.random.categorical(cast(jax.Array, key), scaled).astype(jnp.int32)


def check_sampling(temperature, rng) -> float:
    """The temperature as a number, for all that generate.

    Raises:
      ArgumentError: it is none, or none that float32 holds; a key without a temperature above 0, or the other way
        round; or what is no single key.
    """
    value = as_number("temperature", temperature)
    if not (value == 0.0 or SMALLEST <= value <= LARGEST):
        raise ArgumentError(
            f"temperature: got {value}, expected a finite number >= 0, and above 0 from {SMALLEST:.3g} to "
            f"{LARGEST:.3g}; 0 takes the most likely token")
    if rng is not None:
        _check_key(rng)
    if (rng is not None) != (value > 0.0):
        raise ArgumentError(
            f"rng: got {'None' if rng is None else 'a key'} with temperature {value}, expected a key only when "
            f"temperature > 0; pass rng=jax.random.key(seed) to sample, temperature=0.0 for greedy")
    return value


def as_number(name: str, value) -> float:
    """A Python or numpy number as a float; anything else is an `ArgumentError`."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}: got {value!r}, expected a number") from None


def _check_key(rng) -> None:
    """Refuses what is no single key: neither of `jax.random.key` nor a raw one."""
    dtype, ndim = getattr(rng, "dtype", None), getattr(rng, "ndim", None)
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and ndim == 0 or dtype == jnp.uint32 and ndim == 1):
        got = type(rng).__name__ if dtype is None else f"{dtype} {rng.shape}"
        raise ArgumentError(f"rng: got {got}, expected one key; make it with jax.random.key(seed)")
