"""What a user reads on a machine that cannot run the kernels, and that `auto` takes something that runs there."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import utils

from jax_warp_decode import (
    STRATEGIES,
    ExpertWeights,
    Routing,
    UnsupportedError,
    available_strategies,
    choose,
    device,
    moe,
)
from jax_warp_decode.errors import ArgumentError
from jax_warp_decode.formats import FORMATS
from jax_warp_decode.kernels.shared_common import SharedConfig

W = jax.ShapeDtypeStruct((8, 256, 256), jnp.bfloat16)
EXPERTS = ExpertWeights(W, W, W)


@pytest.fixture
def machine(monkeypatch):
    """Pretends that JAX's default device is a GPU, under a driver and a jax version of one's choice."""
    def pretend(capability="9.0", driver=(13, 0), version=jax.__version__):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(
            compute_capability=capability, device_kind="a GPU", core_count=132)])
        monkeypatch.setattr(device, "driver_cuda", lambda: driver)
        monkeypatch.setattr(jax, "__version__", version)

    return pretend


def pick(strategy="auto", tokens=1):
    return choose(tokens, EXPERTS, experts_per_token=2, x_dtype=jnp.bfloat16, strategy=strategy)


def test_a_hopper_gpu_with_its_software_refuses_nothing(machine):
    machine()
    assert not any(available_strategies().values()) and device.software_refusal() == ""
    assert pick().strategy not in ("reference", "expert_centric")


@pytest.mark.parametrize("capability", ["8.0", "12.0", "gfx942", "unknown"])
def test_a_gpu_without_these_kernels_runs_the_reference_and_says_why(machine, capability):
    machine(capability)
    choice = pick()
    assert choice.strategy == "reference" and capability in choice.reason and "9.0" in choice.reason
    for strategy in STRATEGIES:
        if strategy != "reference":
            with pytest.raises(UnsupportedError, match=f"{strategy}.*{capability}"):
                pick(strategy)
    assert "\n" not in str(choice)


@pytest.mark.parametrize("capability", ["10.0", "10.3"])
def test_blackwell_decodes_without_wgmma(machine, capability):
    machine(capability)
    w, w_down = (jax.ShapeDtypeStruct((128, *s), jnp.bfloat16) for s in ((768, 2048), (2048, 768)))
    dense = ExpertWeights(w, w, w_down)
    quantised = ExpertWeights(*(FORMATS["mxfp8"].structs(w.shape) for w in (w, w, w_down)))
    for experts in (dense, quantised):
        pick = functools.partial(choose, experts=experts, experts_per_token=8, x_dtype=jnp.bfloat16)
        assert [pick(T).strategy for T in (1, 64)] == ["warp_decode", "shared_decode"]
        # What never ran has to wait for loads where decoding is certain to be slow.
        assert pick(1000).strategy == "shared_decode" and "interpreted" not in pick(1000).reason
        choice = pick(4096)
        assert choice.strategy == "expert_centric"
        assert f"for compute capability {capability} were compiled and interpreted only, never run" in choice.reason
        machine("9.0")
        assert pick(1000).strategy == "expert_centric" and "interpreted" not in pick(1000).reason
        machine(capability)
    assert not SharedConfig.heuristic(64, 8, 128, 2048, "bf16", 2).wgmma


def test_large_batches_on_blackwell_are_for_inference(machine, monkeypatch):
    """And for the formats of its kernels: all else goes through a grouped GEMM that only Hopper has."""
    machine("10.0")
    monkeypatch.setattr(utils, "get_arch", lambda: types.SimpleNamespace(major=10, minor=0))
    x = jax.ShapeDtypeStruct((9, 256), jnp.bfloat16)
    routing = Routing(jax.ShapeDtypeStruct((9, 2), jnp.int32), jax.ShapeDtypeStruct((9, 2), jnp.float32))
    run = functools.partial(moe, strategy="expert_centric")
    for call in (run, functools.partial(run, activation_format="mxfp8")):
        lowered = jax.jit(call).trace(x, routing, EXPERTS).lower(lowering_platforms=("cuda",)).as_text()
        assert all(f"moe_grouped_{kernel}" in lowered for kernel in ("plan", "gate_up", "down"))

    # Beside the GPU, on the CPU, all experts are scanned.
    on_cpu = jax.jit(run).trace(x, routing, EXPERTS).lower(lowering_platforms=("cpu",)).as_text()
    assert "moe_grouped" not in on_cpu
    floats = choose(1, EXPERTS, experts_per_token=2, x_dtype=jnp.float32, strategy="expert_centric")
    assert "never run" not in floats.reason, "a scan of XLA's"

    with pytest.raises(UnsupportedError, match="gradients, needs 9.0 .*'reference' for"):
        jax.eval_shape(lambda x, *args: jax.grad(lambda x: run(x, *args).sum())(x), x, routing, EXPERTS)
    narrow = ExpertWeights(*(FORMATS["mxfp4"].structs(w.shape) for w in (W, W, W)))
    small = EXPERTS.map(lambda w: jax.ShapeDtypeStruct((8, 96, 96), w.dtype))
    for experts, error in ((narrow, "10.0 do not take them: x bfloat16 with mxfp4"), (small, "H = 96 is no multiple")):
        with pytest.raises(UnsupportedError, match=f"'expert_centric' cannot run: experts: .*{error}.*'auto'"):
            jax.eval_shape(run, x.update(shape=(9, experts.hidden)), routing, experts)


@pytest.mark.parametrize("capability, driver, words", [
    ("9.0", (11, 8), ["CUDA up to 11.8", "9.0 need 12.0", "update the driver"]),
    ("10.0", (12, 4), ["CUDA up to 12.4", "10.0 need 12.8"]),
    ("10.3", (12, 8), ["10.3 need 12.9"])])
def test_an_old_driver_is_named(machine, capability, driver, words):
    machine(capability, driver)
    assert all(word in device.software_refusal() for word in words), device.software_refusal()


@pytest.mark.parametrize("version", ["0.11.1", "0.12.1", "0.13.0.dev20260901"])
def test_a_jax_outside_the_window_is_named(machine, version):
    machine(version=version)
    assert f"jax {version} lies outside the tested window" in device.software_refusal()


@pytest.mark.parametrize("fault", [dict(driver=(11, 8)), dict(version="0.13.0")])
def test_auto_avoids_kernels_that_the_software_cannot_compile(machine, fault):
    machine(**fault)
    reason = device.software_refusal()
    choice = pick()
    assert choice.strategy in ("expert_centric", "reference") and reason in choice.reason
    with pytest.raises(UnsupportedError) as caught:
        pick("warp_decode")
    assert reason in str(caught.value)


def test_the_driver_is_asked_without_a_gpu():
    found = device.driver_cuda()
    assert found is None or found >= (1, 0)


@pytest.mark.parametrize("message, words", [
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 18253611008 bytes.", ["memory (18253611008 bytes"]),
    ("INTERNAL: CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled", ["driver", "too old"]),
    ("INTERNAL: Failed to load module: CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image", ["reference"]),
    ("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", ["report"])])
def test_failures_at_run_time_become_one_line(message, words):
    line = device.explain_failure(jax.errors.JaxRuntimeError(message))
    assert all(word in line for word in words) and "\n" not in line, line


@pytest.mark.parametrize("error, errors, words", [
    (AssertionError(), [], ["it finds no such device; unset it"]),
    (AssertionError(), ["Unable to load cuDNN.\nAnd more"], ["no such device, and a plugin", "load cuDNN; unset it"]),
    (RuntimeError("Unable to initialize 'a': broken (set JAX_PLATFORMS='' to choose)"), [], ["broken; unset it"]),
    (RuntimeError("word " * 99), [], [" ..; unset it"])])
def test_a_jax_that_does_not_start_is_one_line(monkeypatch, error, errors, words):
    assert device.start_refusal(errors) == ""

    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    line = device.start_refusal(errors)
    assert all(word in line for word in [*words, "got 'cpu'", "jax[cuda13]"]) and "\n" not in line, line
    assert len(line) < 500


def test_other_errors_stay_what_they_are():
    assert device.explain_failure(ArgumentError("x: out of memory")) == ""
    assert device.explain_failure(jax.errors.JaxRuntimeError("INTERNAL: something")) == ""
