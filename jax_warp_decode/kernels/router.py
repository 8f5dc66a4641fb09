"""moe_router: ids, weights = top-k of softmax(w_router @ x[t]), optionally renormalised, in one launch.

Ownership: a cluster of CTAs serves one token, a warp owns `rows` experts from the first byte to the stored weight. It
streams their rows against the token's activation, reduces with a butterfly, and sends the logits to every CTA of the
cluster (distributed shared memory). Then it looks up the rank of its own experts: how many of the E logits come first,
the lower id among equal ones. An expert with a rank below K is chosen, and its rank is its slot. Nothing is sorted, and
no step is serial in K. A second exchange, of the chosen scores, gives the sum to divide by.

Every row is summed in the same order, so equal rows tie exactly.

`normed_moe_router` takes the RMSNorm before the router along, while its first weights are on their way: every warp
norms the whole token for itself, the warpgroups of the cluster share the work of storing it. It routes on the
normalised values as they are stored, rounded.

Grid: (token), cluster: (part of the experts), warpgroups side by side.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode import compat
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import describe, is_float_array
from jax_warp_decode.gradients import without_gradient
from jax_warp_decode.kernels import checks
from jax_warp_decode.kernels.cluster_exchange import ClusterExchange, InterpretedExchange
from jax_warp_decode.kernels.kernel_format import LOAD_BYTES
from jax_warp_decode.kernels.prefetch import prefetch_lines
from jax_warp_decode.kernels.row_norm import RowNorm, walk
from jax_warp_decode.kernels.tile import LANES, WARPS, RowTile
from jax_warp_decode.routers import Router, order_key

FORMATS = {2: "bf16", 4: "f32"}  # of the weight, by its bytes per value

MAX_EXPERTS, MAX_K = 512, 32
CLUSTERS = (1, 2, 4, 8, 16)  # CTAs; CUDA promises 8 on every GPU that has clusters, Hopper and Blackwell have 16
MAX_WARPGROUPS = 8  # 1024 threads
MOST_CTAS = 64  # of all tokens together, if smaller clusters can do it: 8 tokens are faster on clusters of 8 than of 16
MAX_ROWS = 4  # experts per warp; it compares each with all E logits in registers
X_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
W_DTYPES = (*X_DTYPES, jnp.dtype(jnp.float32))
WAY_OUT = "call route_tokens, which takes another path, or route on logits of your own"
_INT32_MIN, _INT32_MAX = np.int32(-(2**31)), np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How `moe_router` spreads a token's experts.

    Attributes:
      cluster: CTAs per token: 2, 4, 8 or 16; 1 in the interpreter only.
      warpgroups: warpgroups per CTA; a warp owns E / (4 * cluster * warpgroups) experts, a whole number.
      unroll: steps along a row whose loads are issued before any arithmetic.
    """

    cluster: int
    warpgroups: int
    unroll: int

    @classmethod
    def heuristic(cls, T: int, E: int, H: int, itemsize: int, normed: bool = False) -> "RouterConfig":
        """What was fastest on an H200 for 1 to 8 tokens (bench/results/router-sweep.json); its like for other sizes."""

        def cost(pair):
            cluster, warpgroups = pair
            rows = E // (WARPS * cluster * warpgroups)
            return (
                cluster < 2,  # for the interpreter
                rows > MAX_ROWS,  # refused
                rows > 2,
                min(T, 8) * cluster > MOST_CTAS,
                -cluster,  # the most CTAs
                warpgroups < 2,
                warpgroups if rows <= 2 else rows)  # then the fewest warps, or the fewest experts of each

        pairs = [(c, g) for c in CLUSTERS for g in range(1, 6) if E % (WARPS * c * g) == 0]
        cluster, warpgroups = min(pairs, key=cost)
        rows = E // (WARPS * cluster * warpgroups)
        # A norm holds x and its gain beside the weights: half as many steps where a thread has 128 registers or less.
        in_flight = 4 if normed and warpgroups > 2 else 8 // rows
        return cls(cluster, warpgroups, unroll=min(RowTile(H, FORMATS[itemsize], LANES, rows).steps, max(1, in_flight)))

    def rows(self, E: int) -> int:
        """Experts per warp, or 0 if the experts cannot be spread evenly."""
        per_round = WARPS * self.cluster * self.warpgroups
        return 0 if E % per_round else E // per_round


