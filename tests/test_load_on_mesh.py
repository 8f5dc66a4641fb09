"""Parts of checkpoint tensors: the right values, and no more bytes than they need. On a mesh: test_parallel.py."""

import types

import jax
import ml_dtypes
import numpy as np
import pytest

from jax_warp_decode import ArgumentError
from jax_warp_decode.checkpoint_sharding import load_experts
from jax_warp_decode.checkpoints import load_model, load_moe_blocks, mesh_fill, reader, slots
from jax_warp_decode.checkpoints.mesh_fill import PAGE_BYTES, read_slice
from jax_warp_decode.demo import bundled_model
from jax_warp_decode.parallel import ExpertSharding


@pytest.fixture
def counted(monkeypatch):
    """A list that gets the size of every read."""
    sizes, read_into = [], reader.StoredTensor.read_into
    monkeypatch.setattr(reader.StoredTensor, "read_into", lambda self, out: (
        sizes.append(self.nbytes), read_into(self, out))[1])
    return sizes


def store(folder, array, dtype):
    """The tensor in a file, after 7 bytes of something else."""
    (folder / "data").write_bytes(b"\xff" * 7 + array.tobytes())
    return reader.StoredTensor(dtype, array.shape, folder / "data", 7, array.nbytes)


@pytest.mark.parametrize("index,expected", [
    ((slice(1, 3), slice(0, 4), slice(0, 8192)), 2 * 4 * 8192),  # experts
    ((slice(0, 3), slice(2, 4), slice(0, 8192)), 3 * 2 * 8192),  # rows of each
    ((slice(2, 3), slice(1, 3), slice(2048, 4096)), 2 * 2048),  # columns, far apart
    ((slice(0, 2), slice(1, 4), slice(0, 6400)), 2 * 3 * 8192),  # columns, closer than a page
    ((slice(0, 0), slice(0, 4), slice(0, 8)), 0),
])
def test_a_slice_reads_what_it_needs(tmp_path, counted, index, expected):
    array = np.random.default_rng(1).integers(0, 256, (3, 4, 8192)).astype(ml_dtypes.bfloat16)
    out = np.empty([i.stop - i.start for i in index], np.float32)
    read_slice(store(tmp_path, array, "BF16"), index, out)
    np.testing.assert_array_equal(out, array[index].astype(np.float32))
    assert sum(counted) == 2 * expected and PAGE_BYTES == 4096


@pytest.mark.parametrize("options", [
    dict(), dict(transpose=True), dict(half="even", half_axis=-2), dict(half="second", transpose=True),
    dict(blocks=True), dict(blocks=True, half="odd")])
def test_parts_of_every_orientation(tmp_path, options):
    # gpt-oss and others: [out, in] or [in, out], rows of gate and up alternating, the last axis in blocks.
    shape = (4, 6, 2, 8) if options.get("blocks") else (4, 6, 16)
    array = np.random.default_rng(2).integers(0, 256, shape).astype(np.uint8)
    opened = types.SimpleNamespace(tensors={"w": store(tmp_path, array, "U8")})
    slot = slots.Slot("w", shape, "w_up", dtypes=("U8",), **options)
    whole = np.empty(slot.target_shape, np.uint8)
    slot.read(opened.tensors["w"], whole)
    E, N, M = whole.shape
    for index in ((slice(1, 3), slice(0, N), slice(0, M)), (slice(3, 4), slice(1, N - 1), slice(M // 2, M))):
        got = mesh_fill._read(opened, [slot], index, np.uint8)
        np.testing.assert_array_equal(got, whole[index])


@pytest.mark.parametrize("weights", ["bf16", "mxfp8"])
def test_experts_of_a_folder(weights, counted):
    mesh = jax.make_mesh((1,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
    got = load_experts(bundled_model(weights), ExpertSharding(mesh, expert_axis="e"), layers=[1])[1]
    assert sum(counted) == sum(a.nbytes for a in jax.tree.leaves(got)), "every byte once"
    want = load_moe_blocks(bundled_model(weights), layers=[1])[1].experts
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))
    with pytest.raises(ArgumentError, match=r"layers: got \[9\], expected layers with experts"):
        load_experts(bundled_model(weights), ExpertSharding(mesh, expert_axis="e"), layers=[9])
    with pytest.raises(ArgumentError, match=r"layers: got 1, expected numbers of layers, such as \[1\]"):
        load_experts(bundled_model(weights), ExpertSharding(mesh, expert_axis="e"), layers=1)


def test_a_decoder_wants_auto_axes():
    mesh = jax.make_mesh((1,), ("e",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ArgumentError, match="^sharding: got a mesh with axes of type AxisType.Explicit.*AxisType.Auto"):
        load_model(bundled_model("bf16"), sharding=ExpertSharding(mesh, expert_axis="e"))
