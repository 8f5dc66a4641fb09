"""What the two kernels of `shared_decode` have in common around the kernel itself, which is in `shared_stream`:
configurations, the plan of who needs which expert, and what is refused.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode.device import H200_SMS, HOPPER, capability
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import Weight
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels import checks, stream_format
from jax_warp_decode.kernels.stream_format import STREAM_FORMATS, Ring
from jax_warp_decode.routing import expected_experts

ROWS = 64  # the M of wgmma
TILE = 64  # columns of a bfloat16 tile with 128-byte swizzle
SHARED_BYTES = 228 * 1024  # of an SM
RESERVED_BYTES = 2048  # per CTA: one KiB of the driver's, one for barriers
ALIGNMENT = 1024  # of every buffer
MOST_LINES = 256  # of a TMA copy
MOST_BARRIERS = 32  # of one array of them, in Mosaic
# By whether values have more than 4 bits, the best first.
CHUNKS = {True: (256, 384, 320, 192, 128, 64), False: (512, 384, 320, 256, 192, 128, 64)}
WIDE = 192  # columns of a stage, at least, whose fixed costs do not matter
NARROW = 1.06  # relative time with less
MOST_TOKENS = {True: 64, False: 32}  # with bfloat16, and others
# What follows is fitted to measurements on an H200, `bench.crossovers`. Tables by density: with bfloat16, and others.
WIDER = {True: 0.0025, False: 0.008}  # relative time per token of a pass
# Time of an item beside its weights, in bytes of weights that could be read meanwhile: at all, and per token of a pass.
ITEM = {True: (8192, 0), False: (0, 1024)}
# Time of gathering an activation row anew, over that of as many bytes of weights: copies hide behind the weights, but
# not what turns rows to float16; and the least columns of a panel.
GATHER = {True: 0.5, False: 5.0}
HIDDEN = 16  # rows whose copies hide; with 32 they took some ten times as long
PANEL = 1024
PANELS = (1, 2, 3, 4, 5, 8)
# By whether the weights are bfloat16 and whether the stages are wide: warpgroups and CTAs per SM, the best first.
# Decoding takes more warps.
LAYOUTS = {(True, True): ((1, 1),), (True, False): ((1, 2), (1, 1)),
           (False, True): ((1, 3), (1, 2), (2, 1), (3, 1)), (False, False): ((1, 3), (1, 2), (2, 1))}
# Bytes under way per SM, at least, and the relative time: the first reach the full speed of the memory. One stage of
# bfloat16 waits for the products of the stage before, and is not under way.
RINGS = {True: ((80 * 1024, 1.0), (60 * 1024, 1.03), (48 * 1024, 1.08), (32 * 1024, 1.3), (0, 1.6)),
         False: ((88 * 1024, 1.0), (56 * 1024, 1.03), (40 * 1024, 1.1), (24 * 1024, 1.15), (0, 1.4))}
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
      panels: parts of the columns whose activations are in shared memory at a time; 1 unless the rows are very long, as
        with more they are gathered anew for every 64 rows of weights.
      waves: CTAs per resident CTA. More balance the work of the SMs and start more often.
      wgmma: products of bfloat16 weights by wgmma, which Hopper alone has, or by mma.sync. Others take that anyway.
    """

    tokens: int
    chunk: int
    stages: int
    warpgroups: int
    ctas_per_sm: int
    panels: int = 1
    waves: int = 1
    wgmma: bool = True

    def ring_bytes(self, format: str) -> int:
        """Bytes of weights that a CTA can have under way."""
        return self.warpgroups * self.stages * ROWS * self.chunk * STREAM_FORMATS[format].bits // 8

    def shared_bytes(self, cols: int, format: str, slots: int, experts: int, matrices: int) -> int:
        """Shared memory of one CTA."""
        buffers = [
            self.ring_bytes(format),
            self.tokens * cols // self.panels * 2,  # operand
            2 * self.warpgroups * self.tokens * ROWS * 4,  # sums
            4 * sum(table_lengths(slots, experts, self.tokens)),
        ]
        if ring := STREAM_FORMATS[format].ring:
            lines, line = scale_lines(ring, cols, ROWS // matrices)
            buffers.append(self.scale_buffers(cols) * matrices * lines * line * ring.dtype.itemsize)
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in buffers) + RESERVED_BYTES

    def scale_buffers(self, cols: int) -> int:
        """Items whose scales are under way or in use."""
        return self.stages // (cols // self.chunk // self.warpgroups) + 3

    @classmethod
    def heuristic(cls, T: int, K: int, E: int, cols: int, format: str, matrices: int) -> "SharedConfig":
        """A good configuration for any shape the kernels take.

        Raises:
          UnsupportedError: no configuration fits shared memory.
        """
        found = estimate(T, K, E, cols, format, matrices)[1]
        return dataclasses.replace(found, wgmma=capability() in ("", HOPPER))  # a CPU compiles for Hopper


