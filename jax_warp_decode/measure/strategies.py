"""One job of autotune: what every strategy that can run takes for a layer, with the configurations that are tuned now.

Layers with experts and routing of their own make a step, see `workload`, so that nothing is in L2 when it is read. All
steps run in one trace of the profiler, after their results were compared with the float32 reference.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_warp_decode import tuned_table, tuning
from jax_warp_decode.choose import STRATEGIES, choose
from jax_warp_decode.errors import UnsupportedError
from jax_warp_decode.experts import ExpertWeights
from jax_warp_decode.explain import explain_config
from jax_warp_decode.measure import inputs, variants
from jax_warp_decode.measure.job import REPEATS, TOLERANCE, Case, Result
from jax_warp_decode.measure.variants import Variant, compare, compile_reference
from jax_warp_decode.measure.workload import Workload, layer_bytes, layers_needed, make_layers
from jax_warp_decode.moe import moe
from jax_warp_decode.routing import Routing
from jax_warp_decode.tuned_table import LayerTime


@dataclasses.dataclass(frozen=True)
class StrategyJob(Case):
    """A layer whose strategies are timed, for what "auto" takes.

    Example:
      >>> from jax_warp_decode.measure.strategies import StrategyJob
      >>> from jax_warp_decode.presets import get_preset
      >>> job = StrategyJob(get_preset("qwen3-30b-a3b"), "bf16", 64)
      >>> str(job), job.nbytes / 1e9
      ('qwen3-30b-a3b bf16 T=64', 2.415919104)
    """

    @property
    def experts(self) -> ExpertWeights:
        """Shapes of the experts of a layer."""
        return jax.eval_shape(lambda key: inputs.make_experts(key, self.preset, self.format), jax.random.key(0))

    @property
    def strategies(self) -> list[str]:
        """Those that can run here."""
        return [name for name in STRATEGIES if name != "reference" and self._runs(name)]

    def _runs(self, strategy: str) -> bool:
        try:
            choose(self.tokens, self.experts, experts_per_token=self.preset.experts_per_token, x_dtype=jnp.bfloat16,
                   strategy=strategy)
        except UnsupportedError:
            return False
        return True

    @property
    def lowerings(self) -> int:
        """Programs that are lowered."""
        return len(self.strategies)

    @property
    def nbytes(self) -> int:
        """Device memory for the weights."""
        size = layer_bytes(self.preset, self.format)
        return layers_needed(self.preset, size, self.tokens) * size


def measure(job: StrategyJob, gpu=None, advance: Callable[[], object] = lambda: None, threads: int = 4) -> Result:
    """Runs a job in this process; needs a GPU that the kernels run on. Arguments as in `job.measure`."""
    p, shapes = job.preset, job.experts
    S, slots = jax.ShapeDtypeStruct, (job.tokens, job.preset.experts_per_token)
    reference = compile_reference(S((job.tokens, p.hidden), jnp.float32),
                                  jax.eval_shape(Routing, S(slots, jnp.int32), S(slots, jnp.float32)), shapes,
                                  activation=p.activation)
    with gpu or contextlib.nullcontext():
        experts = make_layers(p, job.format, job.nbytes)
        workload = Workload.of(p, experts, job.tokens, "uniform")
        layers = workload.layers(experts)
        check = compare([np.asarray(reference(x.astype(jnp.float32), routing, weights))
                         for x, routing, weights in layers], TOLERANCE)
    steps = [Variant(dict(strategy=name), functools.partial(moe, strategy=name, activation=p.activation), layers, check)
             for name in job.strategies]
    configs = explain_config(shapes, tokens=job.tokens, experts_per_token=p.experts_per_token)
    # The override is for kernels that JAX traced in this process before their configuration was tuned.
    with tuning.override(*(found.config for found in configs.values())):
        rows = variants.measure(steps, REPEATS, threads, gpu=gpu)
    entries, problems = [], []
    for row in rows:
        advance()
        name = row["strategy"]
        if "error" in row:
            problems.append(f"{job}: {name} was not timed: {row['error']}")
        elif row.get("clock") != "device":
            problems.append(f"{job}: the profiler's trace does not show {name}; is another profiler running?")
        else:
            entries.append(LayerTime(
                name, job.format, p.hidden, p.intermediate, p.num_experts, p.experts_per_token, job.tokens,
                round(row["us"], 3), jax.__version__, tuned_table.now()))
    return Result(job, tuple(sorted(entries, key=lambda e: e.us)), tuple(problems))
