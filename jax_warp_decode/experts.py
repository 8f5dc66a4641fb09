"""The weights and biases of the experts of one layer, as a pytree, with their shape rules."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_warp_decode import formats
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import QuantizedArray

Weight = jax.Array | QuantizedArray

# Names of the unquantised formats, by dtype.
DENSE_FORMATS = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16", jnp.dtype(jnp.float32): "f32"}

MATRICES = ("w_gate", "w_up", "w_down")
MATRIX_OF = {"b_gate": "w_gate", "b_up": "w_up", "b_down": "w_down"}  # bias -> what it is added to the product of
BIASES = tuple(MATRIX_OF)
ORDERS = ("concatenated", "interleaved")  # of gate and up rows in one array


def weight_format(w: Weight) -> str:
    """Name of the storage format of one weight: "bf16", "f16", "f32" or the format of a `QuantizedArray`."""
    if isinstance(w, QuantizedArray):
        return w.format
    return DENSE_FORMATS.get(jnp.dtype(w.dtype), str(w.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Weights of E gated experts, in checkpoint order: the reduction dimension is last and contiguous.

    Attributes:
      w_gate: [E, I, H] gate projection; bfloat16, float16, float32 or a `QuantizedArray`; None for an activation
        without a gate, such as "relu2".
      w_up: [E, I, H] up projection, same format.
      w_down: [E, H, I] down projection, same format.
      b_gate, b_up: [E, I] floats added to the projections in float32, or None; an expert is then
        w_down act(w_gate x + b_gate, w_up x + b_up) + b_down, all of it times the routing weight.
      b_down: [E, H] floats, or None.

    The weights of L layers may be stacked, [L, E, I, H], [L, E, H, I] and so on; `moe` then takes the number of the
    layer.

    The object is a pytree: pass it through `jit`, `lax.scan`, `jax.device_put` or an optimiser like any array.
    Construction does not check anything, so that a pytree transform may put other leaves in; `check` does, and `moe`
    calls it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_warp_decode import ExpertWeights
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> make = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
      >>> experts = ExpertWeights(make(keys[0], 8, 64, 128), make(keys[1], 8, 64, 128), make(keys[2], 8, 128, 64))
      >>> experts.num_experts, experts.hidden, experts.intermediate, experts.format
      (8, 128, 64, 'bf16')
      >>> experts.quantize("mxfp8").format
      'mxfp8'
    """

    w_gate: Weight | None
    w_up: Weight
    w_down: Weight
    b_gate: jax.Array | None = None
    b_up: jax.Array | None = None
    b_down: jax.Array | None = None

    @classmethod
    def from_gate_up(cls, w_gate_up: Weight, w_down: Weight, *, order: str, b_gate_up: jax.Array | None = None,
                     b_down: jax.Array | None = None) -> "ExpertWeights":
        """Weights whose gate and up projections share an array, as in transformers and many checkpoints.

        Args:
          w_gate_up: [E, 2 I, H], or [L, E, 2 I, H]; floats or a `QuantizedArray`.
          w_down: [E, H, I], or [L, E, H, I].
          order: of the rows: "concatenated", all of gate before all of up, or "interleaved", a row of each in turns,
            gate first (gpt-oss).
          b_gate_up, b_down: [E, 2 I] and [E, H], or None.

        w_gate and w_up are copies; where memory is short, donate w_gate_up to a `jit` around this, or go by layers.

        Raises:
          ArgumentError: an unknown order, shapes that do not fit, or rows of gate and of up under one scale.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_warp_decode import ExpertWeights
          >>> rows, w_down = jnp.arange(8.0).reshape(1, 4, 2), jnp.ones((1, 2, 2))
          >>> ExpertWeights.from_gate_up(rows, w_down, order="concatenated").w_up.tolist()
          [[[4.0, 5.0], [6.0, 7.0]]]
          >>> ExpertWeights.from_gate_up(rows, w_down, order="interleaved").w_up.tolist()
          [[[2.0, 3.0], [6.0, 7.0]]]
        """
        if not isinstance(order, str) or order not in ORDERS:
            raise ArgumentError(f"order: got {order!r}, expected one of {ORDERS}")
        shape: tuple[int, ...] = getattr(w_gate_up, "shape", ())
        if len(shape) not in (3, 4) or shape[-2] % 2:
            got = f"shape {shape}" if shape else type(w_gate_up).__name__
            raise ArgumentError(f"w_gate_up: got {got}, expected [E, 2 I, H], or [L, E, 2 I, H] for stacked layers")
        w_gate, w_up = _halves("w_gate_up", w_gate_up, order)
        b_gate = b_up = None
        if b_gate_up is not None:
            if isinstance(b_gate_up, QuantizedArray):
                raise ArgumentError(f"b_gate_up: got {describe(b_gate_up)}, expected {shape[:-1]} floats; "
                                    "biases are never quantised")
            b_gate_up = jnp.asarray(b_gate_up)
            if b_gate_up.shape != shape[:-1]:
                raise ArgumentError(f"b_gate_up: got shape {b_gate_up.shape}, expected {shape[:-1]} to match w_gate_up "
                                    f"{shape}")
            b_gate, b_up = _cut(b_gate_up, order, -1)
        experts = cls(w_gate, w_up, w_down, b_gate, b_up, b_down)
        experts.check()
        return experts

    @property
    def num_experts(self) -> int:
        return self.w_up.shape[-3]

    @property
    def intermediate(self) -> int:
        return self.w_up.shape[-2]

    @property
    def hidden(self) -> int:
        return self.w_up.shape[-1]

    @property
    def layers(self) -> int | None:
        """L of stacked weights, None for the weights of one layer."""
        return self.w_up.shape[0] if self.w_up.ndim == 4 else None

    @property
    def weights(self) -> dict[str, Weight]:
        """The matrices that there are, by name."""
        return _present(self, MATRICES)

    @property
    def biases(self) -> dict[str, jax.Array]:
        """The biases that there are, by name."""
        return _present(self, BIASES)

    def map(self, fn: Callable, *names: str) -> "ExpertWeights":
        """The same experts with `fn` applied to each tensor that there is, or to those named.

        Example:
          >>> import jax.numpy as jnp
          >>> from jax_warp_decode import ExpertWeights
          >>> w = jnp.zeros((4, 32, 32))
          >>> ExpertWeights(w, w, w).map(lambda w: w[:2]).num_experts
          2
        """
        present = self.weights | self.biases
        return dataclasses.replace(self, **{name: fn(present[name]) for name in names or present if name in present})

    def __getitem__(self, layer) -> "ExpertWeights":
        """One layer of a stack, or a slice of it; a copy unless XLA can fuse it away."""
        return self.map(lambda a: a[layer])

    @property
    def format(self) -> str:
        """Storage format of the weights, see `weight_format`."""
        return weight_format(self.w_up)

    def quantize(self, format: str) -> "ExpertWeights":
        """The same experts in another format, for example "mxfp8"; the reduction dimension carries the blocks.

        Biases stay as they are.

        Raises:
          ArgumentError: an unknown format, or weights that are quantised already.
        """
        if self.format not in DENSE_FORMATS.values():
            raise ArgumentError(f"experts: got {self.format} weights, expected plain ones to quantise to {format}; the "
                                "originals, or those of `map(dequantize, *MATRICES)`")
        return self.map(lambda w: formats.quantize(w, format), *MATRICES)

    def astype(self, dtype: DTypeLike) -> "ExpertWeights":
        """The same experts with plain matrices of another dtype; biases stay as they are.

        Raises:
          ArgumentError: a dtype that weights cannot have, or quantised weights, of which this would silently make large
            plain ones.
        """
        try:
            known = jnp.dtype(dtype) in DENSE_FORMATS
        except TypeError:  # numpy's, of a name that it does not know
            known = False
        if not known:
            raise ArgumentError(f"dtype: got {dtype!r}, expected {', '.join(map(str, DENSE_FORMATS))}; `quantize` has "
                                "the others")
        if self.format not in DENSE_FORMATS.values():
            size = sum(math.prod(w.shape) for w in self.weights.values()) * jnp.dtype(dtype).itemsize
            raise ArgumentError(f"experts: got {self.format} weights, expected plain ones; in {jnp.dtype(dtype)} they "
                                f"take {size:,} bytes, which `map(dequantize, *MATRICES)` makes if you want them")
        return self.map(lambda w: w.astype(dtype), *MATRICES)

    def check(self, what: str = "experts") -> None:
        """Raises `ArgumentError` unless all tensors have matching shapes and the matrices one supported format.

        what: the argument that messages name.
        """
        named = self.weights
        for name in ("w_up", "w_down"):
            if name not in named:
                raise ArgumentError(f"{what}.{name}: got None, expected an array; only w_gate may be None")
        for name, w in named.items():
            if isinstance(w, QuantizedArray):
                w.check_parts(f"{what}.{name}")
            elif not hasattr(w, "dtype"):
                raise ArgumentError(f"{what}.{name}: got {type(w).__name__}, expected a jax array or a QuantizedArray")
            if w.ndim not in (3, 4):
                axes = "E, H, I" if name == "w_down" else "E, I, H"
                raise ArgumentError(
                    f"{what}.{name}: got shape {w.shape}, expected [{axes}], or [L, {axes}] for stacked layers")
            if isinstance(w, QuantizedArray):
                w.check(f"{what}.{name}")
            elif jnp.dtype(w.dtype) not in DENSE_FORMATS:
                raise ArgumentError(
                    f"{what}.{name}: got dtype {w.dtype}, expected bfloat16, float16, float32 or a QuantizedArray; "
                    f"quantise with ExpertWeights.quantize or wrap values and scales in a QuantizedArray")
        first = next(name for name in ("w_gate", "w_up") if name in named)
        *stacked, E, I, H = named[first].shape
        L = "L, " * len(stacked)
        for name, want in (("w_up", (*stacked, E, I, H)), ("w_down", (*stacked, E, H, I))):
            if named[name].shape != want:
                layout = f"[{L}E, H, I]" if name == "w_down" else f"[{L}E, I, H]"
                raise ArgumentError(
                    f"{what}.{name}: got shape {named[name].shape}, expected {want} = {layout} to match "
                    f"{first} {named[first].shape} = [{L}E, I, H]")
        if len({weight_format(w) for w in named.values()}) > 1:
            got = {name: weight_format(w) for name, w in named.items()}
            raise ArgumentError(f"{what}: got mixed formats {got}, expected one format for all matrices")
        self._check_biases(what, (*stacked, E), L)

    def _check_biases(self, what: str, leading: tuple[int, ...], L: str) -> None:
        for name, b in self.biases.items():
            matrix = MATRIX_OF[name]
            if getattr(self, matrix) is None:
                raise ArgumentError(f"{what}.{name}: got an array without {matrix}, expected None")
            if not is_float_array(b) or jnp.dtype(b.dtype) not in DENSE_FORMATS:
                raise ArgumentError(f"{what}.{name}: got {describe(b)}, expected a bfloat16, float16 or float32 "
                                    "array; biases are never quantised")
            want = (*leading, getattr(self, matrix).shape[-2])
            if b.shape != want:
                raise ArgumentError(f"{what}.{name}: got shape {b.shape}, expected {want} = "
                                    f"[{L}E, {'H' if matrix == 'w_down' else 'I'}] to match {matrix}")


