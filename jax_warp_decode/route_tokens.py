"""The router of a layer, from tokens to routing: one launch for few tokens on a GPU, XLA otherwise.

The norm before it can come along, `norm_and_route`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_warp_decode.choose import no_gpu_reason
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import describe, is_float_array, plain_or
from jax_warp_decode.kernels import checks
from jax_warp_decode.kernels import router as kernel
from jax_warp_decode.kernels.rms_norm import rms_norm
from jax_warp_decode.routers import Router
from jax_warp_decode.routing import Routing, as_router, route

STRATEGIES = ("auto", "one_launch", "xla")

# Most tokens that "auto" gives to the kernel. Every token reads the whole router weight, from the L2 cache after the
# first, so a matrix product wins for many.
MAX_TOKENS = 8


def route_tokens(
    x: jax.Array,
    w_router: jax.Array,
    router: int | Router,
    *,
    renormalize: bool | None = None,
    bias: jax.Array | None = None,
    correction_bias: jax.Array | None = None,
    expert_scale: jax.Array | None = None,
    strategy: str = "auto",
    interpret: bool = False,
) -> Routing:
    """Routing of tokens x [T, H] by a router weight [E, H]: logits x @ w_router.T and `route`, all in float32.

    Args:
      x: [T, H] floats.
      w_router: [E, H] floats, never quantised.
      router, renormalize, bias, correction_bias, expert_scale: as in `route`.
      strategy: "one_launch" is the kernel `moe_router`, for softmax routers without a bias, groups or scales, and has
        no gradient; "xla" takes any router, size and device; "auto" takes the kernel where it can run, for up to 8
        tokens. A strategy asked for by name runs or raises.
      interpret: run the kernel on the CPU, for tests; "auto" then chooses as on a GPU.

    Returns:
      Routing with ids int32 [T, K] and weights float32 [T, K]. The strategies add in different orders, so logits that
      are equal up to rounding may be chosen differently. A NaN logit of any expert makes all weights of its token NaN
      in one launch, with "topk_softmax" too, where "xla" looks at the chosen experts alone.

    Raises:
      ArgumentError: as `route`, and for x or w_router that are quantised or of the wrong rank, dtype or H.
      UnsupportedError: "one_launch" cannot run; the message says why.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.route_tokens import route_tokens
      >>> w = jnp.zeros((4, 256), jnp.bfloat16).at[:, 0].set(jnp.array([1, 3, 2, 3], jnp.bfloat16))
      >>> route_tokens(jnp.ones((1, 256), jnp.bfloat16), w, 2).ids.tolist()
      [[1, 3]]
    """
    if strategy not in STRATEGIES:
        raise ArgumentError(f"strategy: got {strategy!r}, expected one of {list(STRATEGIES)}")
    checks.interpret_type(interpret)
    for name, a, axes in (("x", x, "[T, H]"), ("w_router", w_router, "[E, H]")):
        if not is_float_array(a) or a.ndim != 2:
            raise ArgumentError(f"{name}: got {describe(a)}, expected a floating array {axes}; "
                                f"{plain_or(a, 'use jax.vmap for more axes')}")
    if x.shape[1] != w_router.shape[1]:
        raise ArgumentError(f"w_router: got shape {w_router.shape}, expected [E, {x.shape[1]}] to match x {x.shape}")
    if not w_router.shape[0]:
        raise ArgumentError(f"w_router: got shape {w_router.shape}, expected [E, H] with E >= 1")
    router = as_router(router, renormalize)
    arrays: dict[str, Any] = dict(bias=bias, correction_bias=correction_bias, expert_scale=expert_scale)
    if strategy != "xla":
        refused = _refusal(x, w_router, router, arrays, interpret)
        if strategy == "one_launch" and refused:
            raise UnsupportedError(f"strategy: 'one_launch' cannot run: {refused}; strategy='auto' or 'xla' can")
        if not refused and (strategy == "one_launch" or x.shape[0] <= MAX_TOKENS):
            with jax.named_scope("router"):
                return Routing(*kernel.moe_router(
                    x, w_router, router.k, renormalize=_renormalized(router, w_router), interpret=interpret))
    with jax.named_scope("router"):
        logits = jnp.einsum("th,eh->te", x.astype(jnp.float32), w_router.astype(jnp.float32),
                            precision=jax.lax.Precision.HIGHEST)
        return route(logits, router, **arrays)


def norm_and_route(
    x: jax.Array, gain: jax.Array, w_router: jax.Array, router: Router, *, eps: float, bias: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Routing]:
    """The RMSNorm before the experts, and the routing of what it gives: one launch, or `rms_norm` and `route_tokens`
    after each other where the kernel of the latter cannot run.

    Args:
      x: [T, H] before the norm; for a GPU, or the interpreter.
      gain: [H] of the norm.
      w_router, router, bias: as in `route_tokens`.
      eps: added to the mean square.
      interpret: run the kernels on the CPU, for tests.

    Returns:
      h [T, H] in the dtype of x, and `route_tokens(h, ...)`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode.route_tokens import norm_and_route
      >>> from jax_warp_decode.routers import Router
      >>> w = jnp.zeros((4, 64)).at[:, 0].set(jnp.array([1.0, 3.0, 2.0, 3.0]))
      >>> h, routing = norm_and_route(jnp.full((1, 64), 2.0), jnp.ones(64), w, Router(2), eps=0.0, interpret=True)
      >>> h[0, 0].item(), routing.ids.tolist()
      (1.0, [[1, 3]])
    """
    few = x.shape[0] <= MAX_TOKENS and jnp.dtype(gain.dtype) in kernel.W_DTYPES
    if few and not _refusal(x, w_router, router, dict(bias=bias), interpret):
        with jax.named_scope("router"):
            ids, weights, h = kernel.normed_moe_router(
                x, gain, w_router, router.k, eps=eps, renormalize=_renormalized(router, w_router), interpret=interpret)
        return h, Routing(ids, weights)
    with jax.named_scope("norm"):
        h = rms_norm((x,), gain, eps=eps, interpret=interpret)
    return h, route_tokens(h, w_router, router, bias=bias, interpret=interpret)


def _renormalized(router: Router, w_router) -> bool:
    """What the kernel calls so; raises what `route` would."""
    router.check(w_router.shape[0])
    return router.renormalize or router.scoring == "topk_softmax"


def _refusal(x, w_router, router: Router, arrays: dict, interpret: bool) -> str:
    """Why the kernel cannot take this router or these operands, or cannot run here; or an empty string."""
    if not interpret and (reason := no_gpu_reason()):
        return reason
    given = [name for name, array in arrays.items() if array is not None]
    reasons = [
        (router.scoring not in ("softmax", "topk_softmax"), f"its scores are a softmax, not {router.scoring!r}"),
        (given, f"it takes no {' or '.join(given)}"),
        (router.limited, "it knows no groups of experts"),
        (router.scale != 1, "it does not scale weights"),
        (router.k > kernel.MAX_K, f"K = {router.k} is more than {kernel.MAX_K}"),
        (jnp.dtype(x.dtype) not in kernel.X_DTYPES, f"x is {x.dtype}, not bfloat16 or float16"),
        (jnp.dtype(w_router.dtype) not in kernel.W_DTYPES,
         f"w_router is {w_router.dtype}, not bfloat16, float16 or float32"),
    ]
    refused = next((reason for holds, reason in reasons if holds), "")
    E, H = w_router.shape
    return refused or kernel.refusal(E, H, jnp.dtype(w_router.dtype).itemsize)
