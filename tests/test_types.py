"""The public surface says what it takes and returns; mypy checks the package by it, see .ci/run."""

import importlib
import inspect
import pathlib

import pytest

import jax_warp_decode

MODULES = ("jax_warp_decode", "jax_warp_decode.layers", "jax_warp_decode.checkpoints", "jax_warp_decode.models",
           "jax_warp_decode.formats", "jax_warp_decode.kernels")


def functions(module):
    """(name, function) of everything public: functions, and the methods of classes that are written there."""
    for name in module.__all__:
        item = getattr(module, name)
        if inspect.isfunction(item):
            yield name, item
        elif inspect.isclass(item):
            for attribute, value in vars(item).items():
                value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                if inspect.isfunction(value) and value.__module__ == item.__module__ and value.__qualname__.startswith(
                        item.__name__) and (not attribute.startswith("_") or attribute == "__call__"):
                    yield f"{name}.{attribute}", value


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_annotated(module):
    missing = []
    for name, function in functions(importlib.import_module(module)):
        signature = inspect.signature(function)
        missing += [f"{name}({p.name})" for p in signature.parameters.values()
                    if p.annotation is p.empty and p.name not in ("self", "cls")]
        missing += [f"{name} ->"] if signature.return_annotation is signature.empty else []
    assert not missing


def test_type_checkers_see_the_annotations():
    assert (pathlib.Path(jax_warp_decode.__file__).parent / "py.typed").exists()  # PEP 561
