"""What bench.sanitize runs under compute-sanitizer: every kernel on small and hostile inputs, each with its oracle."""

import functools

from bench import sanitize_controls

# (E, H, I, K): small; sizes off every tile, the second of which shared_decode refuses; what the grouped kernels take,
# with parts of blocks left over; what all configurations of shared_decode take; 32 FP8 blocks an expert, its least.
SHAPES = {"small": (4, 128, 64, 2), "odd": (5, 192, 320, 3), "off": (3, 352, 96, 3), "grouped": (5, 320, 192, 3),
          "parts": (3, 512, 512, 2), "blocks": (4, 1024, 512, 2)}
TENSOR = ("mxfp4", "mxfp8", "fp8_block128")  # formats of the tensor-core kernels of warp_decode
# Of shared_decode: every way to decode values, and to have scales.
SHARED = ("bf16", "mxfp8", "mxfp4", "fp8_block128", "mxfp8_e5m2", "nvfp4", "int4_group32", "int8_channel", "f16")
# (E, H, K, T, cluster and warpgroups and unroll if not the heuristic's) of the router
ROUTERS = ((16, 256, 4, 3), (128, 352, 8, 1), (64, 2048, 6, 2), (64, 352, 3, 3, 2, 4, 2), (512, 256, 10, 2, 16, 8, 1))
# Of shared_decode, what its heuristic takes for other sizes: parts of the columns at a time and several passes; many
# warpgroups and CTAs; the most tokens of a pass.
SHARED_CONFIGS = (dict(tokens=8, chunk=128, stages=2, warpgroups=2, ctas_per_sm=1, panels=2),
                  dict(tokens=16, chunk=128, stages=2, warpgroups=4, ctas_per_sm=1, waves=2),
                  dict(tokens=32, chunk=256, stages=2, warpgroups=1, ctas_per_sm=1))
PATTERNS = ("skipped", "same", "none", "uniform")


def cases():
    """(name, function that runs the case and checks its numbers), the most important first; without jax's arrays.

    Kernels are named by the cases that run them, all of them with ids that are not routed, NaN in what nobody is routed
    to, and numbers of tokens up to 129.
    """
    from jax_warp_decode.experts import DENSE_FORMATS
    from jax_warp_decode.formats import FORMATS

    part = functools.partial
    for T, shape in ((3, "odd"), (129, "odd"), (1, "odd"), (3, "small"), (3, "off")):
        for format in ("mxfp8", "bf16"):
            for strategy in ("warp_decode", "shared_decode"):
                if (strategy, shape) != ("shared_decode", "off"):
                    yield f"{strategy}-{format}-{shape}-T{T}", part(layer, strategy, format, shape, T)
    for format in TENSOR:
        for T in (3, 129):
            yield f"tensor cores-{format}-T{T}", part(tensor_cores, format, T)
    for sizes in ROUTERS:
        yield "router-E{}-H{}-K{}-T{}".format(*sizes), part(router, *sizes)
    for format in ("bf16", "mxfp8"):
        yield f"grouped-{format}", part(grouped, format)
    yield "dense_rows", dense
    yield "gradients of expert_centric", gradients
    for format in SHARED:
        yield f"configurations of shared_decode-{format}", part(shared_configurations, format)
    for format in SHARED:
        yield f"shared_decode-{format}-biases", part(biases, "shared_decode", format)
    yield "shared_decode-bf16 by mma.sync", without_wgmma
    for format in ("bf16", "mxfp4"):
        yield f"warp_decode-{format}-biases", part(biases, "warp_decode", format)
    for strategy in ("warp_decode", "shared_decode"):
        yield f"{strategy}-stacked layers", part(stacked, strategy)
    for format in {**dict.fromkeys(DENSE_FORMATS.values()), **FORMATS}:
        if format not in ("bf16", "mxfp8", "f32"):
            yield f"warp_decode-{format}-odd-T3", part(layer, "warp_decode", format, "odd", 3)
    for format, shape, T in (("bf16", "grouped", 129), ("mxfp8", "grouped", 3), ("bf16", "odd", 129),
                             ("mxfp4", "odd", 129), ("fp8_block128", "odd", 3)):  # the last three: products of JAX
        yield f"expert_centric-{format}-{shape}-T{T}", part(layer, "expert_centric", format, shape, T)
    yield "warp_decode-relu2", without_gate
    yield "configurations of gate_up and down", configurations
    yield "no tokens", no_tokens
    yield "the read that measurements compare with", read
    yield "a buffer written by TMA", sanitize_controls.written_by_tma
    yield "rms_norm", norm  # Triton's from here on
    yield "attend", attention
    yield "bundled model", bundled_model


