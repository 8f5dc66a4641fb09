"""What "auto" takes where a layer was measured: from which file, for which calls, near which T, and in what words."""

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import pytest

from jax_warp_decode import ArgumentError, ExpertSharding, ExpertWeights, choose, explain, tuned_table, tuning
from jax_warp_decode.tuned_table import Entry, LayerTime

DEVICE = "NVIDIA Test 100"
W, W_DOWN = (jax.ShapeDtypeStruct((4, *shape), jnp.bfloat16) for shape in ((64, 256), (256, 64)))
EXPERTS = ExpertWeights(W, W, W_DOWN)
BIG, BIG_DOWN = (jax.ShapeDtypeStruct((128, *shape), jnp.bfloat16) for shape in ((768, 2048), (2048, 768)))
BIG_EXPERTS, BIG_SIZES = ExpertWeights(BIG, BIG, BIG_DOWN), dict(H=2048, I=768, E=128, K=8)
ESTIMATE = "8 tokens x 2 slots on 4 experts: 4 pairs per expert"


def time(strategy, T, us, **changes):
    sizes = dict(format="bf16", H=256, I=64, E=4, K=2)
    return LayerTime(strategy=strategy, T=T, us=us, jax="0.11.2", date="2026-01-02T03:04:05+00:00", **sizes | changes)


def times(T, warp, shared, expert, **changes):
    names = "warp_decode", "shared_decode", "expert_centric"
    return [time(name, T, us, **changes) for name, us in zip(names, (warp, shared, expert), strict=True)]


def pick(T=8, experts=EXPERTS, **changes):
    return choose(T, experts, **dict(experts_per_token=2, x_dtype=jnp.bfloat16) | changes)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A GPU that is not there, its user's file, which is named, and its packaged file; both hold nothing yet."""
    user, packaged = tmp_path / "user.json", tmp_path / "packaged.json"
    monkeypatch.setattr(tuning, "device_kind", lambda: DEVICE)
    monkeypatch.setattr(importlib.import_module("jax_warp_decode.choose"), "no_gpu_reason", lambda: "")
    monkeypatch.setattr(tuned_table, "packaged_file", lambda device_kind: packaged)
    monkeypatch.setenv(tuned_table.VARIABLE, str(user))
    for path in (user, packaged):
        tuned_table.write_entries(path, DEVICE, [])
    return user, packaged


def test_the_first_file_that_measured_the_layer_decides(files):
    user, packaged = files
    assert pick().strategy == "warp_decode" and pick().reason == ESTIMATE
    tuned_table.write_entries(packaged, DEVICE, times(8, 30.0, 20.04, 25.0))
    assert pick().strategy == "shared_decode"
    assert pick().reason == (f"{ESTIMATE}; measured 20.0 us against 25.0 us of expert_centric and 30.0 us of "
                             "warp_decode (packaged table, T=8)")
    tuned_table.write_entries(user, DEVICE, [time("warp_decode", 8, 5.0)])
    assert pick().strategy == "shared_decode", "a time alone has nothing that it could be compared with"
    tuned_table.write_entries(user, DEVICE, times(8, 30.0, 20.0, 10.0))
    assert pick().strategy == "expert_centric"
    assert pick().reason.endswith(f"10.0 us against 20.0 us of shared_decode and 30.0 us of warp_decode ({user}, T=8)")
    tuned_table.write_entries(user, DEVICE, [time("warp_decode", 8, 2.0)])
    assert pick().strategy == "warp_decode", "a file is read again when it has changed"


def test_a_users_measurements_move_the_switch(files):
    user, _ = files
    tuned_table.write_entries(user, DEVICE, [*times(4, 10.0, 11.0, 50.0), *times(16, 40.0, 22.0, 50.0)])
    taken = [pick(T).strategy for T in range(1, 34)]
    assert taken[:1] == taken[32:] == ["warp_decode"], "by the estimate, more than a factor of two away"
    assert taken[1:32] == ["warp_decode"] * 3 + ["shared_decode"] * 28


