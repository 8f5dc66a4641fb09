"""The strategies under test, by name: ours and the peers that a JAX user could choose instead.

Every peer gets the weights in the orientation it prefers and shares our sorting and our combine, so that only the
grouped GEMM differs.
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp

from jax_warp_decode import ExpertWeights, moe
from jax_warp_decode.measure import inputs
from jax_warp_decode.paths.expert_centric import align, combine, gather


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to run the routed experts.

    Attributes:
      name: as on the command line.
      formats: weight formats it can take.
      layer: (x [T, H], routing, weights) -> y [T, H].
      prepare: ExpertWeights -> weights in the orientation of `layer`; done once, not timed.
      missing: why it cannot run here, or an empty string.
    """

    name: str
    formats: tuple[str, ...]
    layer: Callable
    prepare: Callable = lambda experts: experts
    missing: Callable[[], str] = lambda: ""


def _ours(name, **options):
    return Strategy(name, inputs.FORMATS, functools.partial(moe, **options))


@jax.jit
def _gate_up_first(experts: ExpertWeights):
    """[E, I, H] and [E, H, I] -> one [E, H, 2I] for both projections, and [E, I, H]."""
    return (jnp.concatenate([experts.w_gate, experts.w_up], axis=1).swapaxes(1, 2), experts.w_down.swapaxes(1, 2))


@jax.jit
def _gate_up_in_checkpoint_order(experts: ExpertWeights):
    """[E, I, H] twice -> one [E, 2I, H]; [E, H, I] as it is: what a checkpoint holds."""
    return jnp.concatenate([experts.w_gate, experts.w_up], axis=1), experts.w_down


def _transposed(ragged_dot):
    """ragged_dot over weights [E, N, K]: a view for a kernel that reads them so, else a copy in every call."""
    return lambda rows, w, group_sizes: ragged_dot(rows, w.swapaxes(1, 2), group_sizes)


def _sorted_layer(ragged_dot, x, routing, weights):
    """The conventional path around ragged_dot(rows [M, K], w [E, K, N], group_sizes [E]) -> [M, N]."""
    w_gate_up, w_down = weights
    alignment = align(routing.ids, w_gate_up.shape[0])
    gate, up = jnp.split(ragged_dot(gather(x, alignment), w_gate_up, alignment.group_sizes), 2, axis=1)
    h = (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype)
    out = ragged_dot(h, w_down, alignment.group_sizes).astype(jnp.float32)
    return combine(out, alignment, routing, w_down.shape[0]).astype(x.dtype)


def _peer(name, ragged_dot, missing=lambda: "", prepare=_gate_up_first):
    return Strategy(name, ("bf16",), functools.partial(_sorted_layer, ragged_dot), prepare, missing)


def _lax_ragged_dot(rows, w, group_sizes):
    return jax.lax.ragged_dot(rows, w, group_sizes, preferred_element_type=jnp.float32).astype(rows.dtype)


def _tokamax_missing(*modules):
    absent = [m for m in ("tokamax", *modules) if importlib.util.find_spec(m) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for xprof: tokamax imports it for benchmarks of its own, which are not used here."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "xprof" else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: mock.MagicMock()
        return module

    def exec_module(self, module):
        pass


def _tokamax_kernels(name: str):
    if importlib.util.find_spec("xprof") is None:
        sys.meta_path.append(_Absent())
    return importlib.import_module(f"tokamax._src.ops.ragged_dot.{name}")


def _tokamax_mosaic(rows, w, group_sizes, *, persistent=False, block=(64, 64, 128)):
    kernels = _tokamax_kernels("pallas_mosaic_gpu")

    # No table for the H200 ships with tokamax. Small tiles compile for every shape here; its heuristics use 2 stages.
    m, n, k = block
    config = kernels.Config(block_m=m, block_n=n, block_k=k, num_stages=4, split_k=1, persistent=persistent)
    return kernels.PallasMosaicGpuRaggedDot(config=config)(rows, w, group_sizes=group_sizes)


_tokamax_mosaic_large = functools.partial(_tokamax_mosaic, block=(128, 128, 64))


def _tokamax_triton(rows, w, group_sizes):
    kernels = _tokamax_kernels("triton")
    config = kernels.Config(block_m=16, block_n=128, block_k=64, num_stages=4, num_warps=4)
    return kernels.TritonRaggedDot(config=config)(rows, w, group_sizes=group_sizes)


STRATEGIES = {s.name: s for s in (
    _ours("warp_decode", strategy="warp_decode"),
    _ours("shared_decode", strategy="shared_decode"),
    _ours("expert_centric", strategy="expert_centric"),
    _ours("expert_centric_mxfp8", strategy="expert_centric", activation_format="mxfp8"),
    _peer("lax_ragged_dot", _lax_ragged_dot),
    _peer("tokamax_mosaic", _tokamax_mosaic, _tokamax_missing),
    _peer("tokamax_mosaic_persistent", functools.partial(_tokamax_mosaic, persistent=True), _tokamax_missing),
    _peer("tokamax_mosaic_large", _tokamax_mosaic_large, _tokamax_missing),
    _peer("tokamax_mosaic_checkpoint", _transposed(_tokamax_mosaic), _tokamax_missing, _gate_up_in_checkpoint_order),
    _peer("tokamax_mosaic_large_checkpoint", _transposed(_tokamax_mosaic_large), _tokamax_missing,
          _gate_up_in_checkpoint_order),
    _peer("tokamax_triton", _tokamax_triton, functools.partial(_tokamax_missing, "jax_triton")),
)}
