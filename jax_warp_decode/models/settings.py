"""Reads the fields of a Hugging Face config.json: right type, bounded, or one error that names the field."""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_warp_decode.activations import ACTIVATIONS, Activation
from jax_warp_decode.errors import ArgumentError

# Bounds of a size. Far beyond any model, and small enough that work which counts up to one of them ends.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 2**12
LEAST_FLOAT, MOST_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# What a config.json calls some of our activations. All of its activations are gated; "relu2" is so there, and not here.
ALIASES = {"swish": "silu", "gelu": "gelu_erf", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

_REQUIRED = object()
_short = reprlib.Repr(maxlevel=3, maxdict=8, maxlist=8, maxtuple=8, maxstring=120, maxlong=40, maxother=120)


def show(value: Any) -> str:
    """A value from a file as it may stand in a message: printable and short, whatever it is."""
    return _short.repr(value).encode("ascii", "backslashreplace").decode()


@dataclasses.dataclass(frozen=True)
class Settings:
    """The parsed object of a config.json. Every method raises `ArgumentError` that names the field.

    A field may have several spellings: both may be there if they agree, and null counts as absent.

    Example:
      >>> from jax_warp_decode.models.settings import Settings
      >>> Settings({"num_local_experts": 8}).integer("num_experts", "num_local_experts")
      8
    """

    values: Mapping[str, Any]
    owner: str = "model"

    def get(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of whichever spelling is there."""
        found = {name: self.values[name] for name in names if self.values.get(name) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            raise ArgumentError(f"{', '.join(found)}: got {show(values)}, expected one value; remove the wrong one")
        if values:
            return values[0]
        if default is _REQUIRED:
            raise ArgumentError(f"{names[0]}: missing, expected in the configuration of a {self.owner}")
        return default

    def integer(self, *names: str, default: Any = _REQUIRED, least: int = 1, most: int = MAX_SIZE) -> Any:
        value = self.get(*names, default=default)
        if value is default:
            return value
        if not is_integer(value) or value < least:
            raise ArgumentError(f"{names[0]}: got {show(value)}, expected an integer of at least {least}")
        if value > most:
            raise ArgumentError(f"{names[0]}: got {show(value)}, expected at most {most}")
        return value

    def number(self, *names: str, default: Any = _REQUIRED) -> Any:
        """A finite float above 0."""
        value = self.get(*names, default=default)
        if value is default:
            return value
        if not is_positive(value):
            raise ArgumentError(f"{names[0]}: got {show(value)}, expected a number above 0 which float32 can hold")
        return float(value)

    def flag(self, *names: str, default: Any = _REQUIRED) -> Any:
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise ArgumentError(f"{names[0]}: got {show(value)}, expected true or false")
        return value

    def text(self, *names: str, default: Any = _REQUIRED) -> Any:
        value = self.get(*names, default=default)
        if value is not default and not isinstance(value, str):
            raise ArgumentError(f"{names[0]}: got {show(value)}, expected a string")
        return value

    def items(self, *names: str, kind: type, default: Any = _REQUIRED) -> Any:
        """A list of integers or strings as a tuple."""
        value = self.get(*names, default=default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ArgumentError(f"{names[0]}: got {show(value)}, expected a list of type {kind.__name__}")
        return tuple(value)

    def section(self, name: str, default: Any = _REQUIRED) -> Any:
        """A nested object as `Settings`."""
        value = self.get(name, default=default)
        if value is default:
            return value
        if not isinstance(value, Mapping):
            raise ArgumentError(f"{name}: got {show(value)}, expected an object")
        return Settings(value, f"{self.owner}'s {name}")


def check_choice(name: str, value: Any, known: Iterable[str]) -> str:
    """The value; `ArgumentError` if it is not one of the names."""
    if not isinstance(value, str) or value not in list(known):
        raise ArgumentError(f"{name}: got {show(value)}, expected one of {sorted(known)}")
    return value


def hidden_activation(value: Any) -> Activation:
    """The activation that a `hidden_act` names, by transformers' name or ours.

    Example:
      >>> from jax_warp_decode.models.settings import hidden_activation
      >>> hidden_activation("gelu_pytorch_tanh").name
      'gelu_tanh'
    """
    known = {name: activation for name, activation in ACTIVATIONS.items() if activation.gated}
    known |= {alias: known[name] for alias, name in ALIASES.items()}
    return known[check_choice("hidden_act", value, known)]


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: Any) -> bool:
    """Whether a number from JSON is above 0 and fits a float32, in which models compute."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return LEAST_FLOAT <= float(value) <= MOST_FLOAT
    except OverflowError:
        return False
