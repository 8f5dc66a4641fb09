"""Which configuration the kernels of a layer would run with, and why."""

from jax_warp_decode import tuning
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.kernels import DownConfig, GateUpConfig, checks

# The config class of each kernel, by the name that its measurements carry.
KERNELS = {"moe_gate_up": GateUpConfig, "moe_down": DownConfig}


def explain_config(experts: ExpertWeights, *, tokens: int, experts_per_token: int) -> dict[str, tuning.Found]:
    """What `warp_decode` would run with here: {kernel: `tuning.Found(config, source)`}.

    Args:
      experts: the layer's weights, or their shapes (`jax.ShapeDtypeStruct`s).
      tokens: T.
      experts_per_token: K.

    Raises:
      ArgumentError, UnsupportedError: weights that the kernels cannot take, or a file of tuned configurations that
        cannot be used.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> from jax_warp_decode.explain import explain_config
      >>> S = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
      >>> experts = ExpertWeights(S(8, 64, 256), S(8, 64, 256), S(8, 256, 64))
      >>> list(explain_config(experts, tokens=1, experts_per_token=2))
      ['moe_gate_up', 'moe_down']
    """
    experts.check()
    itemsize = checks.weight_itemsize("w_gate", experts.w_gate)
    H, I = experts.hidden, experts.intermediate
    checks.dimensions("w_gate", H, I, itemsize)
    checks.dimensions("w_down", I, H, itemsize)
    return {kernel: tuning.find(kernel, kind, None, format=experts.format, itemsize=itemsize, T=tokens,
                                K=experts_per_token, H=H, I=I) for kernel, kind in KERNELS.items()}
