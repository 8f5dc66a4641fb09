"""What the two kernels refuse, and how they say so."""

import contextlib
import math

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode.activations import Activation
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import ExpertWeights, Weight, describe, is_float_array, plain_or, weight_format
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels import kernel_format
from jax_warp_decode.kernels.expert_index import ExpertIndex
from jax_warp_decode.kernels.tile import RowTile

MOST_UNROLL = 1024  # of a config
HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
LANE_COUNTS = (kernel_format.LEAST_LANES, 8, 16, 32)
OUT_DTYPES = (*HALF, jnp.dtype(jnp.float32))
WAY_OUT = "call moe with strategy='auto', which takes another path"
NO_GRADIENT = "has no gradient; differentiate moe with strategy='expert_centric' or 'reference', from the same weights"


def _rank(name: str, a, axes: str) -> None:
    if not hasattr(a, "dtype") or not hasattr(a, "ndim"):
        raise ArgumentError(f"{name}: got {type(a).__name__}, expected an array [{', '.join(axes)}]")
    if a.ndim != len(axes):
        raise ArgumentError(f"{name}: got shape {a.shape}, expected {len(axes)} dimensions [{', '.join(axes)}]")


def _matches(name: str, a, want: tuple[int, ...], meaning: str) -> None:
    if a.shape != want:
        raise ArgumentError(f"{name}: got shape {a.shape}, expected {want} = {meaning}")


def dtype_of(name: str, a, allowed, way_out: str) -> None:
    """Refuses an array of another dtype, and a quantised one, whose dtype is not that of its values."""
    if not is_float_array(a) or jnp.dtype(a.dtype) not in allowed:
        got = describe(a) if isinstance(a, QuantizedArray) else f"dtype {a.dtype}"
        raise ArgumentError(f"{name}: got {got}, expected {' or '.join(map(str, allowed))}; {plain_or(a, way_out)}")


def gate_up_shapes(x, ids, w_gate: Weight | None, w_up: Weight, b_gate, b_up, activation: Activation,
                   index: ExpertIndex) -> tuple[int, int, int, int, str]:
    """Checks the arguments of `moe_gate_up_3d_batched`; returns T, K, H, I and the format of the weights."""
    stack = "L" if index.layers is not None else ""
    _rank("x", x, "TH")
    _rank("ids", ids, "TK")
    if activation.gated != (w_gate is not None):
        got, expected = ("None", "a weight") if activation.gated else ("a weight", "None")
        raise ArgumentError(f"w_gate: got {got} with activation {activation.name!r}, expected {expected}; "
                            f"only gated activations have one")
    name, w = ("w_up", w_up) if w_gate is None else ("w_gate", w_gate)
    _rank(name, w, f"{stack}EIH")
    (T, H), I, stacked = x.shape, w.shape[-2], w.shape[:-2]
    axes = ", ".join(f"{stack}EIH")
    _matches(name, w, (*stacked, I, H), f"[{axes}] with H from x {x.shape}")
    _rank("w_up", w_up, f"{stack}EIH")
    _matches("w_up", w_up, (*stacked, I, H), f"[{axes}] as {name} {w.shape}")
    _matches("ids", ids, (T, ids.shape[1]), f"[T, K] with T from x {x.shape}")
    dtype_of("x", x, HALF, f"cast x, or {WAY_OUT} for float32 activations")
    format = format_of(name, w)
    if format_of("w_up", w_up) != format:
        raise ArgumentError(f"w_up: got {weight_format(w_up)}, expected {format}, the format of w_gate")
    if b_gate is not None and w_gate is None:
        raise ArgumentError("b_gate: got an array without w_gate, expected None")
    for b_name, b in (("b_gate", b_gate), ("b_up", b_up)):
        _bias(b_name, b, (*stacked, I), f"{stack}EI")
    return T, ids.shape[1], H, I, format


def down_shapes(h, ids, weights, w_down: Weight, b_down, index: ExpertIndex,
                dtypes=None) -> tuple[int, int, int, int, str]:
    """Checks the arguments of a down kernel; returns T, K, H, I and the format of the weights.

    dtypes: that h may have; None for those of `moe_down_3d_batched`.
    """
    stack = "L" if index.layers is not None else ""
    _rank("h", h, "TKI")
    _rank("w_down", w_down, f"{stack}EHI")
    (T, K, I), H, stacked = h.shape, w_down.shape[-2], w_down.shape[:-2]
    _matches("w_down", w_down, (*stacked, H, I), f"[{', '.join(f'{stack}EHI')}] with I from h {h.shape}")
    _matches("ids", ids, (T, K), f"[T, K] as in h {h.shape}")
    _matches("weights", weights, (T, K), f"[T, K] as in h {h.shape}")
    format = format_of("w_down", w_down)
    dtype_of("h", h, dtypes or h_dtypes(format), f"cast h, for {format} weights")
    _bias("b_down", b_down, (*stacked, H), f"{stack}EH")
    return T, K, H, I, format


def h_dtypes(format: str) -> tuple[jnp.dtype, ...]:
    """Those of the intermediate that `moe_down_3d_batched` reads beside weights of a format."""
    return HALF if kernel_format.find(format).paired else OUT_DTYPES


