"""Generation from prompts of different lengths: one prefill, then steps in chunks that never wait for the host."""

import collections
import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode.errors import ArgumentError, counted
from jax_warp_decode.models.cache import RaggedCache
from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights, decode_step, prefill
from jax_warp_decode.models.sampling import SMALLEST, as_number, check_sampling, sample
from jax_warp_decode.routers import static_integer

PROMPT_MULTIPLE = 64  # prompts are padded to this, so that few prefills are compiled


def decode_tokens(
    model: DecodeModel, weights: DecoderWeights, cache: RaggedCache, tokens: jax.Array, steps: int,
    key: jax.Array | None = None, temperature: jax.Array | None = None, top_p: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, RaggedCache]:
    """Several decode steps in one call: every token is chosen on the device and fed to the next step.

    Args:
      model, weights, cache, tokens: as in `decode_step`.
      steps: static.
      key, temperature, top_p: as in `sample`.

    Returns:
      ids int32 [steps, B], the last of them once more as the `tokens` of the next call, and the cache.
    """
    with jax.named_scope("sample"):
        keys = None if key is None else jax.random.split(key, steps)

    def step(carry, key):
        tokens, cache = carry
        logits, cache = decode_step(model, weights, cache, tokens)
        with jax.named_scope("sample"):
            ids = sample(logits, key, temperature, top_p)
        return (ids, cache), ids

    (tokens, cache), ids = jax.lax.scan(step, (tokens, cache), keys, length=steps)
    return ids, tokens, cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill_and_sample(model, weights, cache, tokens, lengths, key, temperature, top_p):
    logits, cache = prefill(model, weights, cache, tokens, lengths)
    with jax.named_scope("sample"):
        return sample(logits, key, temperature, top_p), cache


_decode_tokens = jax.jit(decode_tokens, static_argnums=(0, 4), donate_argnums=2)