class Skipped(Exception):
    """A strategy that refuses these operands; the message is its reason."""


def _jitted(strategy):
    import jax

    from jax_warp_decode import moe

    return jax.jit(functools.partial(moe, strategy=strategy))


def _make(seed, shape, T, weights="bf16", pattern="skipped", **options):
    import oracle

    E, H, I, K = SHAPES[shape]
    x_dtype = weights if weights in ("f16", "f32") else "bf16"
    return oracle.make_case(seed, tokens=T, experts=E, hidden=H, intermediate=I, k=K, weights=weights, pattern=pattern,
                            x_dtype=x_dtype, **options)


def _hostile(shape, T, format, patterns=PATTERNS, **options):
    """Ids that are not routed (-1, E and the ends of int32), NaN or inf in idle experts and NaN in idle rows, all
    tokens on the same experts, no slot routed at all, and a routed NaN row beside clean ones."""
    import dataclasses

    import numpy as np

    for pattern in patterns:
        case = _make(T, shape, T, format, pattern, **options)
        if pattern == "uniform":
            x = case.x.copy()
            x[T // 2] = np.nan
            case = dataclasses.replace(case, x=x)
        if pattern == "same" and format in ("bf16", "f16", "f32"):
            for w in (case.w_gate, case.w_up, case.w_down):
                w[np.isnan(w)] = np.inf
        yield case


def _check(y, case, strategy):
    import oracle

    if strategy == "expert_centric":
        # Of weights, unless bfloat16 holds their format; of the products where JAX's ragged dot runs.
        inexact = isinstance(case.w_up, oracle.Quantized) and oracle.FORMATS[case.w_up.format].emax is None
        oracle.assert_rounded_close(
            y, case, oracle.Rounded("bfloat16", "bfloat16", "bfloat16" if inexact else "float32"))
    else:
        h_dtype = oracle.shared_h_dtype(case) if strategy == "shared_decode" else "bfloat16"
        oracle.assert_close(y, case, h_dtype=h_dtype, unit=oracle.TENSOR_CORE_UNIT)


def layer(strategy, format, shape, T):
    """One compiled layer, see `_hostile`."""
    from jax_warp_decode import UnsupportedError

    run = _jitted(strategy)
    for case in _hostile(shape, T, format):
        try:
            y = run(*case.args())
        except UnsupportedError as error:
            raise Skipped(str(error)) from None
        _check(y, case, strategy)


def stacked(strategy):
    """Two layers with NaN in the one that is not read, and layer numbers outside the stack."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    case = _make(7, "odd", 3)
    x, routing, experts = case.args()
    stack = jax.tree.map(lambda w: jnp.stack([jnp.full_like(w, jnp.nan), w]), experts)
    run = _jitted(strategy)
    _check(run(x, routing, stack, layer=jnp.int32(1)), case, strategy)
    for outside in (-1, 2, 2**31 - 1, -2**31):
        assert not np.asarray(run(x, routing, stack, layer=jnp.int32(outside)), np.float32).any()


def biases(strategy, format):
    """Biases of all three projections, NaN in those of idle experts."""
    import jax

    from jax_warp_decode import moe

    shape = "blocks" if (strategy, format) == ("shared_decode", "fp8_block128") else "odd"
    case = _make(8, shape, 20, format, activation="clamped_swiglu", biases="bf16")
    run = jax.jit(functools.partial(moe, strategy=strategy, activation="clamped_swiglu"))
    _check(run(*case.args()), case, strategy)


def _shared_layer(**config):
    """shared_decode with this configuration of both kernels."""
    import jax

    from jax_warp_decode.kernels.shared_common import SharedConfig
    from jax_warp_decode.kernels.shared_down import moe_down_shared
    from jax_warp_decode.kernels.shared_gate_up import moe_gate_up_shared
    from jax_warp_decode.paths.shared_decode import intermediate_dtype

    config = SharedConfig(**config)

    @jax.jit
    def run(x, routing, experts):
        h = moe_gate_up_shared(x, routing.ids, experts.w_gate, experts.w_up, out_dtype=intermediate_dtype(experts),
                               config=config)
        return moe_down_shared(h, routing.ids, routing.weights, experts.w_down, out_dtype=x.dtype, config=config)

    return run


def without_wgmma():
    """shared_decode as on GPUs that have none."""
    run = _shared_layer(tokens=16, chunk=64, stages=3, warpgroups=1, ctas_per_sm=1, wgmma=False)
    for T in (3, 129):
        for case in _hostile("odd", T, "bf16"):
            _check(run(*case.args()), case, "shared_decode")


def shape_of_configurations(format):
    return "blocks" if format == "fp8_block128" else "parts"


def shared_configurations(format):
    """More slots of an expert than fit a pass, and fewer."""
    for config in SHARED_CONFIGS:
        run = _shared_layer(**config)
        for case in _hostile(shape_of_configurations(format), 17, format, ("skipped", "same")):
            _check(run(*case.args()), case, "shared_decode")


def without_gate():
    import jax

    from jax_warp_decode import moe

    for format in ("bf16", "mxfp4"):
        case = _make(10, "odd", 3, format, activation="relu2", biases="f32")
        _check(jax.jit(functools.partial(moe, strategy="warp_decode", activation="relu2"))(*case.args()), case,
               "warp_decode")


def tensor_cores(format, T):
    """gate_up and down with their products on tensor cores: one tile and two, 4 to 16 warps, both widths of h."""
    import jax.numpy as jnp
    import numpy as np
    import oracle

    from jax_warp_decode import kernels

    wide = jnp.bfloat16 if format == "mxfp4" else jnp.float32  # what down takes
    for gate_up, down, h_dtype in (((1, 1), (1, 1, 8, 1), wide), ((2, 2), (2, 1, 4, 2), jnp.bfloat16),
                                   ((1, 2), (1, 1, 16, 2), wide)):
        gate_up, down = kernels.GateUpTensorConfig(*gate_up), kernels.DownTensorConfig(*down)
        patterns = PATTERNS if T < 100 else ("skipped", "uniform")  # racecheck takes a minute for these
        for case in _hostile("odd", T, format, patterns, biases="f32"):
            x, routing, experts = case.args()
            h = kernels.moe_gate_up_3d_batched(x, routing.ids, experts.w_gate, experts.w_up, b_gate=experts.b_gate,
                                               b_up=experts.b_up, out_dtype=h_dtype, config=gate_up)
            y = kernels.moe_down_3d_batched(h, routing.ids, routing.weights, experts.w_down, b_down=experts.b_down,
                                            out_dtype=x.dtype, config=down)
            oracle.assert_close(y, case, h_dtype=np.dtype(h_dtype).name, unit=oracle.TENSOR_CORE_UNIT)


def grouped(format):
    """The kernel that plans, and the two grouped kernels with tiles of two widths and parts of tiles."""
    import jax

    from jax_warp_decode.activations import get_activation
    from jax_warp_decode.kernels.grouped_config import GroupedConfig
    from jax_warp_decode.paths import grouped_layer, grouped_plan

    config = GroupedConfig((16, 48), 3, ctas=6)
    run = jax.jit(grouped_layer.op(get_activation("silu"), configs=(config, config),
                                   make_plan=grouped_plan.plan_on_gpu))
    for T in (129, 3):
        for case in _hostile("grouped", T, format, biases="f32"):
            x, routing, experts = case.args()
            _check(run(x, routing, experts).astype(x.dtype), case, "expert_centric")


def router(E, H, K, T, *config):
    """With and without the norm before; NaN and inf in one of the tokens."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode.kernels.router import RouterConfig, moe_router, normed_moe_router
    from jax_warp_decode.routing import route

    config = RouterConfig(*config) if config else None
    keys = jax.random.split(jax.random.key(E + H), 3)
    x, gain = jax.random.normal(keys[0], (T, H), jnp.bfloat16), jax.random.normal(keys[2], (H,), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (E, H)) / 16).astype(jnp.bfloat16)
    for bad in (None, jnp.nan, jnp.inf):
        rows = x if bad is None else x.at[0].set(bad)
        ids, weights, h = normed_moe_router(rows, gain, w, K, eps=1e-6, config=config)
        for got, given in (((ids, weights), h), (moe_router(rows, w, K, config=config), rows)):
            logits = jnp.dot(given.astype(jnp.float32), w.astype(jnp.float32).T, precision="highest")
            want = route(logits, K).weights
            clean = slice(0 if bad is None else 1, None)
            np.testing.assert_allclose(np.sort(got[1], -1)[clean], np.sort(want, -1)[clean], rtol=1e-3)
            chosen = np.asarray(got[0])
            assert all(len(set(row)) == K for row in chosen) and (chosen >= 0).all() and (chosen < E).all()


