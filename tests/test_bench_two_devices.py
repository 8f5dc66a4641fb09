"""The clock of several GPUs, on made-up timelines."""

from bench import two_devices
from jax_warp_decode.measure.timing import Event

STEPS = 3


def timeline(start, kernels):
    """Events of kernels (name, microseconds) back to back from `start` microseconds; and where they end."""
    events = []
    for name, us in kernels:
        events.append(Event(name, start * 1e3, (start + us) * 1e3))
        start += us
    return events


def program(late, compute, runs=two_devices.WARM_UP + STEPS, at=0.0):
    """Two GPUs: `compute` microseconds each, an all-reduce of 5 that both leave together; GPU 1 starts `late`."""
    devices = [[], []]
    for run in range(runs):
        begin = at + run * 1000
        ready = [begin + compute[0], begin + late + compute[1]]
        end = max(ready) + 5
        for device, start in enumerate((begin, begin + late)):
            devices[device] += timeline(
                start, [("moe_down", compute[device]), ("ncclDevKernel_AllReduce_f32", end - ready[device])])
    return devices


def test_the_device_that_starts_last_has_the_time():
    first = program(0, (10, 10), runs=1)  # what runs once before the pause
    a, b = program(50, (100, 110), at=1e6), program(0, (30, 20), at=2e6)
    found = two_devices.summarise([first[i] + a[i] + b[i] for i in range(2)], [1.0, 2.0], STEPS)
    assert [f.us for f in found] == [115, 35] and [f.clock for f in found] == ["device"] * 2
    assert [f.collective_us for f in found] == [5, 5], "who waits less shows what the collective takes"
    assert found[0].busy_us == [100, 110] and found[0].kernels["ncclDevKernel_AllReduce_f32"] == 65


def test_a_trace_that_cannot_be_read_leaves_the_host_clock():
    events = program(0, (10, 10), at=1e6)
    for devices in ([], events, [events[0], events[1][:-1]]):
        (found,) = two_devices.summarise(devices, [7.0], STEPS)
        assert (found.us, found.clock, found.collective_us) == (7.0, "host", None)
