"""The decode loop: one jitted prefill, then one jitted step per token with the KV cache donated to itself."""

import collections
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike

from jax_warp_decode.errors import ArgumentError, counted
from jax_warp_decode.models.cache import KVCache
from jax_warp_decode.models.sampling import check_sampling, sample
from jax_warp_decode.routers import static_integer


@functools.lru_cache(maxsize=16)
def _make_advance(graphdef, state_def, greedy: bool) -> Callable:
    """The jitted step of one model structure. Cached, so that equal models and repeated calls compile once."""

    @functools.partial(jax.jit, donate_argnums=1)
    def advance(leaves, cache, tokens, key, temperature):
        model = nnx.merge(graphdef, jax.tree.unflatten(state_def, leaves))
        hidden, cache = model.hidden_states(tokens, cache)
        logits = model.logits(hidden[:, -1])  # only the last position: a prefill has no use for the others
        with jax.named_scope("sample"):
            ids = sample(logits, key, None if greedy else temperature)
        return ids, logits, cache

    return advance


class Generation:
    """Iterator over the new tokens of one `generate` call, one int32 array [B] per step.

    The device is one step ahead of the host: while the ids of a step are handed out, the next step already runs.

    Attributes:
      logits: [B, V] float32 device array from which the ids handed out last were picked; None before.
      prefill_seconds: wall time from the first `next` to the first token on the host; None before. The first
        call with given shapes compiles, and compiling counts.
      step_seconds: for every later token the wall time since the token before it; the first of a given shape compiles.
    """

    def __init__(self, model: Any, prompt: jax.Array, max_new_tokens: int, cache: KVCache, temperature: float,
                 rng: jax.Array | None) -> None:
        graphdef, state = nnx.split(model)
        # Flattened once here: flattening and hashing a large module costs more than dispatching a step.
        self._leaves, state_def = jax.tree.flatten(state)
        self._advance = _make_advance(graphdef, state_def, temperature == 0.0)
        self._cache, self._next_tokens, self._to_launch = cache, prompt, max_new_tokens
        self._temperature, self._rng = jnp.float32(temperature), rng
        self._in_flight: collections.deque[tuple[jax.Array, jax.Array]] = collections.deque()
        self._handed_out_at: float | None = None
        self.logits: jax.Array | None = None
        self.prefill_seconds: float | None = None
        self.step_seconds: list[float] = []

    @property
    def tokens_per_second(self) -> float:
        """Decode steps per second of wall time, per sequence. NaN before the second token."""
        return len(self.step_seconds) / sum(self.step_seconds) if self.step_seconds else float("nan")

    def _launch(self) -> None:
        key = None
        if self._rng is not None:
            self._rng, key = jax.random.split(self._rng)
        ids, logits, self._cache = self._advance(
            self._leaves, self._cache, self._next_tokens, key, self._temperature)
        self._next_tokens = ids[:, None]
        self._to_launch -= 1
        self._in_flight.append((ids, logits))

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> np.ndarray:
        start = self._handed_out_at or time.perf_counter()
        # Up to two in flight, except for the prefill, whose time would otherwise hold the first step's compilation.
        ahead = 1 if self._handed_out_at is None else 2
        while self._to_launch and len(self._in_flight) < ahead:
            self._launch()
        if not self._in_flight:
            raise StopIteration
        on_device, self.logits = self._in_flight.popleft()
        ids = np.asarray(on_device)
        self._handed_out_at = time.perf_counter()
        if self.prefill_seconds is None:
            self.prefill_seconds = self._handed_out_at - start
        else:
            self.step_seconds.append(self._handed_out_at - start)
        return ids


