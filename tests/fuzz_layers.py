"""The layers that are fuzzed: what one is, those that always run, and those that are drawn from a seed.

A `Layer` is all that is compiled: shapes, formats, dtypes, activation, biases, stack, and the path. Its repr is an
expression that makes it again. `LAYERS`, `INTERPRETED` and `EMULATED` are fixed, so that a test has a name; `drawn`
ranges over everything that a path documents to take. Whatever a path refuses nevertheless raises when it is called.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from oracle import TENSOR_CORE_UNIT, UNIT

from jax_warp_decode import tuning
from jax_warp_decode.activations import ACTIVATIONS, get_activation
from jax_warp_decode.experts import DENSE_FORMATS, MATRICES
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels import (
    DownConfig,
    DownTensorConfig,
    GateUpConfig,
    GateUpTensorConfig,
    checks,
    shared_common,
)
from jax_warp_decode.kernels.grouped_config import BLOCK, TILE, GroupedConfig
from jax_warp_decode.moe import apply, moe
from jax_warp_decode.paths import expert_centric, grouped_layer, grouped_plan, shared_decode, warp_decode

U = UNIT["float32"]
NAMES = {name: dtype.name for dtype, name in DENSE_FORMATS.items()}  # "bf16" -> "bfloat16"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One compiled layer."""

    strategy: str
    tokens: int
    experts: int
    hidden: int
    intermediate: int
    k: int  # above `experts`, the layer is one device's share of them
    weights: str
    x_dtype: str = "bf16"
    activation: str = "silu"
    biases: str | None = None
    layers: int | None = None  # of a stack, all but one of them poisoned
    emulated: bool = False  # the PTX of its kernels is executed
    scales: str | None = None  # dtype of those that are numbers, None for that which `quantize` makes
    out: str | None = None  # dtype of the result, None for that of x
    tensor_cores: bool = True  # `warp_decode`, emulated: where they take the layer

    @property
    def id(self):
        parts = [self.strategy, self.weights, self.x_dtype, self.activation, f"T{self.tokens}"]
        parts += [f"{self.biases} biases"] * bool(self.biases) + [f"L{self.layers}"] * bool(self.layers)
        return "-".join(parts + ["PTX"] * self.emulated)

    @property
    def path(self):
        """The strategy, and how its kernels run on a CPU."""
        how = "PTX" if self.emulated else "interpreted" if self.strategy in ("warp_decode", "shared_decode") else "XLA"
        return f"{self.strategy}, {how}"

    def case(self, rng, pattern):
        """An `oracle.make_case` of this layer."""
        slots = np.arange(self.k) % self.experts  # the oracle's are distinct experts
        case = oracle.make_case(
            rng, tokens=self.tokens, experts=self.experts, hidden=self.hidden, intermediate=self.intermediate,
            k=min(self.k, self.experts), x_dtype=self.x_dtype, weights=self.weights, pattern=pattern,
            activation=self.activation, biases=self.biases)
        case = dataclasses.replace(case, ids=case.ids[:, slots], weights=case.weights[:, slots])
        if self.scales:
            named = {name: w for name in MATRICES if (w := getattr(case, name)) is not None}
            case = dataclasses.replace(case, **{
                name: w._replace(scales=w.scales.astype(oracle.DTYPES[self.scales])) for name, w in named.items()})
        return case

    @functools.cached_property
    def compiled(self):
        if self.emulated:
            return _emulated(self)
        options = dict(strategy=self.strategy, activation=self.activation, interpret=True, out_dtype=self.stored)
        if self.k > self.experts:
            return jax.jit(lambda *args, layer=None: apply(
                *args, layer=layer, activation_format=None, whole=False, **options))
        return jax.jit(functools.partial(moe, **options))

    @property
    def stored(self):
        """Name of the dtype of y."""
        return NAMES[self.out or self.x_dtype]

    @property
    def unit(self):
        return TENSOR_CORE_UNIT if self.emulated else U

    @property
    def quantised(self):
        return self.weights in FORMATS

    @functools.cached_property
    def bf16_operands(self):
        """Whether `expert_centric` rounds the operands of its products to bfloat16."""
        return (self.strategy == "expert_centric"
                and expert_centric.operand_dtype(NAMES[self.x_dtype], self.weights) == jnp.bfloat16)

    @functools.cached_property
    def h_dtype(self):
        """What the path stores the intermediate in."""
        experts = self.case(0, "uniform").args()[2]
        if self.strategy == "warp_decode":
            return jnp.dtype(warp_decode.intermediate_dtype(experts, self.tokens, self.k)).name
        if self.strategy == "shared_decode":
            return jnp.dtype(shared_decode.intermediate_dtype(experts)).name
        return "bfloat16" if self.bf16_operands else "float32"

    @property
    def row_dtype(self):
        """What the path stores the rows of down in, before the combine."""
        return "bfloat16" if self.strategy == "expert_centric" and self.emulated else "float32"

    @property
    def weight_unit(self):
        """Relative error of a weight as the path multiplies it: widened to float32, or to bfloat16 operands."""
        if self.weights == "f32":
            return UNIT["bfloat16"] if self.bf16_operands else 0.0
        exponents = not self.quantised or oracle.FORMATS[self.weights].emax is not None
        if exponents or self.weights == "int4_group32" and not self.scales and self.h_dtype == "float32":
            return 0.0  # 4 bits times the 8 of a bfloat16 scale
        return UNIT["bfloat16"] * self.bf16_operands + 2 * self.unit  # products with the scale and with a global one

    @property
    def float16_rows(self):
        """Rows are float16 relative to their largest value."""
        return self.strategy == "shared_decode" and self.weights != "bf16"

    @functools.cached_property
    def configs(self):
        """Those of the two kernels of `warp_decode`, emulated."""
        sizes = dict(T=self.tokens, K=self.k, H=self.hidden, I=self.intermediate, format=self.weights)
        pairs = ((GateUpTensorConfig(1, 1), GateUpConfig), (DownTensorConfig(1, 1, 8, 1), DownConfig))
        return tuple(
            tensor if self.tensor_cores and checks.fits(tensor, self.hidden, self.intermediate, self.k, self.weights)
            else other.heuristic(**sizes) for tensor, other in pairs)

    def on_tensor_cores(self, matrix):
        """Whether `warp_decode` multiplies by w_gate and w_up, or by w_down, on tensor cores."""
        if self.strategy != "warp_decode" or not self.emulated:
            return False
        return isinstance(self.configs[matrix == "down"], GateUpTensorConfig | DownTensorConfig)


