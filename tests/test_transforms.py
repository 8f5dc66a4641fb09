"""What a JAX user may do to the op: differentiate, wrap, export and cache it, and what is refused with the way out."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_warp_decode import ArgumentError, ExpertWeights, QuantizedArray, Routing, UnsupportedError, moe
from jax_warp_decode.paths import grouped_gemm, grouped_kernels

TINY = dict(tokens=4, experts=4, hidden=64, intermediate=64, k=2)
OP_BY_OP = {
    "reference": functools.partial(moe, strategy="reference"),
    "expert_centric": functools.partial(moe, strategy="expert_centric"),
    "warp_decode": functools.partial(moe, strategy="warp_decode", interpret=True),
}
LAYERS = {name: jax.jit(layer) for name, layer in OP_BY_OP.items()}
TRAINABLE = ("reference", "expert_centric")
IDS = np.array([[0, 1], [1, 2], [2, 0], [0, 1]], np.int32)  # nobody is routed to expert 3


def case_d02(seed=1, **kwargs):
    return dataclasses.replace(oracle.make_case(seed, **TINY, poison=False, **kwargs), ids=IDS)


def relative(got, want):
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("strategy", TRAINABLE)
@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_d02_gradients(strategy, weights):
    """Case D02 in bfloat16: x, routing weights and dense experts; x and routing weights through quantised experts."""
    case = case_d02(weights=weights)
    x, routing, experts = case.args()
    c = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)

    def loss(x, weights, experts, layer=LAYERS[strategy]):
        return jnp.sum(c * layer(x, Routing(routing.ids, weights), experts).astype(jnp.float32))

    dense = jax.tree.map(
        lambda w: w.dequantize(jnp.float32) if isinstance(w, QuantizedArray) else w.astype(jnp.float32),
        experts, is_leaf=lambda w: isinstance(w, QuantizedArray))

    def plain(x, weights, experts, _=None):  # the layer in one line of float32 jnp
        w_gate, w_up, w_down = (w[IDS] for w in (experts.w_gate, experts.w_up, experts.w_down))
        h = jax.nn.silu(jnp.einsum("th,tkih->tki", x, w_gate)) * jnp.einsum("th,tkih->tki", x, w_up)
        return jnp.sum(c * jnp.einsum("tki,tkhi,tk->th", h, w_down, weights))

    which = (0, 1, 2) if weights == "bf16" else (0, 1)
    got = jax.jit(jax.grad(loss, which))(x, routing.weights, experts)
    want = jax.grad(plain, which)(x.astype(jnp.float32), routing.weights, dense)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(g, w) < 2e-2
    # y is linear in the routing weights, so that their gradient is known in float64.
    for k in range(2):
        share = dataclasses.replace(case, weights=np.eye(2, dtype=np.float32)[np.full(4, k)]).exact
        np.testing.assert_allclose(got[1][:, k], np.sum(c * share, 1), atol=2e-2 * np.abs(got[1]).max())
    for d in jax.tree.leaves(got[2:]):
        assert not np.asarray(d[3]).any() and np.asarray(d[:3]).any()


@pytest.mark.parametrize("strategy", TRAINABLE)
def test_gradients_are_the_slopes_of_the_float64_oracle(strategy):
    # Central differences of the oracle along one direction in x, routing weights and all experts at once.
    case = case_d02(15, x_dtype="f32", weights="f32")
    rng, names = np.random.default_rng(16), ("x", "weights", "w_gate", "w_up", "w_down")
    c = rng.standard_normal(case.x.shape)
    along = {name: rng.standard_normal(getattr(case, name).shape) for name in names}

    def loss(step):
        moved = {name: np.asarray(getattr(case, name), np.float64) + step * along[name] for name in names}
        return np.sum(c * dataclasses.replace(case, **moved).exact)

    want = (loss(1e-4) - loss(-1e-4)) / 2e-4
    x, routing, experts = case.args()
    grads = jax.jit(jax.grad(lambda x, weights, experts: jnp.sum(
        jnp.asarray(c, jnp.float32) * LAYERS[strategy](x, Routing(routing.ids, weights), experts)), (0, 1, 2)))(
            x, routing.weights, experts)
    got = {"x": grads[0], "weights": grads[1]} | grads[2].weights
    slope = sum(np.sum(along[name] * np.asarray(g, np.float64)) for name, g in got.items())
    assert abs(slope - want) < 1e-4 * abs(want)


def test_gradients_inside_scan_and_checkpoint_are_those_of_a_loop():
    cases = [case_d02(seed, x_dtype="f32", weights="f32") for seed in (3, 4)]
    x, routing, _ = cases[0].args()
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *(case.args()[2] for case in cases))
    layer = LAYERS["expert_centric"]

    def loop(x, experts):
        for i in range(2):
            x = x + layer(x, routing, jax.tree.map(lambda w, i=i: w[i], experts))
        return jnp.sum(jnp.square(x))

    def scan(x, experts, wrap=lambda f: f):
        step = wrap(lambda x, experts: (x + layer(x, routing, experts), None))
        return jnp.sum(jnp.square(lax.scan(step, x, experts)[0]))

    want = jax.jit(jax.grad(loop, (0, 1)))(x, stacked)
    for wrap in (lambda f: f, jax.checkpoint):
        got = jax.jit(jax.grad(functools.partial(scan, wrap=wrap), (0, 1)))(x, stacked)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative(g, w) < 1e-5


def test_second_order_in_reverse_mode():
    x, routing, experts = case_d02(5, x_dtype="f32", weights="f32").args()

    def size_of_gradient(x, weights, experts, layer):
        loss = lambda *a: jnp.sum(jnp.square(layer(a[0], Routing(routing.ids, a[1]), a[2])))
        return sum(jnp.sum(jnp.sin(g)) for g in jax.tree.leaves(jax.grad(loss, (0, 1, 2))(x, weights, experts)))

    got, want = (jax.jit(jax.grad(functools.partial(size_of_gradient, layer=LAYERS[s]), (0, 1, 2)))(
        x, routing.weights, experts) for s in ("expert_centric", "reference"))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(g, w) < 1e-5


@pytest.mark.parametrize("transform", ["jvp", "jit of jvp", "jacfwd", "linearize", "hessian"])
def test_forward_mode_is_refused_or_right(transform):
    x, routing, experts = case_d02(6, x_dtype="f32", weights="f32").args()

    def run(strategy):
        loss = lambda x: jnp.sum(jnp.square(LAYERS[strategy](x, routing, experts)))
        jvp = lambda x: jax.jvp(loss, (x,), (jnp.ones_like(x),))[1]
        return {"jvp": jvp, "jit of jvp": jax.jit(jvp), "jacfwd": lambda x: jnp.sum(jax.jacfwd(loss)(x)),
                "linearize": lambda x: jax.linearize(loss, x)[1](jnp.ones_like(x)),
                "hessian": lambda x: jax.hessian(lambda s: loss(s * x))(1.0)}[transform](x)

    with pytest.raises(UnsupportedError, match="expert_centric.*reverse mode.*strategy='reference'"):
        run("expert_centric")
    if transform == "jvp":
        want = jnp.sum(jax.grad(lambda x: jnp.sum(jnp.square(LAYERS["reference"](x, routing, experts))))(x))
        np.testing.assert_allclose(run("reference"), want, rtol=1e-4)


@pytest.mark.parametrize("strategy", TRAINABLE)
def test_quantised_weights_and_ids_have_no_gradient(strategy):
    x, routing, experts = case_d02(7, weights="mxfp8").args()
    loss = lambda x, routing, experts: jnp.sum(LAYERS[strategy](x, routing, experts).astype(jnp.float32))
    with pytest.raises(UnsupportedError, match="experts: got mxfp8.*no gradient"):
        jax.grad(loss, 2, allow_int=True)(x, routing, experts)
    with pytest.raises(TypeError, match="int32"):
        jax.grad(loss, 1)(x, routing, experts)
    d_routing = jax.grad(loss, 1, allow_int=True)(x, routing, experts)
    assert d_routing.ids.dtype == jax.dtypes.float0 and np.asarray(d_routing.weights).all()


def test_vmap_of_gradients_is_a_loop_of_gradients():
    case = case_d02(8, x_dtype="f32", weights="f32")
    x, routing, experts = case.args()
    xs, routings = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (x, routing))
    grad = jax.grad(lambda x, routing, experts: jnp.sum(jnp.square(LAYERS["expert_centric"](x, routing, experts))),
                    (0, 2))
    got, grad = jax.jit(jax.vmap(grad, (0, 0, None)))(xs, routings, experts), jax.jit(grad)
    for i in range(2):
        want = grad(xs[i], jax.tree.map(lambda a, i=i: a[i], routings), experts)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative(g[i], w) < 1e-5


@pytest.mark.parametrize("sizes,n,k", [([1, 0, 63, 6], 64, 128), ([64, 65, 0, 3], 128, 64)])
def test_cuda_kernels_of_the_backward_pass_interpreted(sizes, n, k):
    # Rows in no group hold NaN; so do the weights of idle experts.
    rng, sizes = np.random.default_rng(9), np.array(sizes, np.int32)
    total, ends = sizes.sum(), np.cumsum(sizes)
    draw = lambda *shape: rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    a, b, w = draw(total + 5, n), draw(total + 5, k), draw(len(sizes), n, k)
    a[total:], b[total:], w[sizes == 0] = np.nan, np.nan, np.nan
    groups = [slice(e - s, e) for s, e in zip(sizes, ends, strict=True)]
    exact_a, exact_b, exact_w = (m.astype(np.float64) for m in (a, b, w))
    a, b, w, group_sizes = map(jnp.asarray, (a, b, w, sizes))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        outer = np.asarray(grouped_kernels.outer(a, b, group_sizes))
        rows = np.asarray(grouped_kernels.product(a, w, group_sizes, transposed=True))
    np.testing.assert_allclose(outer, [exact_a[g].T @ exact_b[g] for g in groups], rtol=2**-8, atol=1e-4)
    for e, g in enumerate(groups):
        np.testing.assert_allclose(rows[g], exact_a[g] @ exact_w[e], rtol=2**-8, atol=1e-4)


def test_scans_of_the_backward_pass_on_mixed_dtypes():
    # What the kernels do on CUDA, the scans do elsewhere; here with a float32 cotangent and bfloat16 weights.
    rng = np.random.default_rng(10)
    a, w = rng.standard_normal((9, 5)).astype(np.float32), rng.standard_normal((3, 5, 7)).astype(ml_dtypes.bfloat16)
    a[6:], w[1] = np.nan, np.nan
    sizes = jnp.array([2, 0, 4], jnp.int32)
    rows = np.asarray(grouped_gemm.grouped_gemm_transposed(jnp.asarray(a), jnp.asarray(w), sizes))
    exact = w.astype(np.float32)
    np.testing.assert_allclose(rows, np.concatenate([a[:2] @ exact[0], a[2:6] @ exact[2], np.zeros((3, 7))]), rtol=1e-5)
    outer = np.asarray(grouped_gemm.grouped_outer(jnp.asarray(a), jnp.asarray(a), sizes))
    np.testing.assert_allclose(outer, np.stack([a[:2].T @ a[:2], np.zeros((5, 5)), a[2:6].T @ a[2:6]]), rtol=1e-5)


def training_step_on_cuda():
    shape = jax.ShapeDtypeStruct
    up, down = shape((16, 64, 256), jnp.bfloat16), shape((16, 256, 64), jnp.bfloat16)
    args = (shape((33, 256), jnp.bfloat16), Routing(shape((33, 4), jnp.int32), shape((33, 4), jnp.float32)),
            ExpertWeights(up, up, down))

    def loss(x, weights, experts, ids):
        return jnp.sum(LAYERS["expert_centric"](x, Routing(ids, weights), experts).astype(jnp.float32) ** 2)

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    return step.trace(args[0], args[1].weights, args[2], args[1].ids).lower(lowering_platforms=("cuda",)).as_text()


def test_cuda_trains_through_kernels():
    text = training_step_on_cuda()
    # Two kernels forward (gate and up share one), two for rows, two for weights; no dense product, and no scatter but
    # the one that inverts a permutation: sums in the order of the atomics of the day are not reproducible.
    assert text.count("@mosaic_gpu_v2") == 6
    assert "stablehlo.dot_general" not in text
    assert text.count('"stablehlo.scatter"(') == 1


# -------------------------------------------------------------------------------------------------------- wrappings


def in_scan(layer):
    return lambda x, routing, experts: lax.scan(
        lambda _, a: (None, layer(a, routing, experts)), None, jnp.stack([x, x]))[1][1]


def in_fori_loop(layer):
    return lambda x, routing, experts: lax.fori_loop(
        0, 2, lambda i, y: layer(x, routing, experts), jnp.zeros_like(x))


def compiled_ahead(layer):
    return lambda *args: jax.jit(layer).lower(*jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)).compile()(*args)


WRAPPINGS = {
    "nothing": lambda layer: layer.__wrapped__,
    "scan": in_scan,
    "fori_loop": lambda layer: jax.jit(in_fori_loop(layer)),
    "checkpoint": jax.checkpoint,
    "donated": lambda layer: lambda x, *rest: jax.jit(layer, donate_argnums=0)(x.copy(), *rest),
    "ahead of time": compiled_ahead,
    "cond": lambda layer: lambda *args: lax.cond(args[1].weights.sum() != 0, layer, lambda x, *_: x, *args),
    "leading axes": lambda layer: lambda x, r, e: layer(
        x.reshape(2, 1, 2, -1), jax.tree.map(lambda a: a.reshape(2, 1, 2, -1), r), e).reshape(x.shape),
}


def make_small_case(strategy):
    kernels = dict(tokens=4, experts=2, hidden=64, intermediate=32, k=2) if strategy == "warp_decode" else TINY
    return oracle.make_case(11, **kernels, pattern="skipped")


@functools.cache
def small_case(strategy):
    case = make_small_case(strategy)
    return case, np.asarray(LAYERS[strategy](*case.args()))


@pytest.mark.parametrize("wrapping,strategy", [
    *((wrapping, "expert_centric") for wrapping in WRAPPINGS),
    *((wrapping, "reference") for wrapping in ("nothing", "fori_loop", "cond")),
    *((wrapping, "warp_decode") for wrapping in ("scan", "donated", "leading axes"))])
def test_no_wrapping_changes_a_bit(wrapping, strategy):
    case, want = small_case(strategy)
    y = WRAPPINGS[wrapping](LAYERS[strategy])(*case.args())
    np.testing.assert_array_equal(np.asarray(y), want)


@pytest.mark.parametrize("strategy", LAYERS)
def test_nested_vmap_with_mapped_and_unmapped_ids(strategy):
    case, want = small_case(strategy)
    x, routing, experts = case.args()
    pairs = jax.tree.map(lambda a: a.reshape(2, 2, 1, *a.shape[1:]), (x, routing))
    mapped = jax.jit(jax.vmap(jax.vmap(LAYERS[strategy], (0, 0, None)), (0, 0, None)))(*pairs, experts)
    first = jax.tree.map(lambda a: a[0, 0], pairs[1])  # the routing of the first token for every token
    shared = jax.jit(jax.vmap(jax.vmap(LAYERS[strategy], (0, None, None)), (0, None, None)))(pairs[0], first, experts)
    equal = dict(rtol=0 if strategy == "warp_decode" else 2**-7)  # warp decode runs the very same launch
    np.testing.assert_allclose(np.asarray(mapped, np.float32).reshape(want.shape), want.astype(np.float32), **equal)
    alone = dataclasses.replace(case, ids=np.repeat(case.ids[:1], 4, 0), weights=np.repeat(case.weights[:1], 4, 0))
    oracle.assert_close(np.asarray(shared).reshape(want.shape), alone,
                        h_dtype="bfloat16" if strategy == "expert_centric" else "float32")


@pytest.mark.parametrize("strategy", TRAINABLE)  # warp decode refuses mapped experts, see test_moe.py
def test_vmap_over_experts_is_a_loop(strategy):
    case = case_d02(12)
    x, routing, experts = case.args()
    stacked = jax.tree.map(lambda w: jnp.stack([w, -w]), experts)
    y = jax.vmap(LAYERS[strategy], (None, None, 0))(x, routing, stacked)
    oracle.assert_close(y[0], case, h_dtype="bfloat16" if strategy == "expert_centric" else "float32")
    assert relative(y[1], LAYERS[strategy](x, routing, jax.tree.map(lambda w: w[1], stacked))) < 2**-8


@pytest.mark.parametrize("strategy", LAYERS)
def test_eval_shape_runs_nothing(strategy):
    case, want = small_case(strategy)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.args())
    y = jax.eval_shape(LAYERS[strategy], *shapes)
    assert (y.shape, y.dtype) == (want.shape, want.dtype)


def test_leading_axes_of_any_number():
    case, want = small_case("expert_centric")
    x, routing, experts = case.args()
    one = LAYERS["expert_centric"](x[0], Routing(routing.ids[0], routing.weights[0]), experts)
    np.testing.assert_array_equal(np.asarray(one), want[0])
    empty = jax.tree.map(lambda a: a.reshape(2, 2, -1)[:, :0], (x, routing))
    assert LAYERS["expert_centric"](*empty, experts).shape == (2, 0, 64)
    with pytest.raises(ArgumentError, match=r"routing.ids.*\(4, 2\).*\(2, 2, K\)"):
        moe(x.reshape(2, 2, -1), routing, experts)


# ------------------------------------------------------------------------------------------------- types of arguments


@pytest.mark.parametrize("strategy", LAYERS)
def test_d09_integer_and_weight_types(strategy):  # those of x64 mode are in test_moe.py
    case, want = small_case(strategy)
    x, _, experts = case.args()
    ids = np.where(case.routed(), case.ids, 255).astype(np.uint8)  # 255: not routed, there are fewer experts
    y = OP_BY_OP[strategy](x, Routing(ids, np.where(case.routed(), case.weights, 0).tolist()), experts)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(y), want)


def test_gradients_in_x64_mode_are_the_same_bits():
    x, routing, experts = case_d02(14).args()
    loss = lambda x, routing, experts: jnp.sum(jnp.square(OP_BY_OP["expert_centric"](x, routing, experts)))
    grad = lambda routing: jax.jit(jax.grad(loss, (0, 2)))(x, routing, experts)
    want = grad(routing)
    with jax.enable_x64(True):
        got = grad(Routing(routing.ids.astype(jnp.int64), routing.weights.astype(jnp.float64)))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@pytest.mark.parametrize("strategy", LAYERS)
def test_weak_types_and_numpy_scalars_do_not_widen_the_result(strategy):
    x, routing, experts = small_case(strategy)[0].args()
    halves = Routing(routing.ids, routing.weights * np.float64(0.5))
    assert jax.eval_shape(LAYERS[strategy], x * 2.0, halves, experts).dtype == jnp.bfloat16
    weak = jnp.broadcast_to(jnp.asarray(0.5), (4, 2))
    assert weak.weak_type
    y = jax.eval_shape(LAYERS[strategy], x, Routing(routing.ids, weak), experts)
    assert y.dtype == jnp.bfloat16 and not y.weak_type


def test_float16_in_float16_out_with_a_gradient():
    case = case_d02(13, x_dtype="f16", weights="f16")
    x, routing, experts = case.args()
    oracle.assert_close(jax.jit(LAYERS["expert_centric"])(x, routing, experts), case, h_dtype="float16")
    dx = jax.jit(jax.grad(lambda x: jnp.sum(LAYERS["expert_centric"](x, routing, experts)).astype(jnp.float32)))(x)
    assert dx.dtype == jnp.float16 and np.asarray(dx).any()


# ---------------------------------------------------------------------------------------------- export and caching


@pytest.fixture
def pretend_gpu(monkeypatch):
    """`moe` refuses warp decode by name where JAX sees no GPU; an export for a GPU elsewhere says that there is one."""
    monkeypatch.setattr(sys.modules["jax_warp_decode.choose"], "no_gpu_reason", lambda: "")


@pytest.mark.parametrize("strategy", ["expert_centric", "warp_decode"])
def test_export_for_cuda(strategy, pretend_gpu):
    pytest.importorskip("flatbuffers")  # jax.export serialises with it
    args = make_small_case(strategy).args()
    exported = jax.export.export(jax.jit(functools.partial(moe, strategy=strategy)), platforms=["cuda"])(*args)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",) and "@mosaic_gpu_v2" in again.mlir_module()
    assert again.in_tree == jax.tree.structure((args, {}))


def test_symbolic_sizes():
    """A choice of kernels needs numbers; plain JAX does not."""
    x, routing, experts = make_small_case("expert_centric").args()
    (tokens,) = jax.export.symbolic_shape("tokens")
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype), (x, routing))
    for strategy in ("auto", "expert_centric"):
        with pytest.raises(UnsupportedError, match=r"^x: got the symbolic shape \(tokens, .*export once for"):
            jax.export.export(jax.jit(functools.partial(moe, strategy=strategy)))(*args, experts)
    run = jax.jit(functools.partial(moe, strategy="reference"))
    np.testing.assert_array_equal(jax.export.export(run)(*args, experts).call(x, routing, experts),
                                  run(x, routing, experts))


# Another process: it loads what this one exported, runs the layer, and counts hits of the cache.
OTHER_PROCESS = """
import hashlib, json, sys
import jax, numpy as np
import test_transforms as t
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
args = t.make_small_case("expert_centric").args()
y = t.LAYERS["expert_centric"](*args)
hits, misses = (events.count("/jax/compilation_cache/" + name) for name in ("cache_hits", "cache_misses"))
called = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call(*args)
cuda = t.LAYERS["expert_centric"].trace(*args).lower(lowering_platforms=("cuda",)).as_text()
print(json.dumps(dict(
    hits=hits, misses=misses, y=np.asarray(y, np.float32).tolist(), exported=np.asarray(called, np.float32).tolist(),
    cuda=hashlib.sha256(cuda.encode()).hexdigest())))
"""


def test_another_process_loads_the_export_and_hits_the_compilation_cache(tmp_path):
    pytest.importorskip("flatbuffers")
    case, want = small_case("expert_centric")
    exported = jax.export.export(LAYERS["expert_centric"], platforms=["cpu"])(*case.args())
    (tmp_path / "layer.bin").write_bytes(exported.serialize())
    tests = pathlib.Path(__file__).parent
    found = []
    for seed in "12":  # sets and hashes must not leak into the program, or caches never hit
        env = dict(os.environ, PYTHONHASHSEED=seed, JAX_PLATFORMS="cpu",
                   JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
                   JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
                   PYTHONPATH=os.pathsep.join([str(tests.parent), str(tests)]))
        done = subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "layer.bin")], env=env,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
        for y in (found[-1]["y"], found[-1]["exported"]):
            np.testing.assert_array_equal(np.float32(y), want.astype(np.float32))
    first, second = found
    assert first["misses"] > 0 and second["misses"] == 0 and second["hits"] == first["hits"] + first["misses"]
    assert first["cuda"] == second["cuda"]