@functools.cache
def estimate(T: int, K: int, E: int, cols: int, format: str, matrices: int) -> tuple[float, SharedConfig]:
    """The time of the configuration that should be fastest, over that of reading the weights once, and it.

    For slots that choose among experts at random; without the start and the end of a launch.

    Raises:
      UnsupportedError: no configuration fits shared memory.

    Example:
      >>> from jax_warp_decode.kernels.shared_common import estimate
      >>> [round(estimate(T, 8, 128, 2048, "bf16", 2)[0], 2) for T in (8, 128, 512)]
      [1.03, 1.05, 2.19]
    """
    found = min(_affordable(T, K, E, cols, format, matrices), default=None)
    if found:
        return found[0], found[-1]
    raise UnsupportedError(
        f"experts: got {format} rows of {cols} columns, and shared memory does not hold what 'shared_decode' keeps "
        f"there: a part of 8 activation rows, and a few times the scales of 64 weight rows; {checks.WAY_OUT}")


def _affordable(T: int, K: int, E: int, cols: int, format: str, matrices: int):
    """Configurations that fit, as (estimate of the relative time, place in the tables, config)."""
    dense, share = format == "bf16", min(1.0, K / E)
    slots_of_expert = T * share * E / expected_experts(E, K, T) if T else 1.0  # of those that have some
    tokens = [(n, _passes(T, share, n) * (1 + WIDER[dense] * (n - 8))) for n in range(8, MOST_TOKENS[dense] + 1, 8)]
    places, bits = itertools.count(), STREAM_FORMATS[format].bits
    item_bytes = ROWS * cols * bits / 8
    for (n, passes), panels, chunk in itertools.product(tokens, PANELS, CHUNKS[bits > 4]):
        if panels > 1 and cols // panels < PANEL:
            continue
        item = 1 + (ITEM[dense][0] + ITEM[dense][1] * n) / item_bytes
        # What gathering the rows for every item takes, over reading the item's weights.
        rows = min(n, slots_of_expert)
        rows *= max(1, rows / HIDDEN) ** 2 if dense else 1
        again = GATHER[dense] * 2 * rows / (ROWS * bits / 8) if panels > 1 else 0
        for warpgroups, ctas in LAYOUTS[dense, chunk >= WIDE]:
            # Registers of stages that are decoded: the SM has 168 for each of 3 warpgroups.
            many = not dense and warpgroups * ctas > 2 and (chunk * bits > 256 * 8 or n > 24)
            if many or cols % (chunk * warpgroups * panels) or chunk % _least_chunk(format):
                continue
            for stages in range(min(12, MOST_BARRIERS // warpgroups), 1, -1):
                config = SharedConfig(n, chunk, stages, warpgroups, ctas, panels)
                if config.shared_bytes(cols, format, T * K, E, matrices) * ctas <= SHARED_BYTES:
                    under_way = config.ring_bytes(format) * ctas * (stages - dense) // stages
                    ring = next(cost for least, cost in RINGS[dense] if under_way >= least)
                    time = passes * item * (1 + again) * ring * (1 if chunk >= WIDE else NARROW)
                    yield time, next(places), config
                    break


def _passes(tokens: int, share: float, n: int) -> float:
    """Passes per expert that has slots, `n` slots at a time, where each token chooses it with a probability of `share`.

    Example:
      >>> [round(_passes(tokens, 1 / 16, 8), 2) for tokens in (8, 32, 64, 128, 256)]
      [1.0, 1.0, 1.02, 1.41, 2.43]
      >>> _passes(20, 1.0, 8)
      3
    """
    if share >= 1 or not tokens:
        return max(1, -(-tokens // n))
    mean, total, some = tokens * share, 0.0, 0.0
    reach = 12 * math.sqrt(mean) + 12
    for slots in range(max(1, int(mean - reach)), min(tokens, int(mean + reach)) + 1):  # the binomial distribution
        log = (math.lgamma(tokens + 1) - math.lgamma(slots + 1) - math.lgamma(tokens - slots + 1)
               + slots * math.log(share) + (tokens - slots) * math.log1p(-share))
        total, some = total + math.exp(log) * math.ceil(slots / n), some + math.exp(log)
    return total / some


def most_groups(slots: int, experts: int, tokens: int) -> int:
    """Upper bound on the number of groups."""
    return min(experts, slots) + slots // tokens


def table_lengths(slots: int, experts: int, tokens: int) -> list[int]:
    """A slot's expert and number there; slots per expert and of the experts before; a group's expert, place and info;
    slots ordered by expert; the factors of a group's rows (all but bfloat16); groups."""
    groups = most_groups(slots, experts, tokens)
    return [-(-n // 32) * 32 for n in (slots, experts, experts, groups, groups, groups, slots + tokens, tokens, 1)]


def scale_lines(ring: Ring, cols: int, rows: int) -> tuple[int, int]:
    """How many lines of how many scales, a multiple of 128 bytes, hold those of `rows` rows.

    Scales that several rows share begin anywhere in the first line.
    """
    if ring.rows > 1:
        line = 16 // ring.dtype.itemsize  # the least of a copy
        return -(-(cols // ring.cols + line - 1) // (8 * line)) * 8, line
    of_rows = ROWS // 2 * cols // ring.cols  # of 32 rows, where a copy may begin
    line = 256 if of_rows % 256 == 0 else 64
    whole = max(line, 128 // ring.dtype.itemsize)
    return -(-(rows * cols // ring.cols) // whole) * whole // line, line


def plan_tables(ids: jax.Array, experts: int, tokens: int) -> tuple[jax.Array, ...]:
    """The groups of a batch, in order, as the kernels compute them for themselves: plain form, for the interpreter.

    Args:
      ids: int32 [slots]; ids outside [0, experts) belong to no group.
      experts: E.
      tokens: most slots of a group.

    Returns:
      expert, place, info (int32 [most_groups]: a group's expert, where its slots are in `order`, and how many, plus
      65536 * pass, which counts from 1 where the expert has several groups and is 0 where not; entries beyond the last
      group hold anything), order (int32 [slots], the slots by expert), and the number of groups, int32.

    Example:
      >>> import jax.numpy as jnp
      >>> expert, place, info, order, total = plan_tables(jnp.array([5, 2, 5, -1, 5]), experts=8, tokens=2)
      >>> int(total), expert.tolist()[:3], place.tolist()[:3], order.tolist()[:4]
      (3, [2, 5, 5], [0, 1, 3], [1, 0, 2, 4])
      >>> [divmod(i, 65536) for i in info.tolist()[:3]]
      [(0, 1), (1, 2), (2, 1)]
    """
    e = jnp.arange(experts, dtype=jnp.int32)
    hits = ids[:, None] == e
    count = jnp.sum(hits, axis=0, dtype=jnp.int32)
    passes = (count + jnp.int32(tokens - 1)) // jnp.int32(tokens)
    end, begin = lax.cumsum(passes), lax.cumsum(count) - count
    group = jnp.arange(most_groups(len(ids), experts, tokens), dtype=jnp.int32)[:, None]
    mine = (group >= end - passes) & (group < end)

    def of_group(values):
        return jnp.sum(jnp.where(mine, values, jnp.int32(0)), axis=1, dtype=jnp.int32)

    q = group[:, 0] - of_group(end - passes)
    size = jnp.minimum(of_group(count) - q * jnp.int32(tokens), jnp.int32(tokens))
    number = jnp.where(of_group(passes) == 1, jnp.int32(0), q + jnp.int32(1))
    rank = jnp.sum(jnp.where(hits, begin + lax.cumsum(hits.astype(jnp.int32)) - 1, 0), axis=1, dtype=jnp.int32)
    slot = jnp.arange(len(ids), dtype=jnp.int32)
    at = (rank == slot[:, None]) & jnp.any(hits, axis=1)
    order = jnp.sum(jnp.where(at, slot, jnp.int32(0)), axis=1, dtype=jnp.int32)
    return of_group(e), of_group(begin) + q * jnp.int32(tokens), number << 16 | size, order, end[-1]


def check_sizes(name: str, n: int, cols: int, T: int, K: int, E: int, format: str, matrices: int,
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
    config = config or SharedConfig.heuristic(T, K, E, cols, format, matrices)
    check_config(config, cols, format, slots, E, matrices)
    return config


def check_config(config: SharedConfig, cols: int, format: str, slots: int, experts: int, matrices: int) -> None:
    """Refuses a config that does not fit the shape or the device."""
    checks.config_type(config, (SharedConfig,))
    checks.positive_integers(config, flags=("wgmma",))
    ring = STREAM_FORMATS[format].ring
    if ring and scale_lines(ring, cols, ROWS // matrices)[0] > MOST_LINES:
        raise UnsupportedError(
            f"experts: got {format} rows of {cols} columns, and 'shared_decode' cannot copy the scales of 64 of them "
            f"at once; {checks.WAY_OUT}")
    least = _least_chunk(format)
    if not (config.tokens in range(8, 65, 8) and config.chunk >= least and config.chunk % least == 0
            and config.chunk <= 256 * 64 and config.stages >= 2 and config.warpgroups <= 8
            and cols % (config.chunk * config.warpgroups * config.panels) == 0
            and config.warpgroups * config.stages <= MOST_BARRIERS):
        raise ArgumentError(
            f"config: got {config}; tokens must be a multiple of 8 up to 64, chunk of {least}, stages at least 2, "
            f"warpgroups at most 8, chunk * warpgroups * panels a divisor of {cols}, warpgroups * stages at most "
            f"{MOST_BARRIERS}")
    need = config.shared_bytes(cols, format, slots, experts, matrices)
    if need * config.ctas_per_sm > SHARED_BYTES:
        raise ArgumentError(f"config: {config} takes {need} bytes of shared memory per CTA, an SM has {SHARED_BYTES}")


def format_of(name: str, w: Weight) -> str:
    """The format of a weight, a key of `STREAM_FORMATS`, if the kernels read it."""
    format = checks.format_of(name, w)
    if not isinstance(w, QuantizedArray):
        return format
    format = stream_format.key(format, w.scales.dtype)
    ring = STREAM_FORMATS[format].ring
    if ring and ring.rows > 1:
        lines, line = scale_lines(ring, w.shape[-1], ROWS)
        size = math.prod(w.scales.shape)
        if w.shape[-1] % 128 or w.shape[-2] % 128 or size % line or size < lines * line:
            raise UnsupportedError(
                f"{name}: got {format} {w.shape} with scales {w.scales.shape}, 'shared_decode' needs multiples of 128 "
                f"and at least {lines * line} scales, a multiple of {line}; {checks.WAY_OUT}")
    return format


def check_x(dtype, format: str) -> None:
    """Refuses activations that weights of a format cannot meet."""
    if jnp.dtype(dtype) not in checks.HALF:
        raise UnsupportedError(f"x: got {jnp.dtype(dtype)}, 'shared_decode' takes bfloat16 or float16; "
                               f"{checks.WAY_OUT}")
    if jnp.dtype(dtype) == jnp.float16 and not STREAM_FORMATS[format].half:
        raise UnsupportedError(f"x: got float16 with {format} weights, 'shared_decode' would round it to bfloat16; "
                               f"cast x or the weights, or {checks.WAY_OUT}")


def _least_chunk(format: str) -> int:
    ring = STREAM_FORMATS[format].ring
    return max(64, ring.cols) if ring else 64


def weight_operands(w: Weight) -> tuple[jax.Array, ...]:
    """Views of a weight [E, n, cols] in the shapes the kernel loads from: values, the scales of its ring, factors.

    Reshapes only, no copy.
    """
    if not isinstance(w, QuantizedArray):
        return (w.reshape(-1, w.shape[2]),)
    row, parts = STREAM_FORMATS[stream_format.key(w.format, w.scales.dtype)], [w.values.reshape(-1, w.values.shape[2])]
    if row.ring:
        _, line = scale_lines(row.ring, w.shape[2], ROWS)
        parts.append(lax.bitcast_convert_type(w.scales, row.ring.dtype).reshape(-1, line))
    if row.factor:
        parts.append((w.scales if w.global_scale is None else w.global_scale).reshape(-1))
    return tuple(parts)


def grid_size(config: SharedConfig, interpret) -> int:
    """CTAs on the default device; two where the kernel is interpreted."""
    if interpret is not None:
        return 2
    sms = getattr(jax.devices()[0], "core_count", H200_SMS) if jax.default_backend() == "gpu" else H200_SMS
    return sms * config.ctas_per_sm * config.waves