def test_between_two_measurements_times_are_powers_of_the_tokens(files):
    user, _ = files
    tuned_table.write_entries(user, DEVICE, [*times(4, 10.0, 18.0, 50.0), *times(16, 40.0, 18.0, 50.0)])
    assert "measured 18.0 us against 20.0 us of warp_decode and 50.0 us of expert_centric (" in pick().reason
    assert pick().reason.endswith("user.json, T=4 and 16)")
    # 128 is too far from 16 to go from one to the other: each speaks for what is near, as the estimate goes on from it.
    tuned_table.write_entries(user, DEVICE, times(128, 1.0, 2.0, 3.0))
    assert pick(20).strategy == "shared_decode" and pick(20).reason.endswith("T=16)")
    assert pick(40).strategy == "warp_decode" and pick(40).reason == pick(40, interpret=True).reason
    assert pick(64).strategy == "warp_decode" and pick(64).reason.endswith("T=128)")


def test_a_strategy_that_was_not_measured_is_estimated_in_proportion(files):
    user, _ = files
    tuned_table.write_entries(user, DEVICE, times(8, 1e3, 500.0, 1.0)[:2])  # by the estimate, 3.4 to 1
    assert pick().strategy == "shared_decode"
    assert "measured 500.0 us against 1000.0 us of warp_decode and an estimated 1" in pick().reason
    tuned_table.write_entries(user, DEVICE, times(512, 9e3, 500.0, 1.0, **BIG_SIZES)[:2])
    found = pick(512, BIG_EXPERTS, experts_per_token=8)
    assert found.strategy == "expert_centric"
    assert "; estimated 3" in found.reason and "us against a measured 500.0 us of shared_decode and" in found.reason


def test_beyond_what_was_measured_times_grow_as_the_estimate_does(files):
    """At twice the tokens `shared_decode` takes several passes, `expert_centric` hardly longer."""
    tuned_table.write_entries(files[0], DEVICE, times(256, 2300.0, 300.0, 320.0, **BIG_SIZES))
    taken = {T: pick(T, BIG_EXPERTS, experts_per_token=8) for T in (128, 256, 512)}
    assert [choice.strategy for choice in taken.values()] == ["shared_decode", "shared_decode", "expert_centric"]
    assert "measured 32" in taken[512].reason and taken[512].reason.endswith("user.json, T=256)")


def test_what_the_estimate_rules_out_may_have_been_measured(files):
    """`expert_centric` scans all experts in float32 where weights are float16; its times tell nothing of others."""
    experts = EXPERTS.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float16))
    warp, shared, expert = times(8, 30.0, 20.0, 1.0, format="f16")
    tuned_table.write_entries(files[0], DEVICE, [warp, expert])
    assert [pick(T, experts).strategy for T in (8, 12)] == ["expert_centric"] * 2
    assert "measured 1.0 us against 3" in pick(12, experts).reason
    tuned_table.write_entries(files[0], DEVICE, [dataclasses.replace(t, K=1) for t in (shared, expert)])
    found = pick(8, experts, experts_per_token=1)
    assert found.strategy == "expert_centric" and "20.0 us of shared_decode" in found.reason
    assert "estimated 0.0 us" not in found.reason


@pytest.mark.parametrize("other", [
    dict(format="mxfp8"), dict(H=512), dict(I=128), dict(E=8), dict(K=1), dict(T=17)], ids=str)
def test_measurements_of_another_layer_do_not_count(files, other):
    tuned_table.write_entries(files[0], DEVICE, [dataclasses.replace(t, **other) for t in times(8, 30.0, 20.0, 25.0)])
    assert pick().reason == ESTIMATE and pick().strategy == "warp_decode"


def test_what_cannot_run_is_not_taken_whatever_was_measured(files):
    tuned_table.write_entries(files[0], DEVICE, times(8, 30.0, 20.0, 25.0))
    assert pick().strategy == "shared_decode"
    gateless = pick(experts=ExpertWeights(None, W, W_DOWN))
    assert gateless.strategy == "expert_centric" and "shared_decode cannot run: the experts have no" in gateless.reason
    assert "measured 25.0 us against 30.0 us of warp_decode (" in gateless.reason


@pytest.mark.parametrize("ask", [dict(interpret=True), dict(x_dtype=jnp.float16), dict(shares=2),
                                 dict(strategy="shared_decode"), dict(T=0)], ids=str)
def test_calls_that_were_not_measured_go_by_the_estimate_and_read_no_file(files, ask):
    user, _ = files
    tuned_table.write_entries(user, DEVICE, times(8, 30.0, 20.0, 25.0))
    before = pick(**ask)
    assert "measured" not in before.reason
    user.write_text("{")
    assert pick(**ask) == before
    with pytest.raises(ArgumentError, match="is no table"):
        pick()


