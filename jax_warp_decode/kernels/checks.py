"""What the two kernels refuse, and how they say so."""

import math

import jax.numpy as jnp

from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.experts import Weight
from jax_warp_decode.formats import QuantizedArray
from jax_warp_decode.kernels.expert_index import ExpertIndex
from jax_warp_decode.kernels.tile import RowTile

HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
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


def _dtype(name: str, a, allowed, way_out: str) -> None:
    if jnp.dtype(a.dtype) not in allowed:
        raise ArgumentError(f"{name}: got dtype {a.dtype}, expected {' or '.join(map(str, allowed))}; {way_out}")


def gate_up_shapes(x, ids, w_gate: Weight, w_up: Weight, index: ExpertIndex) -> tuple[int, int, int, int]:
    """Checks the arguments of `moe_gate_up_3d_batched`; returns T, K, H, I."""
    stack = "L" if index.layers is not None else ""
    _rank("x", x, "TH")
    _rank("ids", ids, "TK")
    _rank("w_gate", w_gate, f"{stack}EIH")
    (T, H), I, stacked = x.shape, w_gate.shape[-2], w_gate.shape[:-2]
    axes = ", ".join(f"{stack}EIH")
    _matches("w_gate", w_gate, (*stacked, I, H), f"[{axes}] with H from x {x.shape}")
    _rank("w_up", w_up, f"{stack}EIH")
    _matches("w_up", w_up, (*stacked, I, H), f"[{axes}] as w_gate {w_gate.shape}")
    _matches("ids", ids, (T, ids.shape[1]), f"[T, K] with T from x {x.shape}")
    _dtype("x", x, HALF, f"cast x, or {WAY_OUT} for float32 activations")
    if weight_itemsize("w_gate", w_gate) != weight_itemsize("w_up", w_up):
        raise ArgumentError(f"w_up: got {w_up.dtype} {type(w_up).__name__}, expected the format of w_gate")
    return T, ids.shape[1], H, I


def down_shapes(h, ids, weights, w_down: Weight, index: ExpertIndex) -> tuple[int, int, int, int]:
    """Checks the arguments of `moe_down_3d_batched`; returns T, K, H, I."""
    stack = "L" if index.layers is not None else ""
    _rank("h", h, "TKI")
    _rank("w_down", w_down, f"{stack}EHI")
    (T, K, I), H, stacked = h.shape, w_down.shape[-2], w_down.shape[:-2]
    _matches("w_down", w_down, (*stacked, H, I), f"[{', '.join(f'{stack}EHI')}] with I from h {h.shape}")
    _matches("ids", ids, (T, K), f"[T, K] as in h {h.shape}")
    _matches("weights", weights, (T, K), f"[T, K] as in h {h.shape}")
    _dtype("h", h, OUT_DTYPES, "cast h")
    return T, K, H, I


def out_dtype(dtype) -> jnp.dtype:
    """The dtype of a result, or an error."""
    if jnp.dtype(dtype) not in OUT_DTYPES:
        raise ArgumentError(f"out_dtype: got {jnp.dtype(dtype)}, expected {', '.join(map(str, OUT_DTYPES))}")
    return jnp.dtype(dtype)


def weight_itemsize(name: str, w: Weight) -> int:
    """Bytes per stored value of a weight the kernels can read."""
    if isinstance(w, QuantizedArray):
        w.check(name)
        if w.format != "mxfp8":
            raise UnsupportedError(f"{name}: got format {w.format!r}, warp decode reads 'mxfp8' and dense bf16 or f16; "
                                   f"requantise, or {WAY_OUT}")
        return 1
    _dtype(name, w, HALF, f"cast or quantise the weights, or {WAY_OUT}")
    return 2


def dimensions(name: str, cols: int, n: int, itemsize: int) -> None:
    """Refuses a weight [n, cols] that no `RowTile` can walk."""
    least = 32 if itemsize == 2 else 64
    if cols % 32 or cols < least or n % 32:
        padded = max(least, math.ceil(cols / 32) * 32)
        raise UnsupportedError(
            f"{name}: got [.., {n}, {cols}], warp decode needs multiples of 32 and at least {least} columns; pad with "
            f"zeros to [.., {math.ceil(n / 32) * 32}, {padded}] once, or {WAY_OUT}")


def config_type(config, kind: type):
    """The config, or an error if it is another kernel's."""
    if not isinstance(config, kind):
        raise ArgumentError(f"config: got {type(config).__name__}, expected {kind.__name__} or None")
    return config


def config_fits(name: str, rows: RowTile, n: int, unroll: int) -> None:
    """Refuses a config that does not divide the work evenly."""
    if rows.lanes not in (4, 8, 16, 32) or rows.step > rows.cols or rows.rows < 1 or n % rows.out_rows:
        raise ArgumentError(
            f"config: lanes={rows.lanes}, rows={rows.rows} do not fit {name} [.., {n}, {rows.cols}]; lanes must "
            f"be 4, 8, 16 or 32 and cover at most one row ({rows.vec} columns each), and a warpgroup's {rows.out_rows} "
            f"rows must divide {n}")
    if unroll < 1:
        raise ArgumentError(f"config: got unroll={unroll}, expected at least 1")
