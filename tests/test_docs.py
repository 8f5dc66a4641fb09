"""Every example in a docstring runs and prints what it says."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import jax_warp_decode

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(jax_warp_decode.__path__, prefix="jax_warp_decode."))


@pytest.mark.parametrize("name", ["jax_warp_decode", *MODULES])
def test_docstring_examples(name):
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=options).failed == 0


def test_every_public_function_and_class_has_documentation():
    public = {name: getattr(jax_warp_decode, name) for name in jax_warp_decode.__all__}
    described = {name: inspect.getdoc(value) for name, value in public.items() if callable(value)}
    assert [name for name, text in described.items() if not text] == []