class RaggedGeneration:
    """Iterator over the new tokens of `generate_ragged`: int32 arrays [n, B], n from 1 to the chunk size.

    The device is one chunk ahead of the host. Nothing runs before the first `next`.

    Attributes:
      max_len: positions that the cache of a row holds.
      prefill_seconds: wall time to the first token; None before. Compiling counts.
      step_seconds: (steps, seconds of wall time) of every chunk handed out later, in order.
    """

    def __init__(self, model, weights, prompts, max_new_tokens, chunk, max_len, rng, temperature, top_p):
        self._model, self._weights, self._chunk, self._left = model, weights, chunk, max_new_tokens - 1
        self._rng, self.max_len = rng, max_len
        self._sampling = [None if a is None else jnp.float32(a) for a in (temperature, top_p)]
        lengths = np.array([len(p) for p in prompts], np.int32)
        width = min(max_len, -(-int(lengths.max()) // PROMPT_MULTIPLE) * PROMPT_MULTIPLE)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[:len(prompt)] = prompt
        self._prompts = tokens, lengths
        self._in_flight = collections.deque()
        self._handed_out_at = None
        self.prefill_seconds = None
        self.step_seconds: list[tuple[int, float]] = []

    def _key(self):
        if self._rng is None:
            return None
        self._rng, key = jax.random.split(self._rng)
        return key

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of wall time and sequence, without the first one. NaN before the first chunk."""
        seconds = sum(s for _, s in self.step_seconds)
        return sum(n for n, _ in self.step_seconds) / seconds if seconds else float("nan")

    def _launch_prefill(self) -> None:
        tokens, lengths = map(jnp.asarray, self._prompts)
        self._next, self._cache = _prefill_and_sample(
            self._model, self._weights, self._model.new_cache(len(lengths), self.max_len), tokens, lengths,
            self._key(), *self._sampling)
        self._in_flight.append((self._next[None], 1))

    def _launch(self) -> None:
        # Whole chunks, so that one program is compiled; what was not asked for is dropped.
        ids, self._next, self._cache = _decode_tokens(
            self._model, self._weights, self._cache, self._next, self._chunk, self._key(), *self._sampling)
        self._in_flight.append((ids, min(self._chunk, self._left)))
        self._left -= self._in_flight[-1][1]

    def __iter__(self) -> "RaggedGeneration":
        return self

    def __next__(self) -> np.ndarray:
        start = self._handed_out_at or time.perf_counter()
        if self._handed_out_at is None:  # and no step yet: the first token would wait for its compilation
            self._launch_prefill()
        else:
            while self._left and len(self._in_flight) < 2:
                self._launch()
        if not self._in_flight:
            raise StopIteration
        ids, wanted = self._in_flight.popleft()
        ids = np.asarray(ids)[:wanted]
        self._handed_out_at = time.perf_counter()
        if self.prefill_seconds is None:
            self.prefill_seconds = self._handed_out_at - start
        else:
            self.step_seconds.append((self._chunk, self._handed_out_at - start))
        return ids


def generate_ragged(
    model: DecodeModel, weights: DecoderWeights, prompts: Sequence[Sequence[int] | np.ndarray], max_new_tokens: int, *,
    temperature: float = 0.0, top_p: float | None = None, rng: jax.Array | None = None, max_len: int | None = None,
    chunk: int = 8,
) -> RaggedGeneration:
    """Continues prompts of different lengths together, each as it would be alone.

    Args:
      model, weights: from `DecodeModel.of` and `DecoderWeights.from_model`.
      prompts: B sequences of token ids, each with at least one.
      max_new_tokens: tokens per sequence, at least 1. There is no stop token: stop iterating.
      temperature: 0 takes the most likely token; above 0 samples.
      top_p: in (0, 1], see `sample`; needs a temperature.
      rng: `jax.random.key`, required when temperature > 0 and refused otherwise.
      max_len: of the cache; default: longest prompt and new tokens, rounded up to a multiple of 64.
      chunk: steps per call on the device. Tokens arrive in chunks; more steps leave the host less to do.

    Returns:
      A `RaggedGeneration`: int32 arrays [n, B], the first with n = 1.

    Raises:
      ArgumentError: no prompt, an empty one, an id outside the vocabulary, more than the model's
        `max_position_embeddings` or `max_len` hold, or sampling arguments that are out of range or do not fit together.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_warp_decode.models import Qwen3Moe, Qwen3MoeConfig
      >>> from jax_warp_decode.models.decode_loop import generate_ragged
      >>> from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights
      >>> config = Qwen3MoeConfig(
      ...     vocab_size=32, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_experts=4,
      ...     num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
      ...     max_position_embeddings=64)
      >>> module = Qwen3Moe(config, strategy="reference", rngs=nnx.Rngs(0))
      >>> generation = generate_ragged(
      ...     DecodeModel.of(module), DecoderWeights.from_model(module), [[1, 2, 3], [4]], max_new_tokens=10)
      >>> [ids.shape for ids in generation]
      [(1, 2), (8, 2), (1, 2)]
    """
    prompts = _check_prompts(prompts, model.config.vocab_size)
    sizes = {name: static_integer(name, value, "of at least 1")
             for name, value in (("max_new_tokens", max_new_tokens), ("chunk", chunk))}
    for name, value in sizes.items():
        if value < 1:
            raise ArgumentError(f"{name}: got {value}, expected at least 1")
    max_new_tokens, chunk = sizes.values()
    longest, limit = max(map(len, prompts)), model.config.max_position_embeddings
    needed = longest + max_new_tokens
    if needed > limit:
        raise ArgumentError(f"max_new_tokens: got {max_new_tokens} after a prompt of {counted(longest, 'token')}, "
                            f"expected at most {max(limit - longest, 0)}: the model's max_position_embeddings is "
                            f"{limit}; shorten the prompt or ask for less")
    chunk = min(chunk, max(max_new_tokens - 1, 1))
    needed = longest + 1 + -(-(max_new_tokens - 1) // chunk) * chunk
    if max_len is None:
        max_len = -(-needed // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    max_len = static_integer("max_len", max_len, "of at least 1")
    if max_len < needed:
        raise ArgumentError(f"max_len: got {max_len}, expected at least {needed}, prompt and new tokens in whole "
                            f"chunks of {chunk}")
    temperature = check_sampling(temperature, rng)
    top_p = None if top_p is None else as_number("top_p", top_p)
    if top_p is not None and not (SMALLEST <= top_p <= 1.0 and temperature > 0.0):
        raise ArgumentError(f"top_p: got {top_p} with temperature {temperature}, expected {SMALLEST:.3g} <= "
                            "top_p <= 1 and a temperature above 0")
    return RaggedGeneration(
        model, weights, prompts, max_new_tokens, chunk, max_len, rng, temperature or None,
        None if top_p == 1 else top_p)  # which keeps every token, however their probabilities add up in float32


def _check_prompts(prompts, vocab_size: int) -> list[np.ndarray]:
    try:
        checked = [np.asarray(prompt) for prompt in prompts]
    except (TypeError, ValueError):  # no sequence, or one of nested prompts
        raise ArgumentError(f"prompts: got {type(prompts).__name__}, expected a sequence of sequences of integers"
                            ) from None
    if not checked:
        raise ArgumentError("prompts: got none, expected at least one")
    for number, prompt in enumerate(checked):
        if prompt.ndim != 1 or not prompt.size or not np.issubdtype(prompt.dtype, np.integer):
            raise ArgumentError(f"prompts[{number}]: got {prompt.dtype}{list(prompt.shape)}, expected a sequence of at "
                                "least one integer")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            bad = prompt.min() if prompt.min() < 0 else prompt.max()
            raise ArgumentError(f"prompts[{number}]: got id {bad}, expected 0 <= id < {vocab_size} (vocab_size); use "
                                "the model's own tokenizer")
    return [prompt.astype(np.int32) for prompt in checked]