def check_experts(experts, name: str = "experts") -> None:
    """Raises `ArgumentError` unless these are sound `ExpertWeights`."""
    if not isinstance(experts, ExpertWeights):
        raise ArgumentError(f"{name}: got {type(experts).__name__}, expected ExpertWeights(w_gate, w_up, w_down)")
    experts.check(name)


def _cut(a: jax.Array, order: str, axis: int) -> tuple[jax.Array, jax.Array]:
    """The part of gate and that of up along an axis, which is counted from the last one."""
    half, after = a.shape[axis] // 2, (slice(None),) * (-1 - axis)
    first, second = ((slice(half), slice(half, None)) if order == "concatenated"
                     else (slice(0, None, 2), slice(1, None, 2)))
    return a[..., first, *after], a[..., second, *after]


def _halves(name: str, w: Weight, order: str) -> tuple[Weight, ...]:
    """[.., 2 I, H] -> the rows of gate and those of up, [.., I, H]."""
    if not isinstance(w, QuantizedArray):
        return _cut(w, order, -2)
    w.check(name)
    block = w.spec.block_shape[0]  # rows under one scale, None for all
    if block is None:
        scales = w.scales, w.scales
    elif block == 1 or order == "concatenated" and w.shape[-2] // 2 % block == 0:
        scales = _cut(w.scales, order, -2)
    else:
        raise ArgumentError(f"{name}: got {order} rows in format {w.format!r}, which has one scale for {block} rows, "
                            "here of gate and of up; dequantise it first")
    return tuple(dataclasses.replace(w, values=v, scales=s)
                 for v, s in zip(_cut(w.values, order, -2), scales, strict=True))