def _emulated(layer):
    """Inside `ptx.launch.emulated`; with two CTAs for `shared_decode`."""
    options = dict(activation=get_activation(layer.activation), out_dtype=layer.stored)
    if layer.strategy == "expert_centric":
        config = GroupedConfig((16, 32), 3, ctas=2)
        op = grouped_layer.op(options["activation"], configs=(config, config), make_plan=grouped_plan.plan_on_gpu)
        return jax.jit(lambda *args: op(*args).astype(layer.stored))
    run, settle = {
        "shared_decode": (shared_decode.run, lambda: mock.patch.object(shared_common, "grid_size", lambda *_: 2)),
        "warp_decode": (warp_decode.run, lambda: tuning.override(*layer.configs))}[layer.strategy]

    def traced(*args, **number):
        with settle():
            return run(*args, **options, **number)

    return jax.jit(traced)


# -------------------------------------------------------------------------------------------------------------- fixed

LAYERS = [
    Layer("reference", 5, 6, 64, 96, 3, "bf16"),
    Layer("reference", 1, 3, 32, 32, 2, "nvfp4", "f32", "gelu_erf", layers=3),
    Layer("reference", 4, 4, 64, 32, 2, "mxfp4", "bf16", "clamped_swiglu", biases="bf16"),
    Layer("reference", 3, 4, 7, 5, 2, "f32", "f32", "relu2", biases="f32"),
    Layer("expert_centric", 9, 5, 96, 64, 2, "bf16", "bf16", "gelu_tanh", biases="f32"),
    Layer("expert_centric", 33, 4, 32, 64, 3, "mxfp8", layers=2),
    Layer("expert_centric", 2, 3, 64, 32, 2, "fp8_block128", "f32", "situ"),
    Layer("expert_centric", 6, 4, 64, 64, 2, "int4_group32", "bf16", "clamped_silu"),
]
# Each run takes a tenth of a second and more in the interpreter.
INTERPRETED = [
    Layer("warp_decode", 2, 3, 64, 32, 2, "bf16", "bf16", "clamped_swiglu", biases="bf16", layers=2),
    Layer("warp_decode", 1, 3, 64, 64, 2, "mxfp8"),
    Layer("warp_decode", 1, 3, 64, 32, 2, "mxfp4", "bf16", "relu2", biases="f32"),
    Layer("shared_decode", 2, 3, 128, 64, 2, "mxfp4", "bf16", "clamped_swiglu", biases="bf16", layers=2),
]
# As long in tests/ptx, once a kernel is compiled.
EMULATED = [
    Layer("warp_decode", 2, 3, 192, 64, 2, "mxfp8", "bf16", "clamped_swiglu", biases="f32", layers=2, emulated=True),
    Layer("shared_decode", 3, 3, 128, 64, 2, "mxfp8", biases="f32", layers=2, emulated=True),
    Layer("shared_decode", 3, 3, 128, 64, 2, "bf16", "bf16", "gelu_tanh", emulated=True),
    Layer("expert_centric", 5, 3, 128, 64, 2, "bf16", "bf16", "clamped_swiglu", biases="f32", emulated=True),
    Layer("expert_centric", 5, 3, 128, 64, 2, "mxfp8", emulated=True),
]