def _normal(seed, *shape):
    import jax
    import jax.numpy as jnp

    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def dense():
    """Odd numbers of rows, with norm and residual; rows of a warp, and steps that are left over."""
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode.kernels.dense_rows import DenseConfig, dense_rows

    for T, M, N, *config in ((1, 256, 4), (3, 768, 20), (8, 512, 36), (2, 1280, 48, 4, 2), (5, 768, 32, 2, 4)):
        x, w, gain, residual = _normal(0, T, M), _normal(1, N, M), _normal(2, M), _normal(3, T, N)
        wide = [np.asarray(a, np.float64) for a in (x, w, gain, residual)]
        scaled = wide[0] / np.sqrt((wide[0]**2).mean(-1, keepdims=True) + 1e-6) * wide[2]
        got = dense_rows((x,), w, gain=gain, residuals=(residual,), out_dtype=jnp.float32,
                         config=DenseConfig(*config) if config else None)
        np.testing.assert_allclose(got, scaled @ wide[1].T + wide[3], rtol=1e-4, atol=1e-2)


def norm():
    import numpy as np

    from jax_warp_decode.kernels.rms_norm import rms_norm

    for T, M in ((1, 249), (3, 761)):
        x, gain = _normal(0, T, M), _normal(2, M)
        both = 2 * np.asarray(x, np.float64)
        want = both / np.sqrt((both**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(gain, np.float64)
        np.testing.assert_allclose(np.asarray(rms_norm((x, x), gain, eps=1e-6), np.float64), want, rtol=2.0**-8,
                                   atol=1e-6)


def attention():
    """A full row, an empty one, NaN where the cache holds nothing."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode.kernels.attend import attend

    B, N, KVH, D, S = 4, 6, 2, 64, 200
    lengths = jnp.array([0, 1, 130, S], jnp.int32)
    known = (jnp.arange(S) < lengths[:, None])[:, None, :, None]
    caches = [jnp.where(known, _normal(seed, B, KVH, S, D), jnp.nan) for seed in (4, 5)]
    angles = jax.random.normal(jax.random.key(6), (B, D // 2))
    operands = (_normal(7, B, N + 2 * KVH, D), _normal(8, D), _normal(9, D), (jnp.cos(angles), jnp.sin(angles)),
                *caches, lengths)
    for got, want in zip(attend(*operands, eps=1e-6), attend(*operands, eps=1e-6, interpret=True), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-2)


def gradients():
    import jax
    import jax.numpy as jnp

    from jax_warp_decode import Routing, moe

    case = _make(9, "odd", 33)
    x, routing, experts = case.args()

    def loss(x, weights, experts):
        return jnp.sum(moe(x, Routing(routing.ids, weights), experts, strategy="expert_centric").astype(jnp.float32)**2)

    @jax.jit
    def sound(x, weights, experts, routed):
        """On the device: initcheck would take the gradient of a weight for unwritten, see XLA_FUSIONS."""
        gradients = dx, dw, d_experts = jax.grad(loss, (0, 1, 2))(x, weights, experts)
        idle = ~jnp.any((routing.ids[..., None] == jnp.arange(experts.num_experts)) & routed[..., None], axis=(0, 1))
        zeros = [jnp.all(jnp.where(idle[:, None, None], d, 0) == 0) for d in jax.tree.leaves(d_experts)]
        return [jnp.all(jnp.isfinite(d)) for d in jax.tree.leaves(gradients)], zeros, jnp.all(routed | (dw == 0))

    assert all(jax.tree.leaves(sound(x, routing.weights, experts, case.routed())))


def configurations():
    """The two warp-decode kernels with every width of a row, and unrolls that leave steps over."""
    import oracle

    from jax_warp_decode.kernels import DownConfig, GateUpConfig, moe_down_3d_batched, moe_gate_up_3d_batched

    for format in ("bf16", "mxfp8"):
        for lanes in (32, 16, 8, 4):
            case = oracle.make_case(lanes, tokens=2, experts=3, hidden=704, intermediate=768, k=2, weights=format)
            x, routing, experts = case.args()
            h = moe_gate_up_3d_batched(
                x, routing.ids, experts.w_gate, experts.w_up, config=GateUpConfig(lanes, 1, 3))
            y = moe_down_3d_batched(h, routing.ids, routing.weights, experts.w_down, config=DownConfig(lanes, 1, 5))
            oracle.assert_close(y, case)


def bundled_model():
    """Prefill and decode steps, through whatever kernels the decode loop has besides those of the layer."""
    import jax.numpy as jnp
    import numpy as np

    from jax_warp_decode import demo
    from jax_warp_decode.checkpoints import load_qwen3_moe
    from jax_warp_decode.models.generate import generate

    model = load_qwen3_moe(demo.bundled_model("mxfp8"), dtype=jnp.bfloat16)
    prompt = np.frombuffer(b'The "for" statement', np.uint8)[None]
    generation = generate(model, prompt, 4)
    tokens, logits = [], []
    for ids in generation:
        tokens.append(int(ids[0]))
        logits.append(np.asarray(generation.logits, np.float32)[0])
    want = demo.reference_logits(model, np.concatenate([prompt[0], tokens[:-1]]))[prompt.shape[1] - 1:]
    assert demo.compare(np.array(logits), want).cosine > 0.99


def no_tokens():
    from jax_warp_decode import STRATEGIES

    for strategy in STRATEGIES:
        y = _jitted(strategy)(*_make(0, "small", 0).args())
        assert y.shape == (0, SHAPES["small"][1])


def read():
    import jax
    import numpy as np

    from jax_warp_decode.measure import read_kernel

    x = read_kernel.window(jax.random.key(0), 3 * read_kernel.CHUNK_BYTES)
    np.testing.assert_allclose(jax.jit(read_kernel.read)(x), np.asarray(x, np.float64).sum(2), atol=1e-2)
