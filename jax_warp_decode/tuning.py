"""Which configuration a kernel runs with: a measured one where there is one, a rule of thumb elsewhere.

The first source that has an answer wins:

1. the kernel's `config` argument, or an enclosing `override`;
2. the user's file, written by `jax-warp-decode autotune`, see `tuned_table.user_file`;
3. the table that ships with the package for this kind of GPU, `data/tuned/<device>.json`;
4. the heuristic of the kernel's config classes. An interpreted kernel always takes that of the first class.

Measurements belong to a kernel, a weight format, H, I, K and a number of tokens T. Another T takes the measured one
that is nearest on a log scale (the smaller of two equally near), if they differ by a factor of two at most; any other
shape takes the heuristic. Files speak for one kind of GPU only, and without a GPU none is read.

All of it is decided while JAX traces, so that a compiled function keeps its configurations. A file is read when a
kernel is first traced and again when it has changed; functions that are compiled by then do not change with it. An
`override` is part of the key of JAX's compilation cache.
"""

import contextlib
import dataclasses
import itertools
from typing import Any

import jax

from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.tuned_table import Entry, Table, packaged_table, refused, user_table

MOST_RATIO = 2  # between the T that is asked for and the T that was measured

_overrides = jax.make_user_context(default_value=())


@dataclasses.dataclass(frozen=True)
class Found:
    """A configuration and where it comes from, in words."""

    config: object
    source: str


def override(*configs):
    """A context in which kernels that are traced take these configurations, one per kernel.

    Works through `moe` and the layers, which have no `config` argument. The innermost context wins.

    Raises:
      ArgumentError: something that is no configuration of "moe_gate_up" or "moe_down", or two of one kernel. Whether
        it fits a call is found there, by `find`.

    Example:
      >>> from jax_warp_decode import tuning
      >>> from jax_warp_decode.kernels import DownConfig
      >>> with tuning.override(DownConfig(lanes=32, rows=1, unroll=4)):
      ...     tuning.find("moe_down", (DownConfig,), None, format="bf16", T=1, K=8, H=2048, I=768)
      Found(config=DownConfig(lanes=32, rows=1, unroll=4), source='tuning.override')
    """
    from jax_warp_decode.explain import KERNELS  # here, as the kernels import this module
    from jax_warp_decode.kernels import checks

    known = tuple(itertools.chain(*KERNELS.values()))
    for config in configs:
        if not isinstance(config, known):
            raise ArgumentError(f"configs: got {config!r}, expected a kernel configuration: "
                                f"{' or '.join(kind.__name__ for kind in known)}")
        with _naming_override():
            checks.positive_integers(config)
    for kernel, kinds in KERNELS.items():
        if len(own := [config for config in configs if isinstance(config, kinds)]) > 1:
            raise ArgumentError(f"configs: got {own[0]} and {own[1]}, expected one configuration of {kernel}")
    return _overrides((*configs, *_overrides.value))


@contextlib.contextmanager
def _naming_override():
    """A refusal of `config`, which a caller of `moe` never passed, names where it came from."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(f"tuning.override: {str(error).removeprefix('config: ')}") from None


def find(kernel: str, kinds: tuple[Any, ...], config: Any, *, format: str, T: int, K: int, H: int, I: int,
         interpret: bool = False) -> Found:
    """The configuration of one kernel call, see the module docstring.

    Args:
      kernel: "moe_gate_up" or "moe_down".
      kinds: its config classes, each with a classmethod `heuristic(T, K, H, I, format)`, see `rule_of_thumb`.
      config: the caller's own choice, or None.
      format: of the weights, see `experts.weight_format`.
      T, K, H, I: tokens, experts per token, hidden and intermediate size.
      interpret: whether the kernel will be interpreted.

    Raises:
      ArgumentError: a file that cannot be used, which is named, with the way out; or the configuration of an
        `override`, if it does not fit. The caller's own is the caller's to check.
    """
    if config is not None:
        return Found(config, "the config argument")
    for config in _overrides.value:
        if isinstance(config, kinds):
            if interpret and not isinstance(config, kinds[0]):
                raise ArgumentError(f"tuning.override: got {type(config).__name__} in the interpreter, expected "
                                    f"{kinds[0].__name__}")
            with _naming_override():
                config.check(H, I, K, format)
            return Found(config, "tuning.override")
    if interpret:
        return Found(kinds[0].heuristic(T, K, H, I, format), "heuristic: interpreted, so no measurement applies")
    device = device_kind()
    if device is None:
        return Found(rule_of_thumb(kinds, T, K, H, I, format), "heuristic: no GPU, so no measurement applies")
    for table in (user_table(device), packaged_table(device)):
        measured = table.shapes.get((kernel, format, H, I, K)) if table else None
        nearest = nearest_tokens(measured, T) if measured else None
        if table and measured and nearest:
            entry = measured[nearest]
            found = _make(kinds, entry, table)
            return Found(found, f"{table.path}, measured with T={nearest}, jax {entry.jax}, {entry.date[:10]}")
    return Found(rule_of_thumb(kinds, T, K, H, I, format),
                 f"heuristic: nothing measured on {device} for {format} H={H} I={I} K={K} near T={T}")


def rule_of_thumb(kinds: tuple[Any, ...], T: int, K: int, H: int, I: int, format: str):
    """The heuristic of the last class that has one for this shape; the first has one for every shape."""
    found = (kind.heuristic(T, K, H, I, format) for kind in reversed(kinds))
    return next(config for config in found if config is not None)


def device_kind() -> str | None:
    """The kind of GPU that measurements must belong to; None if the default backend is no GPU."""
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None


def nearest_tokens(measured, T: int) -> int | None:
    """The measured T that speaks for T, or None.

    Example:
      >>> from jax_warp_decode.tuning import nearest_tokens
      >>> [nearest_tokens([1, 2, 8], T) for T in (1, 3, 4, 5, 16, 17)]
      [1, 2, 2, 8, 8, None]
    """
    ratio = lambda m: max(m / T, T / m)
    best = min(measured, key=lambda m: (ratio(m), m))
    return best if ratio(best) <= MOST_RATIO else None


def _make(kinds: tuple[Any, ...], entry: Entry, table: Table):
    """The configuration of an entry: of the class that has its fields."""
    fields: list[dict[str, Any]] = [{f.name: f.type for f in dataclasses.fields(kind)} for kind in kinds]
    fitting = [kind for kind, types in zip(kinds, fields, strict=True) if types.keys() == entry.config.keys()
               and all(type(value) is types[name] for name, value in entry.config.items())]
    if not fitting:
        held = ", ".join(f"{name}={value!r}" for name, value in entry.config.items())
        expected = " or ".join(f"{kind.__name__}({', '.join(of)})" for kind, of in zip(kinds, fields, strict=True))
        raise refused(table.path, f"holds {held} for {entry.kernel}, expected integers: {expected}")
    config = fitting[0](**entry.config)
    try:
        config.check(entry.H, entry.I, entry.K, entry.format)
    except ArgumentError as error:
        raise refused(table.path, f"holds a configuration that does not fit ({error})") from None
    return config