@dataclasses.dataclass(frozen=True)
class _Ranking:
    """Layouts of a warp that looks at all E logits at once: lane l holds logits l * per_lane ... of every row."""

    experts: int
    rows: int

    @property
    def per_lane(self) -> int:
        return max(2, 1 << (math.ceil(self.experts / LANES) - 1).bit_length())

    @property
    def shape(self) -> tuple[int, int]:
        """Of all logits; those from E on do not exist."""
        return LANES, self.per_lane

    @property
    def layout(self):
        """(rows of the warpgroup, lanes, per_lane)"""
        tile = (WARPS, LANES, min(self.per_lane, LOAD_BYTES // 4))
        return plgpu.Layout.TILED(plgpu.Tiling((tile,)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    @property
    def all_layout(self):
        return self.layout.reduce(0)

    @property
    def own_layout(self):
        return self.layout.reduce(2).reduce(1)

    def over_all(self, own: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(own, (own.shape[0], *self.shape), (0,)), self.layout)

    def over_own(self, everything: jax.Array) -> jax.Array:
        shape = (WARPS * self.rows, *self.shape)
        return plgpu.layout_cast(lax.broadcast_in_dim(everything, shape, (1, 2)), self.layout)


def _to_float(key: jax.Array) -> jax.Array:
    """The float32 of an order key; INT32_MAX is NaN."""
    return lax.bitcast_convert_type(jnp.where(key < 0, _INT32_MIN - key, key), jnp.float32)


@functools.cache
def _build(T: int, E: int, H: int, K: int, x_dtype, itemsize: int, eps: float | None, renormalize: bool,
           config: RouterConfig, interpret):
    """One jitted kernel per static configuration, so that equal layers share one trace and one compiled kernel.

    With an eps, x is normalised first: its gain is a second operand, and the normalised x a third result.
    """
    rows = RowTile(H, FORMATS[itemsize], LANES, config.rows(E))
    norm = None if eps is None else RowNorm(rows, config.unroll, eps, interpret is not None)
    ranking = _Ranking(E, config.rows(E))
    zero, one = np.float32(0), np.float32(1)

    def body(x_ref, *refs):
        (*gain_refs, w_ref), (ids_ref, weights_ref, *h_refs), (logits_ref, scores_ref, barriers_ref) = (
            (refs[:2], refs[2:5], refs[5:]) if norm else (refs[:1], refs[1:3], refs[3:]))
        token = lax.axis_index("token")
        row_tile = lax.axis_index("part") * config.warpgroups + lax.axis_index("warpgroup")
        ids_ref, weights_ref = ids_ref.at[token], weights_ref.at[token]
        if interpret:
            exchange = InterpretedExchange(barriers_ref)
            logits_ref, scores_ref = logits_ref.at[token], scores_ref.at[token]
        else:
            exchange = ClusterExchange(config.cluster, ranking.own_layout, barriers_ref)
        if norm and not interpret:  # the compiler loads the weights where it needs them, after the norm
            prefetch_lines(w_ref.at[0, rows.row_slice(row_tile)], rows.out_rows * H * itemsize)
            prefetch_lines(gain_refs[0], H * gain_refs[0].dtype.itemsize)
        exchange.start((E, K if renormalize else 0))

        def weights(step):
            return rows.load((w_ref,), jnp.int32(0), row_tile, step)

        def vector(step):
            return rows.load_vector(x_ref, (token,), step)

        first = range(min(config.unroll, rows.steps))
        early, vectors = list(map(weights, first)), list(map(vector, first))
        if norm:
            gains = [rows.load_vector(gain_refs[0], (), step) for step in first]
            vector, vectors = _normalised(norm, vector, vectors, gains, gain_refs[0], h_refs[0].at[token], row_tile,
                                          config.cluster * config.warpgroups)

        def add(steps, loaded, total):
            for step, (raw, piece) in zip(steps, loaded, strict=True):
                total = total + rows.dot(raw, rows.widen(piece), step)
            return total

        own = rows.reduce(walk(rows, config.unroll, list(zip(early, vectors, strict=True)),
                               lambda step: (weights(step), vector(step)), add, rows.zeros()))
        expert = plgpu.broadcasted_iota(jnp.int32, own.shape, 0, layout=ranking.own_layout) + row_tile * own.shape[0]
        exchange.share(0, logits_ref, expert, own, E)

        everything = exchange.load(logits_ref, ranking.shape, ranking.all_layout)
        other = (plgpu.broadcasted_iota(jnp.int32, ranking.shape, 0, layout=ranking.all_layout) * ranking.per_lane
                 + plgpu.broadcasted_iota(jnp.int32, ranking.shape, 1, layout=ranking.all_layout))
        key = jnp.where(other < E, order_key(everything), _INT32_MIN)
        # Ahead is a larger key, or an equal one with a lower id.
        least = ranking.over_all(order_key(own)) - jnp.where(
            ranking.over_own(other) < ranking.over_all(expert), np.int32(1), np.int32(0))
        ahead = jnp.where(ranking.over_own(key) > least, np.int32(1), np.int32(0))
        rank = jnp.sum(jnp.sum(ahead, axis=2), axis=1)
        exchange.store(ids_ref, rank, expert, K)

        # NaN counts as the largest here, so that it reaches every weight of its token.
        top_key = jnp.where(key == _INT32_MIN + np.int32(1), _INT32_MAX, key)
        top = _to_float(jnp.max(jnp.max(ranking.over_own(top_key), axis=2), axis=1))
        top = jnp.where(top == np.float32(-np.inf), zero, top)
        score = jnp.exp(own - top)
        if renormalize:
            exchange.share(1, scores_ref, rank, score, K)
            total = functools.reduce(lambda total, k: total + scores_ref[k], range(1, K), scores_ref[0])
        else:
            scores = jnp.exp(ranking.over_own(everything) - ranking.over_all(top))
            scores = jnp.where(ranking.over_own(other) < E, scores, zero)
            total = jnp.sum(jnp.sum(scores, axis=2), axis=1)
        exchange.store(weights_ref, rank, score / jnp.where(total == 0, one, total), K)

    out = [jax.ShapeDtypeStruct((T, K), jnp.int32), jax.ShapeDtypeStruct((T, K), jnp.float32)]
    if norm:
        out.append(jax.ShapeDtypeStruct((T, H // rows.vec, rows.vec), x_dtype))
    shared = (math.prod(ranking.shape), K)  # floats: logits, scores
    if interpret:
        out += [jax.ShapeDtypeStruct((T, n), jnp.float32) for n in shared]
        scratch = [plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=config.warpgroups)]
    else:
        scratch = [*(plgpu.SMEM((n,), jnp.float32) for n in shared), plgpu.SMEM((4,), jnp.int32)]
    return without_gradient(jax.jit(plgpu.kernel(
        body,
        out_type=tuple(out),
        scratch_types=tuple(scratch),
        grid=(T,),
        grid_names=("token",),
        cluster=(config.cluster,),
        cluster_names=("part",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        kernel_name="normed_moe_router" if norm else "moe_router",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )), "moe_router: has no gradient; differentiate route on logits of your own")


def _normalised(norm: RowNorm, load, early: list, gains: list, gain_ref, h_ref, row_tile, warpgroups: int):
    """Loads of x, and what is loaded already, both normalised. Stores this warpgroup's share of the whole token."""
    scale = norm.scale(early, load)

    def normalised(step):
        return norm.apply(load(step), scale, norm.rows.load_vector(gain_ref, (), step))

    def store(i, _):  # where the last step starts early, two warpgroups store the same bits
        step = row_tile + i * jnp.int32(warpgroups)
        norm.store(h_ref, step, normalised(step))

    steps = jnp.int32(norm.rows.steps + warpgroups - 1) - row_tile
    lax.fori_loop(jnp.int32(0), lax.div(steps, jnp.int32(warpgroups)), store, None)
    return normalised, [norm.apply(piece, scale, gain) for piece, gain in zip(early, gains, strict=True)]


def moe_router(
    x: jax.Array,
    w_router: jax.Array,
    k: int,
    *,
    renormalize: bool = True,
    config: RouterConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array]:
    """Softmax router of few tokens in one launch: logits, softmax, the K largest and their weights, all in float32.

    Same choices as `routing.route` on the logits of this kernel: distinct ids in range for any input bits, best first,
    ties to the lower id (equal rows of w_router tie exactly), NaN below everything; weights as there. A NaN logit of
    any expert, chosen or not, makes the weights of its token NaN. Logits of another program may differ in the last
    bits, as it adds in another order.

    Args:
      x: [T, H] bfloat16 or float16.
      w_router: [E, H] bfloat16, float16 or float32.
      k: experts per token, 1 to 32, at most E.
      renormalize: whether the K chosen scores are divided by their sum.
      config: `RouterConfig`; None takes `RouterConfig.heuristic`, or one warpgroup when interpreted.
      interpret: True (or `InterpretGPUParams`) runs the kernel on the CPU, for tests. The exchange between CTAs then
        goes through global memory and a cluster barrier; everything else is the source that runs on a GPU.

    Returns:
      ids int32 [T, k] and weights float32 [T, k].

    Raises:
      ArgumentError: wrong rank, shape or dtype, a quantised array, k out of range, or a config that does not fit.
      UnsupportedError: E or H that the kernel cannot spread over a cluster. It takes E in multiples of 8 up to 512 that
        divide evenly enough, and H in multiples of 32 from one step of a warp (256, or 128 with float32 weights).

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.router import moe_router
      >>> w = jnp.zeros((8, 256), jnp.bfloat16).at[:4, 0].set(jnp.array([1, 3, 2, 3], jnp.bfloat16))
      >>> ids, weights = moe_router(jnp.ones((1, 256), jnp.bfloat16), w, 2, interpret=True)
      >>> ids.tolist(), weights.tolist()
      ([[1, 3]], [[0.5, 0.5]])
    """
    ids, weights = _run(x, None, None, w_router, k, renormalize, config, interpret)
    return ids, weights


def normed_moe_router(
    x: jax.Array,
    gain: jax.Array,
    w_router: jax.Array,
    k: int,
    *,
    eps: float,
    renormalize: bool = True,
    config: RouterConfig | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The norm before the experts and their router, in one launch.

    Args:
      x: [T, H] bfloat16 or float16, before the norm.
      gain: [H] of the RMSNorm, bfloat16, float16 or float32.
      eps: added to the mean square.
      w_router, k, renormalize, config, interpret: as in `moe_router`.

    Returns:
      ids and weights of `moe_router(h, ...)`, bit for bit, and h [T, H] = x / sqrt(mean(x ** 2) + eps) * gain, computed
      in float32 and rounded to the dtype of x.

    Raises:
      ArgumentError, UnsupportedError: as `moe_router`, and for a gain of the wrong shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.kernels.router import normed_moe_router
      >>> x, gain = jnp.full((1, 256), 2, jnp.bfloat16), jnp.ones(256, jnp.bfloat16).at[0].set(3)
      >>> w = jnp.zeros((8, 256), jnp.bfloat16).at[:4, 0].set(jnp.array([1, 3, 2, 3], jnp.bfloat16))
      >>> ids, weights, h = normed_moe_router(x, gain, w, 2, eps=0.0, interpret=True)
      >>> ids.tolist(), weights.tolist(), h[0, :3].tolist()
      ([[1, 3]], [[0.5, 0.5]], [3.0, 1.0, 1.0])
    """
    ids, weights, h = _run(x, gain, float(eps), w_router, k, renormalize, config, interpret)
    return ids, weights, h


def _run(x, gain, eps, w_router, k, renormalize, config, interpret) -> tuple[jax.Array, ...]:
    checks.interpret_type(interpret)
    T, E, H, k = _check(x, w_router, k)
    if eps is not None:
        if not is_float_array(gain) or jnp.dtype(gain.dtype) not in W_DTYPES or gain.shape != (H,):
            raise ArgumentError(f"gain: got {describe(gain)}, expected [H] = [{H}] of "
                                f"{' or '.join(map(str, W_DTYPES))}")
    itemsize = jnp.dtype(w_router.dtype).itemsize
    if T == 0:
        return jnp.zeros((0, k), jnp.int32), jnp.zeros((0, k), jnp.float32), *([] if gain is None else [x])
    if refused := refusal(E, H, itemsize):
        raise UnsupportedError(f"w_router: {refused}; {WAY_OUT}")
    if config is None:  # the interpreter runs every warpgroup in a thread, and stands still if the CPU has too few
        config = RouterConfig(1, 1, unroll=1) if interpret else RouterConfig.heuristic(
            T, E, H, itemsize, gain is not None)
    if not isinstance(config, RouterConfig):
        raise ArgumentError(f"config: got {type(config).__name__}, expected RouterConfig or None")
    checks.positive_integers(config)
    # Without a cluster the stores into other CTAs' memory are an illegal instruction, also where the CTA is its own.
    least = 1 if interpret else 2
    fits = (config.cluster in CLUSTERS and config.cluster >= least
            and 1 <= config.warpgroups <= MAX_WARPGROUPS and config.unroll >= 1)
    if not fits or not 1 <= config.rows(E) <= (E if interpret else MAX_ROWS):
        raise ArgumentError(
            f"config: got {config}, expected cluster in {CLUSTERS} of at least {least}, warpgroups 1 to "
            f"{MAX_WARPGROUPS}, unroll from 1, and E / (4 * cluster * warpgroups) whole, up to {MAX_ROWS} for E = {E}")
    kernel = _build(T, E, H, k, jnp.dtype(x.dtype), itemsize, eps, bool(renormalize), config,
                    compat.interpret_params(interpret))
    rows = RowTile(H, FORMATS[itemsize], LANES, config.rows(E))
    vectors = [rows.vector_operand(a) for a in (x, gain) if a is not None]
    with checks.launching("moe_router"):
        ids, weights, *h = kernel(*vectors, *rows.weight_operands(w_router[None]))
    return ids, weights, *(a.reshape(T, H) for a in h[:gain is not None])


def refusal(E: int, H: int, itemsize: int) -> str:
    """Why the kernel cannot take a router weight [E, H], or an empty string."""
    least = LANES * LOAD_BYTES // itemsize
    if not 0 < E <= MAX_EXPERTS or E % (2 * WARPS):  # at least two CTAs
        return f"got E = {E}, expected a multiple of {2 * WARPS} up to {MAX_EXPERTS}"
    if H % LANES or H < least:
        return f"got H = {H}, expected a multiple of {LANES} of at least {least}"
    if RouterConfig.heuristic(1, E, H, itemsize).rows(E) > MAX_ROWS:
        return f"got E = {E}, which does not spread evenly over a cluster, expected a multiple of 8, better of 64"
    return ""


def _check(x, w_router, k) -> tuple[int, int, int, int]:
    for name, a, axes, dtypes in (("x", x, "[T, H]", X_DTYPES), ("w_router", w_router, "[E, H]", W_DTYPES)):
        if not hasattr(a, "dtype") or not hasattr(a, "ndim"):
            raise ArgumentError(f"{name}: got {type(a).__name__}, expected an array {axes}")
        if a.ndim != 2:
            raise ArgumentError(f"{name}: got shape {a.shape}, expected {axes}")
        checks.dtype_of(name, a, dtypes, WAY_OUT)
    (T, H), (E, _) = x.shape, w_router.shape
    if w_router.shape[1] != H:
        raise ArgumentError(
            f"w_router: got shape {w_router.shape}, expected ({E}, {H}) = [E, H] with H from x {x.shape}")
    k = Router(k).k
    if k > min(E, MAX_K):
        raise ArgumentError(f"k: got {k}, expected at most {min(E, MAX_K)} (E = {E}, and {MAX_K} in this kernel)")
    return T, E, H, k


def aot_cases():
    """Cases for a deviceless compile, see tests/aot.py: (name, function, arguments, limits)."""
    for E, H, K, dtype in ((128, 2048, 8, jnp.bfloat16), (256, 2048, 8, jnp.float32), (512, 2048, 10, jnp.bfloat16),
                           (320, 7168, 8, jnp.bfloat16)):
        x, gain, w = (jax.ShapeDtypeStruct(*s) for s in (((2, H), jnp.bfloat16), ((H,), jnp.bfloat16), ((E, H), dtype)))
        fn = functools.partial(normed_moe_router, k=K, eps=1e-6)
        # Barriers and shared memory as in bench/tune_router.py.
        yield (f"normed-router-E{E}-H{H}-{w.dtype}", fn, (x, gain, w),
               dict(max_registers=168, min_shuffles=10, max_barriers=3, max_shared=16))