# -------------------------------------------------------------------------------------------------------------- drawn

DENSE = tuple(DENSE_FORMATS.values())
HALF = tuple(DENSE_FORMATS[d] for d in checks.HALF)
# (strategy, emulated) -> formats of weights, dtypes of x, and what H and I are multiples of
RULES = {
    ("reference", False): ((*DENSE, *FORMATS), DENSE, 1),
    ("expert_centric", False): ((*DENSE, *FORMATS), DENSE, 1),
    ("warp_decode", False): ((*HALF, *FORMATS), HALF, 32),
    ("shared_decode", False): ((*HALF, *FORMATS), HALF, shared_common.TILE),
    ("warp_decode", True): ((*HALF, *FORMATS), HALF, 32),
    ("shared_decode", True): ((*HALF, *FORMATS), HALF, shared_common.TILE),
    ("expert_centric", True): (tuple(grouped_layer.ITEMSIZE), ("bf16",), TILE),
}
QUICK = (("reference", False), ("expert_centric", False))  # a hundredth of a second a run
MOST_INTERPRETED = 12  # slots, of a layer that is drawn


def draw(strategy, emulated, rng, weights):
    """Any layer that a strategy documents to take with weights of a format, of a size that a CPU runs in seconds."""
    one_of = lambda *values: values[rng.integers(len(values))]
    between = lambda least, most: int(rng.integers(least, most + 1))
    _, x_dtypes, multiple = RULES[strategy, emulated]
    quick, shared = (strategy, emulated) in QUICK, strategy == "shared_decode"
    x_dtype = "bf16" if shared and weights == "bf16" else one_of(*x_dtypes)  # "would round it to bfloat16"
    activation = one_of(*(name for name, activation in ACTIVATIONS.items() if activation.gated or not shared))
    tokens = one_of(0, 1, 1, 2, 3, 5, 8, 13, 33) if quick else one_of(0, 1, 1, 2, 2, 3, 4, 5, 9, 17)
    experts, stacks = between(1, 9 if quick else 5), (None, None, 1, 2, 3)
    if weights in FORMATS:
        multiple = max(multiple, FORMATS[weights].block)
    H, I = (between(1, max(5, 150 // multiple)) * multiple for _ in range(2))
    if shared:  # "needs H = 128 at least"
        H = max(H, 128)
    if weights == "fp8_block128" and shared:  # "multiples of 128 and at least 64 scales, a multiple of 8"
        H, I = (128 * one_of(1, 2) for _ in range(2))
        experts = 64 * 128 * 128 // (H * I)
    if (strategy, emulated) == ("expert_centric", True):  # "H is less than 256"; `run` sees to no tokens, and stacks
        least = BLOCK // (2 if ACTIVATIONS[activation].gated else 1)
        H, I, tokens, stacks = max(H, BLOCK), max(I, least), max(tokens, 1), (None,)
    k = between(1, min(experts + 1, 5))
    if not (quick or emulated):
        tokens = min(tokens, MOST_INTERPRETED // k)
    numbers = weights in FORMATS and oracle.FORMATS[weights].emax is None and not oracle.FORMATS[weights].global_scale
    first = numbers and DENSE_FORMATS[FORMATS[weights].scales_dtypes[0]]
    other = [None, *({"f32", "bf16"} - {first} if numbers else ())]
    return Layer(
        strategy, tokens, experts, H, I, k, weights, x_dtype, activation, biases=one_of(None, *DENSE),
        layers=one_of(*stacks), emulated=emulated, scales=one_of(*other), out=one_of(None, None, *DENSE),
        tensor_cores=not emulated or strategy != "warp_decode" or one_of(True, True, False))


def drawn(strategy, emulated, count, number):
    """So many layers of one strategy, drawn from a seed. The formats take turns."""
    formats = RULES[strategy, emulated][0]
    turns = [number * count + i for i in range(count)]
    streams = [np.random.default_rng([*strategy.encode(), emulated, turn]) for turn in turns]
    return [draw(strategy, emulated, rng, formats[turn % len(formats)])
            for turn, rng in zip(turns, streams, strict=True)]
