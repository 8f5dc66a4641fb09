"""Experts on a mesh: eight virtual devices in one process, and two processes that talk over the loopback."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent


def environment(devices):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS=flags,
                PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS)]))


@pytest.mark.parametrize("checks", ["parallel_checks", "partitioned_checks"])
def test_checks_on_eight_devices(checks):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
         str(TESTS / f"{checks}.py")],
        env=environment(8), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


PROCESS = """
import sys
import jax, jax.numpy as jnp, numpy as np
import oracle
from flax import nnx
from jax_warp_decode import Routing
from jax_warp_decode.checkpoint_sharding import load_experts
from jax_warp_decode.checkpoints import load_model, reader
from jax_warp_decode.demo import bundled_model
from jax_warp_decode.parallel import ExpertSharding, moe_sharded
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
assert jax.process_count() == 2 and jax.device_count() == 4 and jax.local_device_count() == 2
mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = ExpertSharding(mesh, expert_axis="expert", tensor_axis="tensor")
case = oracle.make_case(1, tokens=4, experts=4, hidden=64, intermediate=64, k=2, pattern="skipped")
x, routing, experts = case.args()
experts = jax.tree.map(lambda w, where: jax.make_array_from_callback(w.shape, where, lambda i: np.asarray(w[i])),
                       experts, sharding.shardings(experts))
y = jax.jit(moe_sharded, static_argnames="strategy")(
    np.asarray(x), Routing(np.asarray(routing.ids), np.asarray(routing.weights)), experts, sharding,
    strategy="expert_centric")
oracle.assert_close(np.asarray(y.addressable_data(0)), case, h_dtype="bfloat16")

read = []  # of a folder, each process reads its own half of the experts alone
reader.StoredTensor.read_into = lambda self, out, fill=reader.StoredTensor.read_into: (
    read.append(self.nbytes), fill(self, out))
layer = load_experts(bundled_model("mxfp8"), sharding, layers=[1])[1]
assert 2 * sum(read) == sum(a.nbytes for a in jax.tree.leaves(layer)), (sum(read), layer)

read.clear()  # a whole decoder: half of the experts, all of the rest
model = load_model(bundled_model("mxfp8"), sharding=sharding)
experts = sum(a.nbytes for layer in model.layers for a in jax.tree.leaves(layer.moe.experts))
assert sum(read) == sum(a.nbytes for a in jax.tree.leaves(nnx.state(model))) - experts // 2, (sum(read), experts)
assert len(model.embed.embedding.get_value().sharding.device_set) == 4
print("right on", jax.process_index())
"""


def test_two_processes():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    both = [subprocess.Popen([sys.executable, "-c", PROCESS, address, str(i)], env=environment(2), text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for i in range(2)]
    try:
        for i, process in enumerate(both):
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0 and f"right on {i}" in out, err[-4000:]
    finally:
        for process in both:
            process.kill()
