"""Where tests run: on the CPU, except with `pytest --gpu`, which runs the tests marked `gpu` and nothing else."""

import os
import sys

import pytest

QUICK = "--xla_backend_optimization_level=0"  # small programs spend their time in the compiler


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, on the GPU, and no others")
    parser.addoption("--fuzz-examples", type=int, default=200, metavar="N",
                     help="random layers that tests/test_fuzz.py tries; 10000 for a night")


def pytest_configure(config):
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported; subprocesses inherit it
        os.environ.setdefault("XLA_FLAGS", QUICK)


def pytest_collection_modifyitems(config, items):
    want_gpu = config.getoption("--gpu")
    reason = "needs an NVIDIA GPU: pytest --gpu" if not want_gpu else "runs on the CPU: pytest without --gpu"
    for item in items:
        if ("gpu" in item.keywords) != want_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def interpreter():
    """Interpreter parameters with race detection. Afterwards: no race was found, and no state is left behind."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jax_warp_decode import compat

    compat.reset_interpreter()
    yield plgpu.InterpretGPUParams(detect_races=True)
    races = compat.races_found()
    compat.reset_interpreter()
    assert not races, "the interpreter found a data race"


sys.path.insert(0, os.path.dirname(__file__))  # tests import oracle and aot by name, however pytest was started


@pytest.fixture(scope="module")
def machines():
    """Kernels of a module are compiled as for a GPU, and their PTX is executed; yields the machines that ran."""
    import aot

    if reason := aot.missing_tools():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    from ptx import launch

    with launch.emulated() as found:
        yield found
