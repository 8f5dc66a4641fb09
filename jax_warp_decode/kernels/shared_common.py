"""What the two kernels of `shared_decode` have in common around the kernel itself, which is in `shared_stream`:
configurations, the plan of who needs which expert, and what is refused.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode.device import HOPPER, capability
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import Weight
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels import checks
from jax_warp_decode.kernels.tile import MX_BLOCK

ROWS = 64  # the M of wgmma
TILE = 64  # columns of a bfloat16 tile with 128-byte swizzle
SHARED_BYTES = 228 * 1024  # of an SM
RESERVED_BYTES = 2048  # per CTA: one KiB of the driver's, one for barriers
ALIGNMENT = 1024  # of every buffer
H200_SMS = 132
MOST_LINES = 256  # of a TMA copy
MOST_BARRIERS = 32  # of one array of them, in Mosaic
CHUNKS = (256, 384, 320, 192, 128, 64)  # the best first
# By bytes per value: warpgroups, CTAs per SM and the least chunk, the best first. Decoding MXFP8 takes more warps.
LAYOUTS = {2: ((1, 1, 192), (1, 2, 64), (1, 1, 64)),
           1: ((1, 3, 192), (1, 2, 192), (2, 1, 192), (3, 1, 192), (1, 3, 64), (1, 2, 64), (2, 1, 64), (1, 1, 64))}
MANY_BYTES = 88 * 1024  # under way per SM, for the full speed of the memory
MAX_SLOTS = 8192  # T * K; a CTA keeps all ids in shared memory


@dataclasses.dataclass(frozen=True)
class SharedConfig:
    """How a kernel of `shared_decode` uses the GPU.

    Attributes:
      tokens: slots of one expert that share a pass over its weights, the N of wgmma: a multiple of 8, at most 64.
      chunk: weight columns per stage of the ring: divides the row length, a multiple of 64.
      stages: depth of a warpgroup's ring.
      warpgroups: of a CTA; they take turns along the columns, so their number must divide that of the chunks.
      ctas_per_sm: resident CTAs. Warpgroups and CTAs hide each other's waits.
    """

    tokens: int
    chunk: int
    stages: int
    warpgroups: int
    ctas_per_sm: int

    def ring_bytes(self, itemsize: int) -> int:
        """Bytes of weights that a CTA can have under way."""
        return self.warpgroups * self.stages * ROWS * self.chunk * itemsize

    def shared_bytes(self, cols: int, itemsize: int, slots: int, experts: int, matrices: int) -> int:
        """Shared memory of one CTA."""
        buffers = [
            self.ring_bytes(itemsize),
            self.tokens * cols * 2,  # operand
            2 * self.warpgroups * self.tokens * ROWS * 4,  # sums
            self.tokens * ROWS // matrices * 4,  # results
            4 * sum(table_lengths(slots, experts, self.tokens)),
        ]
        if itemsize == 1:
            buffers.append(self.scale_buffers(cols) * matrices * scale_lines(cols, ROWS // matrices) * 64)
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in buffers) + RESERVED_BYTES

    def scale_buffers(self, cols: int) -> int:
        """Items whose scales are under way or in use."""
        return self.stages // (cols // self.chunk // self.warpgroups) + 3

    @classmethod
    def heuristic(cls, T: int, K: int, E: int, cols: int, itemsize: int, matrices: int) -> "SharedConfig":
        """A good configuration for any shape the kernels take.

        Raises:
          UnsupportedError: no configuration fits shared memory.
        """
        # One pass over nearly every expert: another one over the same weights costs as much, though L2 has them.
        wanted = 8 if T <= 8 or T * K <= 2 * E else 16
        for least_ring, tokens, (warpgroups, ctas, least_chunk) in itertools.product(
                (MANY_BYTES, 0), dict.fromkeys((wanted, 8)), LAYOUTS[itemsize]):
            for chunk in (c for c in CHUNKS if c >= least_chunk and cols % c == 0 and cols // c % warpgroups == 0):
                for stages in range(min(12, MOST_BARRIERS // warpgroups), 1, -1):
                    config = cls(tokens, chunk, stages, warpgroups, ctas)
                    if config.shared_bytes(cols, itemsize, T * K, E, matrices) * ctas <= SHARED_BYTES:
                        if config.ring_bytes(itemsize) * ctas >= least_ring:
                            return config
                        break
        raise UnsupportedError(
            f"experts: got rows of {cols} columns, 'shared_decode' keeps 8 activation rows in shared memory and takes "
            f"about 12000 columns at most; {checks.WAY_OUT}")


def most_groups(slots: int, experts: int, tokens: int) -> int:
    """Upper bound on the number of groups."""
    return min(experts, slots) + slots // tokens


def table_lengths(slots: int, experts: int, tokens: int) -> list[int]:
    """ids, slots per expert, a group's expert, its first group and its passes; its slots and how many; the factors of
    its rows (MXFP8); groups."""
    groups = most_groups(slots, experts, tokens)
    return [-(-n // 32) * 32 for n in (slots, experts, groups, groups, groups, tokens + 1, tokens, 1)]


def scale_lines(cols: int, rows: int) -> int:
    """64-byte lines, an even number, that hold the scales of `rows` rows."""
    return -(-rows * cols // MX_BLOCK // 128) * 2


def plan_tables(ids: jax.Array, experts: int, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The groups of a batch, in order, as the kernels compute them for themselves: plain form, for the interpreter.

    Args:
      ids: int32 [slots]; ids outside [0, experts) belong to no group.
      experts: E.
      tokens: most slots of a group.

    Returns:
      expert, first, passes (int32 [most_groups]: a group's expert, the first group of that expert, and how many it
      has; entries beyond the last group hold zeros), and the number of groups, int32.

    Example:
      >>> import jax.numpy as jnp
      >>> expert, first, passes, total = plan_tables(jnp.array([5, 2, 5, -1, 5]), experts=8, tokens=2)
      >>> int(total), expert.tolist()[:3], first.tolist()[:3], passes.tolist()[:3]
      (3, [2, 5, 5], [0, 1, 1], [1, 2, 2])
    """
    e = jnp.arange(experts, dtype=jnp.int32)
    count = jnp.sum(ids[:, None] == e, axis=0, dtype=jnp.int32)
    passes = (count + jnp.int32(tokens - 1)) // jnp.int32(tokens)
    end = lax.cumsum(passes)
    group = jnp.arange(most_groups(len(ids), experts, tokens), dtype=jnp.int32)[:, None]
    mine = (group >= end - passes) & (group < end)

    def of_group(values):
        return jnp.sum(jnp.where(mine, values, jnp.int32(0)), axis=1, dtype=jnp.int32)

    return of_group(e), of_group(end - passes), of_group(passes), end[-1]


