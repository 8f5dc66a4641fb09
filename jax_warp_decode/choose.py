"""Which strategy runs, decided from static facts at trace time, with the reason in words.

"auto" takes the fastest that can run: by `measured_layers` where this layer was measured on this kind of GPU, else by
an estimate. A file of measurements is read while JAX traces and again when it has changed, as in `tuning`.
"""

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import DTypeLike

from jax_warp_decode import measured_layers
from jax_warp_decode.device import BLACKWELL, FIRST_CUDA, capability, software_refusal
from jax_warp_decode.errors import ArgumentError, UnsupportedError, counted
from jax_warp_decode.experts import DENSE_FORMATS, ExpertWeights, check_experts, is_float
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels import checks
from jax_warp_decode.paths import expert_centric, grouped_layer, reference, shared_decode, warp_decode
from jax_warp_decode.routers import static_integer
from jax_warp_decode.routing import expected_experts

# Compute capabilities that Pallas Mosaic GPU compiles the warp-decode kernels for. 9.0 was measured (H200), 10.x only
# compiled.
CAPABILITIES = tuple(FIRST_CUDA)
WAY_OUT = re.compile("(; |, or )(use strategy|call moe).*")  # of a refusal: for those who named a strategy


@dataclasses.dataclass(frozen=True)
class Choice:
    """The strategy of one call, and why.

    Attributes:
      strategy, reason: in words.
      warning: what is warned of on a GPU: that what "auto" takes is slow, or a copy of all experts.
      copied_bytes: of that copy, which every call makes; 0 if it makes none.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, choose
      >>> w = jnp.ones((4, 64, 128), jnp.bfloat16)
      >>> choice = choose(2, ExpertWeights(w, w, w.swapaxes(1, 2)), experts_per_token=2, x_dtype=w.dtype)
      >>> choice.strategy, choice.copied_bytes                               # on a CPU
      ('expert_centric', 0)
    """

    strategy: str
    reason: str
    warning: str = dataclasses.field(default="", repr=False)
    copied_bytes: int = dataclasses.field(default=0, repr=False)

    def __str__(self) -> str:
        told = f"; it {self.warning.removeprefix('which ')}" if self.warning else ""
        return f"{self.strategy} ({self.reason}{told})"


def no_gpu_reason() -> str:
    """Why the decode kernels cannot run on the default device, or an empty string."""
    if not capability():
        return (f"JAX sees no NVIDIA GPU (backend {jax.default_backend()!r}); install JAX's CUDA build, "
                "pip install 'jax[cuda12]' or 'jax[cuda13]'")
    if capability() not in CAPABILITIES:
        return (f"the GPU has compute capability {capability()}, the kernels need one of {', '.join(CAPABILITIES)} "
                "(Hopper or data-centre Blackwell)")
    return software_refusal()