def _bias(name: str, b, want: tuple[int, ...], axes: str) -> None:
    if b is not None:
        _rank(name, b, axes)
        _matches(name, b, want, f"[{', '.join(axes)}] as the weights")
        if isinstance(b, QuantizedArray):
            raise ArgumentError(f"{name}: got {describe(b)}, expected {' or '.join(map(str, OUT_DTYPES))}; "
                                "biases are never quantised")
        dtype_of(name, b, OUT_DTYPES, "cast it")


def out_dtype(dtype) -> jnp.dtype:
    """The dtype of a result, or an error."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = dtype
    if found not in OUT_DTYPES:
        raise ArgumentError(f"out_dtype: got {found}, expected {', '.join(map(str, OUT_DTYPES))}")
    return found


def format_of(name: str, w: Weight) -> str:
    """The format of a weight, a key of `KERNEL_FORMATS`, if the warp-decode kernels can read it."""
    if isinstance(w, QuantizedArray):
        w.check(name)
        return w.format
    dtype_of(name, w, HALF, f"cast or quantise the weights, or {WAY_OUT}")
    return weight_format(w)


def dimensions(name: str, cols: int, n: int) -> None:
    """Refuses a weight [n, cols] that no `RowTile` can walk."""
    if cols % 32 or n % 32 or not cols:
        raise UnsupportedError(
            f"{name}: got [.., {n}, {cols}], warp decode needs multiples of 32; pad with zeros to "
            f"[.., {math.ceil(n / 32) * 32}, {max(32, math.ceil(cols / 32) * 32)}] once, or {WAY_OUT}")


def matrices(experts: ExpertWeights) -> None:
    """Refuses matrices of a format or a size that the warp-decode kernels cannot read."""
    for name, w in experts.weights.items():
        format_of(name, w)
        n, cols = w.shape[-2:]
        dimensions(name, cols, n)


def config_type(config, kinds: tuple[type, ...], interpret=False):
    """The config, or an error if it is another kernel's; of its classes, the interpreter can run the first."""
    interpret_type(interpret)
    runnable = kinds[:1] if interpret else kinds
    if not isinstance(config, runnable):
        where = " in the interpreter" if isinstance(config, kinds) else ""
        raise ArgumentError(f"config: got {type(config).__name__}{where}, expected "
                            f"{' or '.join(kind.__name__ for kind in runnable)} or None")
    return config


def interpret_type(interpret) -> None:
    """Refuses what says neither that a kernel is interpreted nor that it is not."""
    if not isinstance(interpret, bool | plgpu.InterpretGPUParams):
        raise ArgumentError(f"interpret: got {interpret!r}, expected True or False")


@contextlib.contextmanager
def launching(kernel: str):
    """Around the call of a kernel: says why there is no GPU to run it, where Pallas says that the CPU is none.

    Only JAX knows what it compiles for, so nothing is asked before it does: a kernel that is traced here may be lowered
    for another machine. Of one under a `jit` of the caller, Pallas' own error remains.
    """
    try:
        yield
    except ValueError as error:
        if "Only interpret mode is supported on CPU" not in str(error):
            raise
        from jax_warp_decode.choose import no_gpu_reason  # it is built on top of the kernels

        reason = no_gpu_reason() or "its operands lie on the CPU; put them on the GPU with jax.device_put"
        raise UnsupportedError(f"{kernel}: cannot run: {reason}; or pass interpret=True to run it slowly on the CPU"
                               ) from None


def positive_integers(config, flags: tuple[str, ...] = ()) -> None:
    """Refuses a config with other fields; those in `flags` are True or False."""
    for name, value in vars(config).items():
        if name in flags:
            if type(value) is not bool:
                raise ArgumentError(f"config: got {name}={value!r}, expected True or False")
        elif type(value) is not int or value < 1:
            raise ArgumentError(f"config: got {name}={value!r}, expected an integer of at least 1")


def row_tile(cols: int, format: str, config) -> RowTile:
    """That of a config of lanes and rows; `config_fits` says whether it is one of a weight."""
    positive_integers(config)
    return RowTile(cols, format, config.lanes, config.rows)


def fits(config, H: int, I: int, K: int, format: str) -> bool:
    """Whether a kernel can run with a configuration."""
    try:
        config.check(H, I, K, format)
    except ArgumentError:
        return False
    return True


def config_fits(name: str, rows: RowTile, n: int, unroll: int) -> None:
    """Refuses a config that does not divide the work evenly."""
    # A warpgroup's rows must lie under one row of scales where scales cover several rows.
    multiple = math.gcd(n, *(scale.rows for scale in rows.spec.scales if scale.rows and scale.rows > 1))
    if rows.lanes not in LANE_COUNTS or rows.step > rows.cols or rows.rows < 1 or multiple % rows.out_rows:
        raise ArgumentError(
            f"config: lanes={rows.lanes}, rows={rows.rows} do not fit {name} [.., {n}, {rows.cols}]; lanes must "
            f"be 4, 8, 16 or 32 and cover at most one row ({rows.vec} columns each), and a warpgroup's {rows.out_rows} "
            f"rows must divide {multiple}")
    if type(unroll) is not int or not 1 <= unroll <= MOST_UNROLL:
        raise ArgumentError(f"config: got unroll={unroll!r}, expected 1 to {MOST_UNROLL}")