def device_refusal() -> str:
    """Why the default device cannot run the kernels, or an empty string. A CPU may compile for a GPU."""
    if capability() in ("", HOPPER):
        return ""
    return (f"the GPU has compute capability {capability()}, the kernels need {HOPPER} (Hopper's wgmma); use "
            f"strategy='auto' or 'warp_decode'")


def check_sizes(name: str, n: int, cols: int, T: int, K: int, E: int, itemsize: int, matrices: int,
                config: SharedConfig | None = None) -> SharedConfig:
    """The config, or the heuristic's, for a weight [E, n, cols]; refuses what the kernels cannot tile or plan."""
    slots = T * K
    if slots > MAX_SLOTS:
        raise UnsupportedError(
            f"ids: got {slots} slots, 'shared_decode' takes {MAX_SLOTS} at most; use strategy='expert_centric'")
    if n % TILE or cols % TILE or not cols:
        raise UnsupportedError(
            f"{name}: got [.., {n}, {cols}], 'shared_decode' needs multiples of {TILE}; pad with zeros to "
            f"[.., {-(-n // TILE) * TILE}, {-(-cols // TILE) * TILE}] once, or {checks.WAY_OUT}")
    if matrices == 1 and n < 128:
        raise UnsupportedError(f"{name}: got H = {n}, 'shared_decode' needs 128 at least; {checks.WAY_OUT}")
    config = config or SharedConfig.heuristic(T, K, E, cols, itemsize, matrices)
    check_config(config, cols, itemsize, slots, E, matrices)
    return config


def check_config(config: SharedConfig, cols: int, itemsize: int, slots: int, experts: int, matrices: int) -> None:
    """Refuses a config that does not fit the shape or the device."""
    checks.config_type(config, SharedConfig)
    if itemsize == 1 and scale_lines(cols, ROWS // matrices) > MOST_LINES:
        raise UnsupportedError(
            f"experts: got mxfp8 rows of {cols} columns, 'shared_decode' copies the scales of 64 rows at once and "
            f"takes {MOST_LINES * 32 * matrices} at most here; {checks.WAY_OUT}")
    if not (config.tokens in range(8, 65, 8) and config.chunk >= 64 and config.chunk % 64 == 0
            and cols % config.chunk == 0 and config.chunk <= 256 * 64 and config.stages >= 2
            and 1 <= config.warpgroups <= 8 and cols // config.chunk % config.warpgroups == 0
            and config.warpgroups * config.stages <= MOST_BARRIERS and config.ctas_per_sm >= 1):
        raise ArgumentError(
            f"config: got {config}; tokens must be a multiple of 8 up to 64, chunk a multiple of 64 that divides "
            f"{cols}, stages at least 2, warpgroups at most 8 and a divisor of the number of chunks, "
            f"warpgroups * stages at most {MOST_BARRIERS}")
    need = config.shared_bytes(cols, itemsize, slots, experts, matrices)
    if need * config.ctas_per_sm > SHARED_BYTES:
        raise ArgumentError(f"config: {config} takes {need} bytes of shared memory per CTA, an SM has {SHARED_BYTES}")


def half_weight_itemsize(name: str, w: Weight) -> int:
    """Bytes per value of a weight that the kernels read: bfloat16 or MXFP8."""
    itemsize = checks.weight_itemsize(name, w)
    if itemsize == 2 and jnp.dtype(w.dtype) != jnp.bfloat16:
        raise UnsupportedError(f"{name}: got {w.dtype}, 'shared_decode' reads bfloat16 and mxfp8; {checks.WAY_OUT}")
    return itemsize


def weight_operands(w: Weight) -> tuple[jax.Array, ...]:
    """Views of a weight [E, n, cols] in the shape the kernel loads from. Reshapes only, no copy."""
    if isinstance(w, QuantizedArray):
        return w.values.reshape(-1, w.shape[2]), lax.bitcast_convert_type(w.scales, jnp.uint8).reshape(-1, 64)
    return (w.reshape(-1, w.shape[2]),)


def grid_size(config: SharedConfig, interpret) -> int:
    """Resident CTAs on the default device; two where the kernel is interpreted."""
    if interpret is not None:
        return 2
    sms = getattr(jax.devices()[0], "core_count", H200_SMS) if jax.default_backend() == "gpu" else H200_SMS
    return sms * config.ctas_per_sm
