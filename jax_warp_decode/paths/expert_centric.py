"""The conventional strategy: sort the slots by expert, multiply group by group, put the rows back.

Eight stages, in order: route (the caller's), `align`, `gather`, `quantise`, `gate_up`, `activate`, `down`, `combine`.
With MXFP8 activations, `quantise` runs a second time before `down`. Each is a function of its own and a named scope.

Where nothing is differentiated, two kernels of our own run the same on Hopper, see `grouped_layer`; on data-centre
Blackwell there is nothing else.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode import varying
from jax_warp_decode.activations import Activation
from jax_warp_decode.device import BLACKWELL, capability
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.experts import MATRIX_OF, ExpertWeights
from jax_warp_decode.formats import FORMATS, QuantizedArray
from jax_warp_decode.gradients import of_quantised, reverse_only, widen
from jax_warp_decode.paths import grouped_bias, grouped_gemm, grouped_layer
from jax_warp_decode.paths.grouped_plan import IN_BOUNDS
from jax_warp_decode.paths.quantise import quantise
from jax_warp_decode.routing import Routing, is_routed

REVERSE_ONLY = ("strategy: 'expert_centric' has gradients in reverse mode only (grad, vjp, of any order); use "
                "strategy='reference' for jvp, jacfwd, linearize and hessian")


def device_refusal() -> str:
    """Why the default device cannot run it, whatever the sizes, or an empty string."""
    return "" if capability() in BLACKWELL else grouped_gemm.device_refusal()


def refusal(experts: ExpertWeights, x_dtype) -> str:
    """Why the default device cannot run it with these operands, without a gradient, or an empty string."""
    if operand_dtype(x_dtype, experts.format) != jnp.bfloat16 or not capability():
        return ""  # a scan, on any device
    if capability() not in BLACKWELL:
        return grouped_gemm.refusal(experts.intermediate, experts.hidden)
    if why := grouped_layer.refusal(x_dtype, experts):
        return (f"experts: the kernels for compute capability {capability()} do not take them: {why}; use "
                "strategy='auto' or 'reference'")
    return ""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alignment:
    """The T * K slots in the order of their experts; slots that are not routed come last, in no group.

    Attributes:
      order: int32 [T * K], the slot (token * K + k) in each row.
      position: int32 [T, K], the row of each slot.
      group_sizes: int32 [E], rows of each expert.
    """

    order: jax.Array
    position: jax.Array
    group_sizes: jax.Array


def run(x: jax.Array, routing: Routing, experts: ExpertWeights, *, activation: Activation, out_dtype=None,
        activation_format: str | None = None) -> jax.Array:
    """The routed experts of one layer: x [T, H] -> y [T, H] in out_dtype, None for that of x.

    See `moe` for the arguments.

    With bfloat16 x (and weights that are not float16), products take bfloat16 operands and accumulate in float32. On a
    GPU the intermediate and the rows of the down projection are rounded to bfloat16 (and, where a gradient is asked
    for, gate and up), elsewhere only the intermediate.
    float16 and float32 are computed in float32, whose range no intermediate leaves: exact, but a scan over all experts.
    The combine is float32 in a fixed order: a row of y does not depend on the other tokens.

    With activation_format="mxfp8", rows are quantised to MXFP8 before both projections, as conventional MXFP8 serving
    does (OCP MX v1.0). E4M3 times a power of two is exact in bfloat16, so this has the numerics of an MXFP8 x MXFP8
    product with float32 accumulation; the kernels of `grouped_layer` round the intermediate to bfloat16 before. It has
    no gradient.

    Differentiable in reverse mode, any number of times, with respect to x, routing weights and dense expert weights.
    On a GPU the products of the backward pass are bfloat16 with float32 accumulation too, each result rounded once to
    bfloat16, also where the weights are float32; the gradients of biases and routing weights are float32 sums. Every
    sum runs in a fixed order, so that gradients are reproducible. What is not routed has a gradient of exactly zero.

    Temporaries: intermediates [T * K, I] and results [T * K, H]; where the kernels of `grouped_layer` do not run (see
    its `temporary_bytes`), gathered rows [T * K, H] too. On a GPU, MXFP8 weights are read as they are. Other quantised
    weights, and all of them where a gradient is asked for, are widened before each product, all E experts at once.

    Raises:
      UnsupportedError: sizes the grouped GEMM cannot take on a GPU, H or I that is no multiple of 32 with MXFP8
        activations, forward-mode differentiation, or a gradient asked of quantised weights.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, Routing
      >>> from jax_warp_decode.activations import get_activation
      >>> w = jnp.full((2, 1, 1), 1e3)
      >>> experts = ExpertWeights(w, w / 1e6, jnp.full((2, 1, 1), 3.0))     # silu(1000) * 0.001 = 1
      >>> run(jnp.ones((1, 1)), Routing(jnp.array([[1, -1]]), jnp.array([[0.5, jnp.nan]])), experts,
      ...     activation=get_activation("silu")).tolist()
      [[1.5]]
    """
    if x.shape[0] == 0:
        return jnp.zeros_like(x, out_dtype)
    if activation_format:
        _check_blocks(activation_format, experts)
    operands = x, routing, experts
    # A custom_vjp must return gradients that vary as its arguments do: let all vary alike; JAX sums what was equal.
    x, routing, experts = _reverse_only(*varying.like(operands, operands))
    if grouped_layer.refusal(x.dtype, experts):
        y = stages(x, routing, experts, activation=activation, activation_format=activation_format)
    else:
        arrays = {"x": x, "weights": routing.weights, **experts.weights, **experts.biases}
        fixed = {name: of_quantised(lambda w: w, a) for name, a in arrays.items() if isinstance(a, QuantizedArray)}
        floats = {name: a for name, a in arrays.items() if name not in fixed}
        y = _fused(activation, activation_format)(floats, {"ids": routing.ids, **fixed})
    return y.astype(out_dtype or x.dtype)


def stages(x, routing, experts, *, activation, activation_format=None, product=grouped_gemm.grouped_gemm) -> jax.Array:
    """The eight stages one after the other, float32 [T, H]. What is differentiated, and what any device can run.

    product: multiplies rows by the weights of their expert.
    """
    alignment = align(routing.ids, experts.num_experts)
    rows = gather(x, alignment)
    if activation_format:
        rows = quantise(rows, activation_format)
    dtype = operand_dtype(x.dtype, experts.format)
    gate, up = gate_up(rows, experts, alignment, dtype, product)
    h = activate(gate, up, activation)
    if activation_format:
        h = quantise(h, activation_format)
    out = down(h, experts, alignment, dtype, product)
    return combine(out, alignment, routing, experts.num_experts)


@functools.cache
def _fused(activation, activation_format):
    """`grouped_layer` on CUDA, `stages` elsewhere and in gradients: (arrays with a gradient, without one) -> y."""

    def unpack(floats, fixed):
        named = {name: None for name in ("w_gate", *MATRIX_OF)} | floats | fixed
        x, routing = named.pop("x"), Routing(named.pop("ids"), named.pop("weights"))
        return x, routing, ExpertWeights(**named)

    def in_stages(floats, fixed, **options):
        return stages(*unpack(floats, fixed), activation=activation, activation_format=activation_format, **options)

    def cuda(floats, fixed):
        op = grouped_layer.op(activation, activation_format=activation_format)
        return varying.like(op(*unpack(floats, fixed)), floats, fixed)

    def either(*arrays):
        # Beside a Blackwell, other products refuse to be traced.
        elsewhere = functools.partial(in_stages, product=grouped_gemm.scanned)
        return lax.platform_dependent(
            *arrays, cuda=cuda, default=elsewhere if capability() in BLACKWELL else in_stages)

    run = jax.custom_vjp(either)
    run.defvjp(lambda floats, fixed: jax.vjp(lambda floats: in_stages(floats, fixed), floats),
               lambda pullback, cotangent: (*pullback(cotangent), None))
    return run


def operand_dtype(x_dtype, weight_format: str):
    """What both projections compute in: bfloat16 for bfloat16 x, unless the weights are float16; else float32."""
    return jnp.bfloat16 if jnp.dtype(x_dtype) == jnp.bfloat16 and weight_format != "f16" else jnp.float32


@jax.named_scope("align")
def align(ids: jax.Array, num_experts: int) -> Alignment:
    """Sorts the slots of ids [T, K] by expert (stable). Nothing is padded: the grouped GEMM takes any group size."""
    E = jnp.int32(num_experts)
    expert = jnp.where(is_routed(ids, num_experts), ids, E).reshape(-1)
    slot = jnp.arange(expert.size, dtype=jnp.int32)
    expert, order = lax.sort((expert, slot), num_keys=1, is_stable=True)
    position = jnp.zeros_like(order).at[order].set(slot, unique_indices=True, **IN_BOUNDS).reshape(ids.shape)
    is_mine = expert[:, None] == jnp.arange(num_experts, dtype=jnp.int32)
    return Alignment(order, position, jnp.sum(is_mine, axis=0, dtype=jnp.int32))


@jax.custom_vjp
def gather(x: jax.Array, alignment: Alignment) -> jax.Array:
    """Copies x [T, H] into one row per slot, [T * K, H], in the order of the experts."""
    with jax.named_scope("gather"):
        return x.at[_token(alignment)].get(**IN_BOUNDS)


def _gather_backward(alignment, cotangent):
    # JAX would scatter and add, in the dtype of x and on a GPU in any order. The products leave zeros in rows of slots
    # that are not routed.
    dx = jnp.zeros((alignment.position.shape[0], cotangent.shape[1]), jnp.float32)
    for k in range(alignment.position.shape[1]):
        dx += _slot(cotangent, alignment, k).astype(jnp.float32)
    return dx.astype(cotangent.dtype), None


gather.defvjp(lambda x, alignment: (gather(x, alignment), alignment), _gather_backward)


@jax.named_scope("gate_up")
def gate_up(rows: jax.Array, experts: ExpertWeights, alignment: Alignment, dtype, product):
    """Both projections of rows [M, H] in `dtype`; two float32 [M, I], the first None for experts without a gate."""
    return tuple(None if w is None else _project(rows, w, b, alignment.group_sizes, dtype, product)
                 for w, b in ((experts.w_gate, experts.b_gate), (experts.w_up, experts.b_up)))


@jax.named_scope("activate")
def activate(gate: jax.Array | None, up: jax.Array, activation: Activation) -> jax.Array:
    """The activation in float32: [M, I] and [M, I] -> [M, I]."""
    return activation.apply(gate, up)


@jax.named_scope("down")
def down(h: jax.Array, experts: ExpertWeights, alignment: Alignment, dtype, product) -> jax.Array:
    """The down projection of h [M, I] in `dtype`; float32 [M, H]."""
    return _project(h, experts.w_down, experts.b_down, alignment.group_sizes, dtype, product)


def combine(out: jax.Array, alignment: Alignment, routing: Routing, num_experts: int) -> jax.Array:
    """Weighted sum of the K rows of each token, float32 [M, H] -> float32 [T, H], in the order of the slots."""
    with jax.named_scope("combine"):
        return _combine(out, routing.weights, alignment, is_routed(routing.ids, num_experts))


@jax.custom_vjp
def _combine(out, weights, alignment, routed):
    y = jnp.zeros((routed.shape[0], out.shape[1]), jnp.float32)
    for k in range(routed.shape[1]):
        y += _routed_slot(out, alignment, routed, k) * _routed_weights(weights, routed)[:, k, None]
    return y


def _combine_backward(saved, cotangent):
    out, weights, alignment, routed = saved
    of_row = _routed_weights(weights, routed).reshape(-1).at[alignment.order].get(**IN_BOUNDS)
    d_out = cotangent.at[_token(alignment)].get(**IN_BOUNDS) * of_row[:, None]
    d_weights = [jnp.sum(_routed_slot(out, alignment, routed, k) * cotangent, axis=1) for k in range(routed.shape[1])]
    return d_out, jnp.stack(d_weights, axis=1), None, None


_combine.defvjp(lambda *args: (_combine(*args), args), _combine_backward)


def _token(alignment):
    """int32 [M], the token of each row."""
    return alignment.order // jnp.int32(alignment.position.shape[1])


def _slot(rows, alignment, k):
    """[T, ...], the row of every token's slot k."""
    return rows.at[alignment.position[:, k]].get(**IN_BOUNDS)


def _routed_slot(rows, alignment, routed, k):
    # Rows of slots that are not routed were never written: select before any product, in gradients too.
    return jnp.where(routed[:, k, None], _slot(rows, alignment, k), jnp.float32(0))


def _routed_weights(weights, routed):
    return jnp.where(routed, weights, jnp.float32(0))


def _reverse_only(x, routing, experts):
    named = experts.weights | experts.biases
    dense = {name: w for name, w in named.items() if not isinstance(w, QuantizedArray)}
    x, weights, dense = reverse_only((x, routing.weights, dense), REVERSE_ONLY)
    return x, Routing(routing.ids, weights), dataclasses.replace(experts, **dense)


def _project(rows, w, b, group_sizes, dtype, product):
    out = product(rows.astype(dtype), widen(w, dtype), group_sizes)
    return out if b is None else out + grouped_bias.spread(out.shape[0], b, group_sizes)


def _check_blocks(format, experts):
    block = FORMATS[format].block
    bad = [f"{name} = {d}" for name, d in (("H", experts.hidden), ("I", experts.intermediate)) if d % block]
    if bad:
        raise UnsupportedError(f"activation_format: {format!r} needs H and I to be multiples of {block}, got "
                               f"{', '.join(bad)}; use activation_format=None")
