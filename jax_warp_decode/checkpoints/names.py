"""Many names of tensors in a few words: what a message says about a folder that does not fit."""

import re
from collections.abc import Iterable, Sequence

from jax_warp_decode.checkpoints import reader

_NUMBER = re.compile(r"(?<=\.)(0|[1-9]\d{0,5})(?=\.)")  # of a layer or an expert: a whole part of a dotted name
_MOST_NUMBERS = 4  # in one name; a hostile one may consist of them
MAX_NAMES = 2**12  # that are looked at
_ONE_BY_ONE = 8  # so many names are better read as they are


def summary(names: Sequence[str], total: int | None = None) -> str:
    """All the names: those that differ in numbers alone as one, with the numbers in braces, exactly.

    Of more than `MAX_NAMES`, the first ones and how many more there are.

    Args:
      names: at least the first `MAX_NAMES`.
      total: how many there are; by default, as many as `names` has.

    Example:
      >>> from jax_warp_decode.checkpoints.names import summary
      >>> summary(["layers.0.up", "norm"])
      'layers.0.up, norm'
      >>> summary([f"layers.{n}.experts.{e}.up" for n in (0, 1, 7) for e in range(64)] + ["layers.7.experts.64.up"])
      'layers.{0, 1}.experts.{0-63}.up, layers.7.experts.{0-64}.up'
    """
    rest = (len(names) if total is None else total) - MAX_NAMES
    text = reader.listing(list(names) if len(names) <= _ONE_BY_ONE else _merge(names[:MAX_NAMES]))
    return f"{text}, and {rest} more names" if rest > 0 else text


def _merge(names: Iterable[str]) -> list[str]:
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in names:
        parts = _NUMBER.split(name, maxsplit=_MOST_NUMBERS)
        groups.setdefault(tuple(parts[::2]), []).append(tuple(map(int, parts[1::2])))
    return ["".join(a + b for a, b in zip(text, (*spans, ""), strict=True))
            for text, numbers in groups.items() for spans in _cover(sorted(set(numbers)))]


def _cover(numbers: Sequence[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """The tuples as products of sets: those with the same tails share a set of first numbers."""
    if not numbers[0]:
        return [()]
    tails: dict[int, list[tuple[int, ...]]] = {}
    for first, *tail in numbers:
        tails.setdefault(first, []).append(tuple(tail))
    firsts: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, after in tails.items():
        firsts.setdefault(tuple(after), []).append(first)
    return [(_span(heads), *rest) for ends, heads in firsts.items() for rest in _cover(ends)]


def _span(numbers: list[int]) -> str:
    """Sorted numbers in braces; three and more neighbours as a range."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    texts = [text for run in runs
             for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(n) for n in run])]
    return texts[0] if len(numbers) == 1 else "{" + ", ".join(texts) + "}"
