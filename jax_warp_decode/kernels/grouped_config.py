"""Sizes that the grouped kernels agree on, and their configurations."""

import dataclasses
import math

from jax_warp_decode.errors import ArgumentError

WARPGROUPS = 2  # that multiply
PART = 64  # weight rows of a product, the M of wgmma
BLOCK = 2 * WARPGROUPS * PART  # weight rows of an item
TILE = 64  # columns of a stage: 128 bytes of bfloat16
CHUNK = 32  # columns of results that the kernel for Blackwell stores at once: registers for any activation
ROW_ALIGNMENT = 8  # of the first row of a group
WIDEST = 144  # rows of a tile that leave room for four stages
SHARED_BYTES = 227 * 1024
SHARED_WITH_SCALES = 163 * 1024  # the rest caches scales: a sector of them lasts for 16 steps
FIELDS = 5  # of a tile: expert, its first tile, its tiles, its first row, its rows


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """Tiles of one kernel.

    Attributes:
      widths: rows of a tile, the N of wgmma, ascending: multiples of 16, at most 192.
      stages: depth of the ring in shared memory.
      ctas: resident CTAs, one per SM.
    """

    widths: tuple[int, ...]
    stages: int
    ctas: int = 132

    @property
    def widest(self) -> int:
        """Rows of a tile."""
        return self.widths[-1]

    @property
    def chunk(self) -> int:
        """Rows of results that a warpgroup stores at once."""
        return min(48, -(-self.widths[-1] // 32) * 16)

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of a CTA: the ring, two chunks of results per warpgroup, barriers; itemsize is a weight's."""
        ring = self.stages * (BLOCK * itemsize + self.widths[-1] * 2) * TILE
        return ring + WARPGROUPS * 2 * self.chunk * PART * 2 + 2048

    def check(self, itemsize: int) -> None:
        widths = self.widths
        if not (widths and list(widths) == sorted(set(widths)) and all(w % 16 == 0 for w in widths)
                and 16 <= widths[0] and widths[-1] <= 192 and 2 <= self.stages <= 16 and self.ctas >= 1):
            raise ArgumentError(f"config: got {self}; widths must ascend in multiples of 16 up to 192, stages 2 to "
                                "16, ctas 1 at least")
        if self.shared_bytes(itemsize) > SHARED_BYTES:
            raise ArgumentError(
                f"config: {self} takes {self.shared_bytes(itemsize)} bytes of shared memory, a CTA has {SHARED_BYTES}")

    @classmethod
    def heuristic(cls, slots: int, experts: int, itemsize: int = 2) -> "GroupedConfig":
        """For `slots` rows in `experts` groups of about the same size.

        Example:
          >>> GroupedConfig.heuristic(slots=4096 * 8, experts=128)
          GroupedConfig(widths=(128, 144), stages=4, ctas=132)
        """
        mean = slots / experts
        tiles = math.ceil((mean + mean**0.5) / WIDEST)  # of a group
        most = mean + 2 * mean**0.5  # holds 97 % of the groups under uniform routing
        usual, wide = (min(WIDEST, max(32, math.ceil(rows / tiles / 16) * 16)) for rows in (mean, most))
        widths = (usual, wide) if usual < wide else (wide,)
        room = SHARED_BYTES if itemsize == 2 else SHARED_WITH_SCALES
        stages = next(s for s in range(6, 1, -1) if cls(widths, s).shared_bytes(itemsize) <= room)
        return cls(widths, stages)


@dataclasses.dataclass(frozen=True)
class Tcgen05Config:
    """Of one kernel for Blackwell, where 128 rows of a tile are the M of tcgen05.

    Attributes:
      stages: depth of the ring in shared memory; 2, 3 or, with bfloat16 weights, 4.
    """

    stages: int = 3

    @property
    def widest(self) -> int:
        """Rows of a tile."""
        return 128

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory of a CTA: the ring, also widened if itemsize is 1, two chunks of results, barriers."""
        ring = self.stages * ((2 if itemsize == 2 else 3) * BLOCK + 2 * self.widest) * TILE
        return ring + 2 * self.widest * CHUNK * 2 + 2048

    def check(self, itemsize: int) -> None:
        if self.stages < 2 or self.shared_bytes(itemsize) > SHARED_BYTES:
            raise ArgumentError(f"config: got {self}; stages must be 2 to {4 if itemsize == 2 else 3}")
