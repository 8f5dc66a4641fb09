"""The shared-decode strategy: every touched expert's weights are read once, for all its tokens.

On Hopper, and on data-centre Blackwell, for which it only compiles so far.
"""

import functools

import jax
import jax.numpy as jnp

from jax_warp_decode.activations import Activation
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.kernels import shared_common
from jax_warp_decode.kernels.shared_common import SharedConfig
from jax_warp_decode.kernels.shared_down import moe_down_shared
from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
from jax_warp_decode.paths.decode_op import decode_op
from jax_warp_decode.routing import Routing

NAME = "shared_decode"
KERNELS = ("moe_gate_up_shared", "moe_down_shared")


def run(x: jax.Array, routing: Routing, experts: ExpertWeights, *, activation: Activation, layer=None,
        out_dtype=None, interpret=False) -> jax.Array:
    """The routed experts of one layer: x [T, H] -> y [T, H] in out_dtype, None for x.dtype. See `moe`.

    Works under `jit`, `lax.scan` and `vmap` over tokens. The kernels have no derivative: differentiating raises
    `UnsupportedError`; train through strategy='expert_centric', from the same parameters. `temporary_bytes` says
    what it allocates.

    Raises:
      UnsupportedError: the kernels cannot use the sizes or the format.
    """
    return _op(activation, jnp.dtype(out_dtype or x.dtype), interpret)(x, routing, experts, layer)


def refusal(tokens: int, experts_per_token: int, experts: ExpertWeights, x_dtype=jnp.bfloat16) -> str:
    """Why `run` cannot take these sizes and formats, or an empty string. Arrays or their shapes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> w = jax.ShapeDtypeStruct((8, 64, 128), jnp.float32)
      >>> refusal(16, 2, ExpertWeights(w, w, jax.ShapeDtypeStruct((8, 128, 64), jnp.float32)))[:19]
      'w_gate: got dtype f'
    """
    if experts.w_gate is None:
        return "the experts have no gate projection, the kernels need one"
    try:
        formats = {name: shared_common.format_of(name, w) for name, w in experts.weights.items()}
        if formats["w_gate"] != formats["w_up"]:
            return f"w_up: got {formats['w_up']}, the kernels need {formats['w_gate']} as w_gate"
        shared_common.check_x(x_dtype, formats["w_gate"])
        for name, w, matrices in _matrices(experts):
            n, cols = w.shape[-2:]
            shared_common.check_sizes(
                name, n, cols, tokens, experts_per_token, experts.num_experts, formats[name], matrices)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    return ""


def relative_time(tokens: int, experts_per_token: int, experts: ExpertWeights) -> float:
    """An estimate of the time of what `refusal` allows, over that of reading the weights once; without launches.

    For slots that choose among the experts at random. Grows with the slots of an expert: they take several passes, or
    shared memory holds fewer weights.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> w, w_down = (jax.ShapeDtypeStruct((128, *s), jnp.bfloat16) for s in ((768, 2048), (2048, 768)))
      >>> [round(relative_time(tokens, 8, ExpertWeights(w, w, w_down)), 2) for tokens in (16, 128, 512)]
      [1.05, 1.07, 1.88]
    """
    return sum(matrices * shared_common.estimate(
        tokens, experts_per_token, experts.num_experts, w.shape[-1], shared_common.format_of(name, w), matrices)[0]
        for name, w, matrices in _matrices(experts)) / 3


def configs(tokens: int, experts_per_token: int, experts: ExpertWeights) -> dict[str, SharedConfig]:
    """The configuration of each kernel, for what `refusal` allows."""
    return {kernel: SharedConfig.heuristic(tokens, experts_per_token, experts.num_experts, w.shape[-1],
                                           shared_common.format_of(name, w), matrices)
            for kernel, (name, w, matrices) in zip(KERNELS, _matrices(experts), strict=True)}


def _matrices(experts):
    """Name, weight, and how many of its kind go through a kernel together."""
    return ("w_gate", experts.w_gate, 2), ("w_down", experts.w_down, 1)


def temporary_bytes(tokens: int, experts_per_token: int, experts: ExpertWeights, x_dtype=jnp.bfloat16) -> int:
    """Device memory that a call takes besides its arguments and result: [T * K, I], see `intermediate_dtype`, and
    float32 [T * K, H]; with float16 x, that in float32, too.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> w = jax.ShapeDtypeStruct((8, 64, 128), jnp.bfloat16)
      >>> temporary_bytes(16, 2, ExpertWeights(w, w, jax.ShapeDtypeStruct((8, 128, 64), jnp.bfloat16)))
      20480
    """
    width = jnp.dtype(intermediate_dtype(experts)).itemsize
    wide = 4 * tokens * experts.hidden * (jnp.dtype(x_dtype) == jnp.float16)
    return tokens * experts_per_token * (width * experts.intermediate + 4 * experts.hidden) + wide


def intermediate_dtype(experts: ExpertWeights):
    """bfloat16 for bfloat16 weights, whose product takes nothing else. float32 for others, which meet rows in float16
    with a scale of their own: the error of a layer is that of rounding its result.
    """
    return jnp.bfloat16 if experts.format == "bf16" else jnp.float32


@functools.cache
def _op(activation: Activation, out_dtype, interpret):
    def layer_fn(x, routing, experts, layer):
        with jax.named_scope("gate_up"):
            h = moe_gate_up_shared(
                x, routing.ids, experts.w_gate, experts.w_up, b_gate=experts.b_gate, b_up=experts.b_up, layer=layer,
                activation=activation, out_dtype=intermediate_dtype(experts), interpret=interpret)
        with jax.named_scope("down"):
            return moe_down_shared(
                h, routing.ids, routing.weights, experts.w_down, b_down=experts.b_down, layer=layer,
                out_dtype=out_dtype, interpret=interpret)

    return decode_op(NAME, layer_fn)