def test_without_a_gpu_no_file_is_read(files, monkeypatch):
    files[0].write_text("{")
    monkeypatch.setattr(tuning, "device_kind", lambda: None)
    assert pick().reason == ESTIMATE


def test_explain_shows_what_was_measured_but_not_for_a_share_of_the_experts(files):
    share = [*times(8, 30.0, 20.0, 25.0, E=2), *times(8, 30.0, 20.0, 25.0, E=2, K=1)]
    tuned_table.write_entries(files[0], DEVICE, [*times(8, 30.0, 20.0, 25.0), *share])
    ask = functools.partial(explain, EXPERTS, tokens=8, experts_per_token=2, x_dtype=jnp.bfloat16)
    told = ask()
    assert told.choice == pick() and "measured 20.0 us against 25.0 us" in str(told).splitlines()[0]
    assert list(told.configs) == ["moe_gate_up_shared", "moe_down_shared"]
    mesh = jax.sharding.AbstractMesh((2,), ("expert",))
    choice = ask(sharding=ExpertSharding(mesh, expert_axis="expert")).choice
    assert choice.strategy == "warp_decode" and "measured" not in choice.reason


def test_an_override_of_configurations_leaves_the_strategy(files):
    from jax_warp_decode.kernels import DownConfig

    tuned_table.write_entries(files[0], DEVICE, times(8, 30.0, 20.0, 25.0))
    with tuning.override(DownConfig(8, 2, 1)):
        assert pick().strategy == "shared_decode"


@pytest.mark.parametrize(("layers", "words"), [
    ({}, ["layers is {}"]),
    (None, ["layers is None"]),
    ([3], ["is no table"]),
    ([dict(us=0)], ["an entry reads", "'us': 0"]),
    ([dict(us=float("nan"))], ["an entry reads"]),
    ([dict(us=10**400)], ["an entry reads"]),
    ([dict(us="1")], ["an entry reads"]),
    ([dict(E=0)], ["an entry reads"]),
    ([dict(T=True)], ["an entry reads"]),
    ([dict(K=2**31)], ["an entry reads"]),
    ([dict(strategy=5)], ["an entry reads"]),
    ([dict(kernel="moe_down")], ["kernel"]),
    ([{}, dict(us=9.0)], ["two entries are of warp_decode bf16 H=256 I=64 E=4 K=2 T=8"]),
], ids=str)
def test_layers_that_cannot_be_used_are_named_with_the_way_out(files, layers, words):
    user, _ = files
    if isinstance(layers, list) and layers != [3]:
        layers = [dataclasses.asdict(time("warp_decode", 8, 1.0)) | changes for changes in layers]
    content = json.dumps(dict(schema=2, device_kind=DEVICE, configs=[], layers=layers))
    user.write_text(content)
    with pytest.raises(ArgumentError) as error:
        pick()
    assert all(word in str(error.value) for word in (*words, str(user), "delete", "autotune", tuned_table.VARIABLE))
    with pytest.raises(ArgumentError, match="is no table"):
        tuned_table.write_entries(user, DEVICE, times(8, 1.0, 2.0, 3.0))
    assert user.read_text() == content


def test_what_another_version_measured_is_ignored_and_kept(files):
    user, _ = files
    theirs = [time("sideways_decode", 8, 0.1), *times(8, 0.1, 0.2, 0.3, format="mxfp2"), time("reference", 8, 0.1)]
    config = Entry("moe_down", "bf16", 256, 64, 2, 1, dict(lanes=8, rows=1, unroll=1), 2.5, None, None, None, "0.11.2",
                   "2026-01-02")
    tuned_table.write_entries(user, DEVICE, [*theirs, config])
    assert pick().reason == ESTIMATE
    tuned_table.write_entries(user, DEVICE, times(8, 30.0, 20.0, 25.0))
    assert pick().strategy == "shared_decode"
    content = json.loads(user.read_text())
    assert all(dataclasses.asdict(t) in content["layers"] for t in theirs) and len(content["layers"]) == 8
    assert content["configs"] == [dataclasses.asdict(config)]


def test_a_file_without_layers_is_one(files):
    user, _ = files
    user.write_text(json.dumps(dict(schema=2, device_kind=DEVICE, configs=[])))
    assert pick().reason == ESTIMATE
    tuned_table.write_entries(user, DEVICE, times(8, 30.0, 20.0, 25.0))
    assert pick().strategy == "shared_decode"