def _present(experts, names):
    return {name: a for name in names if (a := getattr(experts, name)) is not None}


def is_float(dtype) -> bool:
    """Whether this names a floating dtype.

    Example:
      >>> from jax_warp_decode.experts import is_float
      >>> is_float("bfloat16"), is_float("int8"), is_float("banana")
      (True, False, False)
    """
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def is_float_array(a) -> bool:
    """Whether this is a plain floating array. A `QuantizedArray`, which has a floating dtype too, is none.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax_warp_decode import quantize
      >>> from jax_warp_decode.experts import is_float_array
      >>> w = jnp.ones((1, 32))
      >>> is_float_array(w), is_float_array(quantize(w, "mxfp8")), is_float_array([1.0])
      (True, False, False)
    """
    return hasattr(a, "dtype") and not isinstance(a, QuantizedArray) and is_float(a.dtype)


def describe(a) -> str:
    """What came for an array, in messages: its format or dtype and its shape, or its type."""
    if isinstance(a, QuantizedArray):
        return f"{a.format} {a.shape}"
    return f"{a.dtype} {a.shape}" if hasattr(a, "dtype") else type(a).__name__


def plain_or(a, way_out: str) -> str:
    """The way out of an argument that must be a plain array; a `QuantizedArray` has one of its own."""
    return "dequantise it" if isinstance(a, QuantizedArray) else way_out