# ------------------------------------------------------------------------------------------------- what each one takes


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What a strategy is and what it can be given.

    Attributes:
      run: run(x [T, H], routing, experts, *, activation, out_dtype, ...) -> y [T, H].
      refusal: (tokens, experts_per_token, experts, x_dtype) -> why it cannot take these sizes and formats on this
        device, or an empty string.
      device_refusal: the same for the device alone; of a `decode` strategy, beyond `no_gpu_reason`.
      decode: made of GPU kernels: `run` also takes `layer`, to read stacked weights in place, and `interpret`.
      biases: adds the biases of the experts.
      gateless: takes experts without a gate projection.
      activation_format: `run` takes `activation_format`.
    """

    run: Callable[..., jax.Array]
    refusal: Callable[[int, int, ExpertWeights, jnp.dtype], str] = lambda *_: ""
    device_refusal: Callable[[], str] = lambda: ""
    decode: bool = False
    biases: bool = False
    gateless: bool = False
    activation_format: bool = False

    def refuses(self, tokens: int, experts_per_token: int, experts: ExpertWeights, x_dtype, interpret: bool) -> str:
        """Why it cannot run this call here, or an empty string."""
        if self.decode and not interpret and (no_gpu := no_gpu_reason()):
            return no_gpu
        if experts.w_gate is None and not self.gateless:
            return "the experts have no gate projection, the kernels need one"
        if experts.biases and not self.biases:
            return f"the experts have biases ({', '.join(experts.biases)}), which it does not add"
        return self.refusal(tokens, experts_per_token, experts, x_dtype)


def _warp_decode_refusal(tokens: int, experts_per_token: int, experts: ExpertWeights, x_dtype) -> str:
    if jnp.dtype(x_dtype) not in checks.HALF:
        return f"x is {jnp.dtype(x_dtype)}, the kernels take bfloat16 or float16"
    try:
        checks.matrices(experts)
    except (ArgumentError, UnsupportedError) as error:
        return str(error)
    return ""


def _expert_centric_refusal(tokens: int, experts_per_token: int, experts: ExpertWeights, x_dtype) -> str:
    return expert_centric.refusal(experts, x_dtype)


TABLE = {
    "warp_decode": Strategy(warp_decode.run, _warp_decode_refusal, decode=True, biases=True, gateless=True),
    "shared_decode": Strategy(shared_decode.run, shared_decode.refusal, decode=True, biases=True),
    "expert_centric": Strategy(expert_centric.run, _expert_centric_refusal, expert_centric.device_refusal, biases=True,
                               gateless=True, activation_format=True),
    "reference": Strategy(reference.run, biases=True, gateless=True),
}
STRATEGIES = tuple(TABLE)


def available_strategies() -> dict[str, str]:
    """Every strategy with an empty string if it can run on the default device, else the reason why not.

    Example:
      >>> from jax_warp_decode import available_strategies
      >>> available_strategies()["reference"]
      ''
    """
    return {name: s.decode and no_gpu_reason() or s.device_refusal() for name, s in TABLE.items()}


# ----------------------------------------------------------------------------------------------------- which is fastest


@dataclasses.dataclass(frozen=True)
class Costs:
    """An estimate of what strategies take, in bytes that the GPU could read meanwhile.

    Fitted to `bench.crossovers` on an H200; for layers and GPUs that were not measured, see `measured_layers`.

    Attributes:
      again: of a byte that `warp_decode` reads for the second slot of an expert, and for each further one, from the L2
        cache; for the first it costs 1.
      grouped: of a byte of the experts that have slots, for `expert_centric`.
      launches: what each strategy takes besides.
    """

    again: tuple[float, float]
    grouped: float
    launches: dict[str, float]

    def of(self, tokens: int, experts_per_token: int, experts: ExpertWeights, shared: float) -> dict[str, float]:
        """By strategy, for tokens that choose their experts at random; shared: of a byte, for `shared_decode`."""
        touched = expected_experts(experts.num_experts, experts_per_token, tokens)
        slots = tokens * min(experts_per_token, experts.num_experts)
        more = slots / touched - 1 if tokens else 0.0  # slots of an expert that has some, beyond the first
        warp = 1 + self.again[0] * min(more, 1) + self.again[1] * max(more - 1, 0)
        per_byte = {"warp_decode": warp, "shared_decode": shared, "expert_centric": self.grouped}
        nbytes = sum(w.size * w.dtype.itemsize for w in jax.tree.leaves(experts.weights)) / (experts.layers or 1)
        nbytes *= touched / experts.num_experts
        return {name: nbytes * per_byte[name] + self.launches[name] for name in per_byte}


# By weight format; another one takes those of the format with the nearest bits per value. For MXFP8's
# `expert_centric` the fit, to many tokens, leaves launches open: here a round figure below the 42 us of one token.
COSTS = {
    "bf16": Costs((0.36, 0.52), 1.08, {"warp_decode": 12e6, "shared_decode": 41e6, "expert_centric": 92e6}),
    "mxfp8": Costs((0.5, 0.55), 1.74, {"warp_decode": 17e6, "shared_decode": 41e6, "expert_centric": 60e6})}
MANY = 64  # slots of an expert, where reading its weights for each of them is worth a warning
# What decoding formats that are not in it takes over that, by `warp_decode` and `shared_decode`: 16 tokens of
# Qwen3-30B's layer, see bench/results/shared_formats-qwen3-30b-a3b-uniform.json.
DECODING = {"mxfp4": (1.28, 1.22), "nvfp4": (1.74, 1.31), "int4_group32": (1.71, 1.13), "int8_channel": (1.11, 1.0)}
# The cost of a value for `expert_centric`, which widens all experts of such formats in every call (1.5 ms for 604e6
# values, `bench.decode`), besides the launches of the bfloat16 products that follow.
WIDENED = 11.0


@functools.cache
def measured_format(format: str) -> str:
    """The format whose measurements speak for weights of this one.

    Example:
      >>> from jax_warp_decode.choose import measured_format
      >>> [measured_format(f) for f in ("f16", "fp8_block128", "mxfp4")]
      ['bf16', 'mxfp8', 'mxfp8']
    """
    if format in COSTS:
        return format
    return min(COSTS, key=lambda measured: abs(_bits(measured) - _bits(format)))


def _bits(format: str) -> float:
    """Bits per value, scales included."""
    if format not in FORMATS:
        return 32.0 if format == "f32" else 16.0
    shape = (1, 1024, 1024)
    return 8 * FORMATS[format].nbytes(shape) / math.prod(shape)


def _never_ran(strategy: str, experts: ExpertWeights, x_dtype) -> str:
    """What to know of kernels that no GPU like this one has run; of those that decode, README tells."""
    kernels = strategy == "expert_centric" and not grouped_layer.refusal(x_dtype, experts)
    if not kernels or capability() not in BLACKWELL:
        return ""
    return f"its kernels for compute capability {capability()} were compiled and interpreted only, never run"


def _widened(experts: ExpertWeights, x_dtype) -> bool:
    """Whether `expert_centric` makes a bfloat16 copy of all experts first, on a GPU too."""
    return experts.format != "bf16" and bool(grouped_layer.refusal(x_dtype, experts))


def _values(experts: ExpertWeights) -> int:
    return experts.num_experts * experts.intermediate * experts.hidden * len(experts.weights)


def _copied_bytes(strategy: str, experts: ExpertWeights, x_dtype) -> int:
    """Of the bfloat16 copy of all experts that a strategy makes, whoever chose it. A scan widens one at a time."""
    scans = expert_centric.operand_dtype(x_dtype, experts.format) != jnp.bfloat16
    copies = strategy == "expert_centric" and not scans and _widened(experts, x_dtype)
    return 2 * _values(experts) if copies else 0


def _copies(nbytes: int) -> str:
    return f"which makes a bfloat16 copy of all experts in every call, {nbytes:,} bytes in parts" if nbytes else ""


def _warning(chosen: str, slots: int, experts: ExpertWeights, x_dtype) -> str:
    """What a user should know of a choice of "auto": see `Choice`."""
    if chosen == "reference":
        return "which is slow"
    if chosen == "warp_decode" and (of_each := slots / experts.num_experts) > MANY:
        return f"which reads the weights of an expert for each of its slots, here some {of_each:.0f}"
    if chosen == "expert_centric" and expert_centric.operand_dtype(x_dtype, experts.format) != jnp.bfloat16:
        return "which computes in float32 over all experts, slowly; use bfloat16 x, and bfloat16 or quantised weights"
    return _copies(_copied_bytes(chosen, experts, x_dtype))


def _costs(tokens: int, experts_per_token: int, experts: ExpertWeights, x_dtype, refused) -> dict[str, float]:
    """The estimate by strategy, see `Costs`; `refused(name, tokens)` says why one cannot run."""
    fitted = experts.format in COSTS
    shared = 1.0  # where it is refused: so that `auto` says why
    if not refused("shared_decode", tokens):
        shared = shared_decode.relative_time(tokens, experts_per_token, experts)
    costs = COSTS[measured_format(experts.format)].of(tokens, experts_per_token, experts, shared)
    for name, factor in zip(("warp_decode", "shared_decode"), DECODING.get(experts.format, (1.0, 1.0)), strict=True):
        costs[name] *= factor
    if expert_centric.operand_dtype(x_dtype, experts.format) != jnp.bfloat16:
        costs["expert_centric"] = math.inf  # a scan over all experts
    elif not fitted or _widened(experts, x_dtype):
        costs["expert_centric"] = WIDENED * _values(experts) + COSTS["bf16"].launches["expert_centric"]
    if _never_ran("expert_centric", experts, x_dtype) and tokens * experts_per_token <= MANY * experts.num_experts:
        costs["expert_centric"] = math.inf  # nothing tells that it is faster, until decoding is certain to be slow
    return costs


def choose(tokens: int, experts: ExpertWeights, *, experts_per_token: int, x_dtype: DTypeLike, strategy: str = "auto",
           interpret: bool = False, shares: int = 1) -> Choice:
    """The strategy for a call with `tokens` tokens, from shapes, dtypes and the device only.

    Args:
      tokens: T, static.
      experts: the layer's weights (arrays or `jax.ShapeDtypeStruct`s).
      experts_per_token: K.
      x_dtype: dtype of the activations.
      strategy: "auto", or a name in `STRATEGIES`, which is returned as it is or refused: never replaced.
      interpret: the kernels will be interpreted, so no GPU is needed.
      shares: devices that the experts are split over, of which these are one part: a token's slots fall on all of them.

    Raises:
      ArgumentError: unknown strategy; sizes, dtypes or weights that `moe` refuses; a file of measurements that cannot
        be used.
      UnsupportedError: the named strategy cannot run here; the message says what can.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights, choose
      >>> w = jax.ShapeDtypeStruct((8, 64, 64), jnp.bfloat16)
      >>> choose(1, ExpertWeights(w, w, w), experts_per_token=2, x_dtype=jnp.bfloat16, interpret=True)
      Choice(strategy='warp_decode', reason='1 token x 2 slots on 8 experts: 0.25 pairs per expert')
    """
    for name, value, least in (("tokens", tokens, 0), ("experts_per_token", experts_per_token, 1)):
        if not export.is_symbolic_dim(value) and static_integer(name, value, f"of at least {least}") < least:
            raise ArgumentError(f"{name}: got {value}, expected at least {least}")
    if export.is_symbolic_dim(tokens) and strategy != "reference":
        raise UnsupportedError(f"tokens: got the symbolic {tokens}, expected a number, as kernels and their choice "
                               "depend on it; export once for every batch size, or take strategy='reference'")
    check_experts(experts)
    if not experts.num_experts:
        raise ArgumentError(f"experts: got w_up {experts.w_up.shape}, expected at least one expert")
    if x_dtype is None or not is_float(x_dtype) or jnp.dtype(x_dtype) not in DENSE_FORMATS:
        raise ArgumentError(f"x_dtype: got {x_dtype!r}, expected a floating dtype, bfloat16, float16 or float32")
    return decide(tokens, experts, experts_per_token=experts_per_token, x_dtype=x_dtype, strategy=strategy,
                  interpret=interpret, shares=shares)


def decide(tokens: int, experts: ExpertWeights, *, experts_per_token: int, x_dtype: DTypeLike, strategy: str,
           interpret: bool, shares: int = 1) -> Choice:
    """`choose` for operands that `moe` has checked."""
    if not isinstance(strategy, str) or strategy not in ("auto", *STRATEGIES):
        raise ArgumentError(f"strategy: got {strategy!r}, expected 'auto' or one of {list(STRATEGIES)}")

    @functools.cache  # `auto` asks for the same more than once
    def refused(name, tokens):
        return TABLE[name].refuses(tokens, experts_per_token, experts, x_dtype, interpret)

    if strategy != "auto":
        if why := refused(strategy, tokens):
            raise UnsupportedError(f"strategy: {strategy!r} cannot run: {why}")
        reason = "; ".join(filter(None, ["asked for", _never_ran(strategy, experts, x_dtype)]))
        copied = _copied_bytes(strategy, experts, x_dtype)
        return Choice(strategy, reason, _copies(copied), copied)
    slots = max(1, experts_per_token // shares)  # of a token, here
    estimate = functools.cache(lambda tokens: _costs(tokens, slots, experts, x_dtype, refused))
    times, measured = estimate(tokens), None
    runnable = [name for name in times if not refused(name, tokens)]
    if shares == 1 and not interpret and jnp.dtype(x_dtype) == jnp.bfloat16:
        measured = measured_layers.find(runnable, estimate, format=experts.format, T=tokens, K=slots,
                                        H=experts.hidden, I=experts.intermediate, E=experts.num_experts)
        times = measured.us if measured else times
    skipped: dict[str, list[str]] = {}  # reason -> the strategies it holds for
    for chosen in (*sorted(times, key=times.__getitem__), *(name for name in TABLE if name not in times)):
        if not (why := refused(chosen, tokens)):
            break
        skipped.setdefault(why, []).append(chosen)
    reasons = [f"{' and '.join(names)} cannot run: {WAY_OUT.sub('', why)}" for why, names in skipped.items()]
    if measured:
        reasons.insert(0, measured.reason(chosen, [name for name in runnable if name != chosen]))
    load = tokens * slots / experts.num_experts
    warning = _warning(chosen, tokens * slots, experts, x_dtype)
    pairs = (f"{counted(tokens, 'token')} x {counted(slots, 'slot')} on {experts.num_experts} experts: {load:.3g} "
             "pairs per expert")
    reason = "; ".join(filter(None, [pairs, *reasons, _never_ran(chosen, experts, x_dtype)]))
    return Choice(chosen, reason, warning, _copied_bytes(chosen, experts, x_dtype))


def warn_of(choice: Choice, strategy: str) -> None:
    """Warns of what was chosen for a GPU, see `Choice`; for all that turn a strategy, "auto" or not, into a choice."""
    if choice.warning and jax.default_backend() == "gpu":
        takes = "'auto' takes " * (strategy == "auto")
        warnings.warn(f"moe: strategy {takes}{choice.strategy!r}, {choice.warning}: {choice.reason}", stacklevel=4)
