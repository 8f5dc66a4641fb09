"""The inference form of expert_centric: two grouped kernels around one intermediate [R, I], by wgmma or by tcgen05.

    plan    slots sorted by expert, in groups that start at multiples of 8 rows, and tiles of them
    gate_up both projections of the rows of x, biases and the activation in one kernel, rounded to bfloat16
    down    the down projection and its bias, rounded to bfloat16
    combine float32, the K rows of a token in the order of its slots

R is T * K and at most 7 more rows per expert. The kernels for Hopper gather the rows of x, those for data-centre
Blackwell get gathered ones, [R, H]. The gradient goes through the separate stages of `expert_centric`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode.activations import Activation
from jax_warp_decode.device import BLACKWELL, capability
from jax_warp_decode.experts import ExpertWeights, weight_format
from jax_warp_decode.kernels import grouped_matmul, grouped_tcgen05
from jax_warp_decode.kernels.grouped_config import BLOCK, GroupedConfig, Tcgen05Config
from jax_warp_decode.paths import grouped_plan
from jax_warp_decode.paths.grouped_plan import IN_BOUNDS
from jax_warp_decode.paths.quantise import quantise
from jax_warp_decode.routing import Routing, is_routed

ITEMSIZE = {"bf16": 2, "mxfp8": 1}  # of a weight, by format
Config = GroupedConfig | Tcgen05Config


def refusal(x_dtype, experts: ExpertWeights) -> str:
    """Why the kernels cannot take these operands, or an empty string. The device is not asked.

    Example:
      >>> import jax
      >>> from jax_warp_decode import ExpertWeights
      >>> w, w_down = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 128, 192), (8, 192, 128)))
      >>> refusal(jnp.bfloat16, ExpertWeights(w, w, w_down))
      'H = 192 is less than 256'
    """
    if jnp.dtype(x_dtype) != jnp.bfloat16 or experts.format not in ITEMSIZE:
        return f"x {jnp.dtype(x_dtype)} with {experts.format} weights, not bfloat16 with {' or '.join(ITEMSIZE)}"
    for name, size in (("H", experts.hidden), ("I", experts.intermediate)):
        if size % 64:
            return f"{name} = {size} is no multiple of 64"
    least = {"H": (experts.hidden, BLOCK), "I": (experts.intermediate, BLOCK // _matrices(experts))}
    return "; ".join(f"{name} = {size} is less than {most}" for name, (size, most) in least.items() if size < most)


def choose_config(slots: int, experts: ExpertWeights) -> Config:
    """Of both kernels on the default device; where that is no GPU, for Hopper."""
    if capability() in BLACKWELL:
        return Tcgen05Config()
    return GroupedConfig.heuristic(slots, experts.num_experts, ITEMSIZE[experts.format])


def temporary_bytes(tokens: int, experts_per_token: int, experts: ExpertWeights) -> int:
    """Device memory of a call besides its arguments and result, but for indices: intermediate and results.

    Gathered rows of x, where there are any, lie where the results will. With an `activation_format`, so do the rounded
    rows of x, and the intermediate is rounded in place: nothing is added, unless I is more than 6 H and the scales of
    its blocks need more room than the results.

    Example:
      >>> import jax
      >>> from jax_warp_decode import ExpertWeights
      >>> w, w_down = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 768, 2048), (128, 2048, 768)))
      >>> temporary_bytes(4096, 8, ExpertWeights(w, w, w_down)) / 2**20
      180.8125
    """
    slots = tokens * experts_per_token
    rows = grouped_plan.most_rows(slots, experts.num_experts, choose_config(slots, experts).widest)
    return 2 * rows * (experts.hidden + experts.intermediate)


@functools.cache
def op(activation: Activation, configs: tuple[Config, Config] | None = None, make_plan=grouped_plan.plan_on_gpu,
       interpret=None, activation_format: str | None = None):
    """(x [T, H], routing, experts) -> float32 [T, H], with a rule for vmap.

    Args:
      configs: of gate_up and of down, None for those of `choose_config`. Of one kind, with equal widest tiles.
      make_plan: `grouped_plan.plan_on_gpu`, or `plan`.
      activation_format: what both projections get their rows rounded to, or None.
    """

    @jax.custom_batching.custom_vmap
    def run(x, routing, experts):
        return layer(x, routing, experts, activation=activation, configs=configs, make_plan=make_plan,
                     interpret=interpret, activation_format=activation_format)

    @run.def_vmap
    def _(size, mapped, x, routing, experts):
        args = x, routing, experts
        if any(jax.tree.leaves(mapped[2])):
            args = jax.tree.map(lambda a, m: a if m else jnp.broadcast_to(a, (size, *a.shape)), args, tuple(mapped))
            return jax.lax.map(lambda args: run(*args), args), True
        # Shared experts: more tokens of one call.
        x, routing = jax.tree.map(
            lambda a, m: (a if m else jnp.broadcast_to(a, (size, *a.shape))).reshape(-1, a.shape[-1]),
            (x, routing), tuple(mapped[:2]))
        return run(x, routing, experts).reshape(size, -1, x.shape[-1]), True

    return run


def layer(x: jax.Array, routing: Routing, experts: ExpertWeights, *, activation: Activation,
          configs: tuple[Config, Config] | None = None, make_plan=grouped_plan.plan_on_gpu, interpret=None,
          activation_format: str | None = None) -> jax.Array:
    """See `op`."""
    E, (T, K) = experts.num_experts, routing.ids.shape
    if configs is None:
        configs = (choose_config(T * K, experts),) * 2

    def rounded(rows):
        return quantise(rows, activation_format).astype(rows.dtype) if activation_format else rows

    with jax.named_scope("plan"):
        plan = make_plan(routing.ids, E, configs[0].widest)
    with jax.named_scope("gate_up"):
        x = rounded(x)
        rows = (x.at[plan.token].get(**IN_BOUNDS),) if isinstance(configs[0], Tcgen05Config) else (plan.token, x)
        h = _product("moe_grouped_gate_up", rows, plan, (experts.w_gate, experts.w_up),
                     (experts.b_gate, experts.b_up), activation, configs[0], interpret)
    with jax.named_scope("down"):
        out = _product("moe_grouped_down", (rounded(h),), plan, (experts.w_down,), (experts.b_down,),
                       None, configs[1], interpret)
    with jax.named_scope("combine"):
        return combine(out, plan.position, routing, E)


def combine(out: jax.Array, position: jax.Array, routing: Routing, experts: int) -> jax.Array:
    """The weighted sum of the K rows of every token: out [R, H] -> float32 [T, H]."""
    routed = is_routed(routing.ids, experts)
    y = jnp.zeros((routing.ids.shape[0], out.shape[1]), jnp.float32)
    for k in range(routing.ids.shape[1]):
        row = out.at[position[:, k]].get(**IN_BOUNDS).astype(jnp.float32)
        term = row * routing.weights[:, k, None]
        y += jnp.where(routed[:, k, None], term, jnp.float32(0))
    return y


def _product(name, rows, plan, weights, biases, activation, config, interpret):
    named = [(w, b) for w, b in zip(weights, biases, strict=True) if w is not None]
    (E, n, cols), matrices = named[0][0].shape, len(named)
    itemsize = ITEMSIZE[weight_format(named[0][0])]
    if itemsize == 1:
        operands = [w.values for w, _ in named] + [lax.bitcast_convert_type(w.scales, jnp.uint8) for w, _ in named]
    else:
        operands = [w for w, _ in named]
    has_bias = any(b is not None for _, b in named)
    if has_bias:  # up to whole blocks; of what is beyond n, nothing is stored
        padded = n + -n % (BLOCK // matrices)
        operands += [jnp.zeros((E, padded), jnp.float32) if b is None
                     else jnp.pad(b.astype(jnp.float32), ((0, 0), (0, padded - n))) for _, b in named]
    static = name, n, cols, itemsize, matrices, matrices * has_bias, activation
    if isinstance(config, Tcgen05Config):
        kernel = grouped_tcgen05.build(*static, config, interpret)
    else:
        kernel = grouped_matmul.build(*static, len(rows) > 1, config, interpret)
    return kernel(plan.tiles, plan.total, *rows, *operands)


def _matrices(experts):
    return 1 if experts.w_gate is None else 2
