"""Tokens split over the very devices that split the experts: how rows reach the experts, and their sums come home.

With n devices, T tokens on each and K slots a token, two ways:

- "gather": every device gets every row, and sums are scattered: (n - 1) T rows each way, two collectives. Static shapes
  leave no room for less in a plain all-to-all, since any token may choose any device.
- "all_to_all": a row goes to the devices that own one of its experts, with even routing 1 - (1 - 1/n)^K of the others.
  Who those are follows from ids that are gathered first, a third collective, of 8 K bytes a token.

So the second always moves fewer bytes, and pays where the bytes saved take longer than a collective.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_warp_decode import varying
from jax_warp_decode.errors import ArgumentError, UnsupportedError
from jax_warp_decode.routing import Routing

WAYS = ("auto", "gather", "all_to_all")
# What crosses a link of two H200s in the 10 us of one more collective (bench/results/collectives.json).
COLLECTIVE_BYTES = 2e6


def choose(tokens: int, hidden: int, itemsize: int, devices: int, experts_per_token: int) -> str:
    """The way for `tokens` tokens of `hidden` values on each device, with results of `itemsize` bytes a value.

    Example:
      >>> from jax_warp_decode import exchange
      >>> [exchange.choose(4, 7168, 4, devices, 8) for devices in (2, 8, 64)]
      ['gather', 'gather', 'all_to_all']
    """
    row = hidden * (2 + itemsize)
    spared = (devices - 1) * tokens * row * (1 - 1 / devices) ** experts_per_token
    return "all_to_all" if spared > COLLECTIVE_BYTES else "gather"


def resolve(way: str, axes: tuple[str, ...], expert_axis: tuple[str, ...], **sizes) -> str:
    """`way`, with "auto" decided: "all_to_all" is for GPUs alone, over one axis that splits the experts.

    `axes` split both tokens and weights, `sizes` are those of `choose`.

    Raises:
      ArgumentError: an unknown way.
      UnsupportedError: "all_to_all" where it cannot be.
    """
    if way not in WAYS:
        raise ArgumentError(f"exchange: got {way!r}, expected one of {list(WAYS)}")
    fits = axes == expert_axis and len(axes) == 1
    if way == "all_to_all" and not fits:
        raise UnsupportedError(f"exchange: 'all_to_all' needs tokens and experts to share one axis alone; they share "
                               f"{list(axes)}, and experts lie over {list(expert_axis)}; use 'gather' or 'auto'")
    if way == "all_to_all" and not has_ragged():
        raise UnsupportedError(f"exchange: 'all_to_all' needs GPUs, XLA has no ragged all-to-all for the backend "
                               f"{jax.default_backend()!r}; use 'gather', or 'auto', which takes it there")
    if way != "auto":
        return way
    return choose(**sizes) if fits and sizes["tokens"] and has_ragged() else "gather"


def has_ragged() -> bool:
    """Whether XLA runs `lax.ragged_all_to_all` on the default backend."""
    return jax.default_backend() == "gpu"


def gather(x, routing: Routing, axes: tuple[str, ...]) -> tuple:
    """Rows and routing of all devices along `axes`, and the function that sums results and keeps this device's rows.

    x is a pytree of arrays with rows.
    """
    if not routing.ids.shape[0]:  # collectives refuse no rows
        return x, routing, lambda y: y
    x, routing = jax.tree.map(lambda a: lax.all_gather(a, axes, tiled=True), (x, routing))
    return x, routing, lambda y: lax.psum_scatter(y, axes, tiled=True)


def all_to_all(x: jax.Array, routing: Routing, axis: str, experts: int) -> tuple[jax.Array, Routing, Callable]:
    """Rows that this device's experts need, with their routing, and the function that sends results home and sums them.

    Args:
      x: [T, H], routing [T, K] of this device's tokens, with ids of all experts.
      axis: splits tokens and experts over n devices.
      experts: on each device.

    Returns:
      x [n * T, H]; `Routing` [n * T, K], -1 for rows that nobody sent; y [n * T, H] -> [T, H].
    """
    n, me = lax.axis_size(axis), lax.axis_index(axis).astype(jnp.int32)
    (T, K), int32 = routing.ids.shape, jnp.int32
    ids, weights = (lax.all_gather(a, axis) for a in (routing.ids, routing.weights))  # [n, T, K]
    owner = jnp.where((ids >= 0) & (ids < int32(n * experts)), ids // int32(experts), int32(n))
    need = jnp.any(owner[..., None] == jnp.arange(n, dtype=int32), axis=2)  # [from, T, to]
    sizes = jnp.sum(need, axis=1, dtype=int32)  # [from, to]
    starts = jnp.cumsum(sizes, axis=1, dtype=int32) - sizes  # in the buffer that a device sends

    mine = need[me]  # [T, to]
    place = starts[me] + jnp.cumsum(mine, axis=0, dtype=int32) - mine.astype(int32)
    rows = T * min(n, K)
    token = jnp.broadcast_to(jnp.arange(T, dtype=int32)[:, None], mine.shape)
    token = jnp.zeros((rows,), int32).at[jnp.where(mine, place, int32(rows))].set(token, mode="drop")
    slots = jnp.arange(n, dtype=int32) * int32(T)  # where the rows of each device lie in the buffer that one receives
    received = _ragged(x[token], _zeros((n * T, x.shape[1]), x), starts[me], sizes[me], jnp.full((n,), me * int32(T)),
                       sizes[:, me], axis)

    order = jnp.argsort(~need[:, :, me], axis=1, stable=True)[..., None]
    there = (jnp.arange(T, dtype=int32) < sizes[:, me, None])[..., None]
    ids = jnp.where(there, jnp.take_along_axis(ids, order, 1), int32(-1)).reshape(-1, K)
    weights = jnp.where(there, jnp.take_along_axis(weights, order, 1), jnp.float32(0)).reshape(-1, K)

    def home(y):
        back = _ragged(y, _zeros((rows, y.shape[1]), y), slots, sizes[:, me], starts[:, me], sizes[me], axis)
        shares = back[jnp.where(mine, place, int32(0))]  # [T, to, H]
        return jnp.sum(jnp.where(mine[..., None], shares, jnp.zeros((), y.dtype)), axis=1)

    return received, Routing(ids, weights), home


def _zeros(shape, like):
    return varying.like(jnp.zeros(shape, like.dtype), like)


def _ragged(rows, out, starts, sizes, places, receives, axis):
    return lax.ragged_all_to_all(rows, out, starts, sizes, places, receives, axis_name=axis)