def _check_prompt(prompt, vocab_size: int) -> np.ndarray:
    try:
        prompt = np.asarray(prompt)
    except (TypeError, ValueError):  # such as rows of several lengths
        raise ArgumentError(f"prompt_tokens: got {type(prompt).__name__}, expected [B, S] integers, prompts of equal "
                            "length") from None
    if prompt.ndim != 2 or 0 in prompt.shape:
        raise ArgumentError(
            f"prompt_tokens: got shape {prompt.shape}, expected [B, S] with at least one sequence of at least one "
            f"token; for one sequence pass tokens[None]")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise ArgumentError(f"prompt_tokens: got dtype {prompt.dtype}, expected integers; cast with .astype('int32')")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        bad = prompt.min() if prompt.min() < 0 else prompt.max()
        raise ArgumentError(
            f"prompt_tokens: got id {bad}, expected 0 <= id < {vocab_size} (vocab_size); use the model's own tokenizer")
    return prompt.astype(np.int32)


def generate(
    model: Any,
    prompt_tokens: ArrayLike,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    rng: jax.Array | None = None,
    max_len: int | None = None,
) -> Generation:
    """Continues B prompts of equal length, token by token.

    Args:
      model: a decoder with the methods `hidden_states` and `logits`, such as `Qwen3Moe`.
      prompt_tokens: [B, S] integers on the host or the device, S >= 1.
      max_new_tokens: number of tokens to produce per sequence, at least 1. There is no stop token: stop iterating.
      temperature: 0 picks the most likely token, ties to the lower id; above 0 samples from
        `softmax(logits / temperature)`. A float32: neither subnormal nor too large for one.
      rng: `jax.random.key` for sampling; required when temperature > 0 and refused otherwise.
      max_len: length of the KV cache in tokens, default S + max_new_tokens. Calls with equal prompt shapes and equal
        `max_len` share the compiled code.

    Returns:
      A `Generation`: iterate over it for int32 arrays [B], one per step, as soon as each is known; it also carries
      the logits and the wall time of every step.

    Raises:
      ArgumentError: for a prompt of another shape or dtype, ids outside the vocabulary, a length beyond the model's
        `max_position_embeddings` or beyond `max_len`, a bad temperature, or a missing `rng`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_warp_decode.models.generate import generate
      >>> from jax_warp_decode.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
      >>> config = Qwen3MoeConfig(
      ...     vocab_size=32, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_experts=4,
      ...     num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
      ...     max_position_embeddings=64)
      >>> model = Qwen3Moe(config, rngs=nnx.Rngs(0))
      >>> tokens = [ids for ids in generate(model, jnp.array([[1, 2, 3]]), max_new_tokens=5)]
      >>> len(tokens), tokens[0].shape
      (5, (1,))
    """
    prompt = _check_prompt(prompt_tokens, model.config.vocab_size)
    batch, length = prompt.shape
    max_new_tokens = static_integer("max_new_tokens", max_new_tokens, "of at least 1")
    if max_new_tokens < 1:
        raise ArgumentError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
    needed, limit = length + max_new_tokens, model.config.max_position_embeddings
    if length >= limit:
        raise ArgumentError(
            f"prompt_tokens: got {counted(length, 'token')}, expected at most {limit - 1}, so that one more fits: the "
            f"model's max_position_embeddings is {limit}; shorten the prompt")
    if needed > limit:
        raise ArgumentError(
            f"max_new_tokens: got {max_new_tokens} after a prompt of {counted(length, 'token')}, expected at most "
            f"{limit - length}: the model's max_position_embeddings is {limit}; shorten the prompt or ask for less")
    max_len = needed if max_len is None else static_integer("max_len", max_len, "of at least 1")
    if not needed <= max_len <= limit:
        raise ArgumentError(
            f"max_len: got {max_len}, expected {needed} (prompt and new tokens) <= max_len <= {limit} "
            f"(max_position_embeddings)")
    temperature = check_sampling(temperature, rng)
    cache = KVCache.create(model.config, batch, max_len, model.dtype)
    return Generation(model, jnp.asarray(prompt), max_new_tokens, cache, temperature, rng)
