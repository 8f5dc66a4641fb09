"""Makes the table of tuned configurations that ships with the package, for the kind of GPU it runs on.

    python -m bench.tune_packaged --out jax_warp_decode/data/tuned

One run measures every shape in `SHAPES`, in as many processes as there are CPU cores. Entries that are already in the
file and are not measured again stay.
"""

import argparse
import itertools
import os
import pathlib

from rich.console import Console

from jax_warp_decode import tuned_table, tuning
from jax_warp_decode.autotune import Job, autotune
from jax_warp_decode.presets import get_preset

SHAPES = {
    "qwen3-30b-a3b": ("mxfp8", "bf16"),
    "qwen3-235b-a22b": ("mxfp8",),
    "qwen3.5-35b-a3b": ("mxfp8",),
    "gpt-oss-20b": ("bf16",),
    "deepseek-v3": ("mxfp8",),
    "mixtral-8x7b": ("bf16",),
    "minimax-m3": ("mxfp8",),
    "gemma4-26b-a4b": ("bf16",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--candidates", type=int, default=10, help="per kernel (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the table")
    options = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the GPU's memory is the workers'
    jobs = [Job(get_preset(model), format, tokens, options.candidates)
            for tokens, model in itertools.product(options.batch, options.model) for format in SHAPES[model]]
    jobs.sort(key=lambda job: job.format, reverse=True)  # MXFP8 takes longest to lower, so it goes first
    name = tuned_table.slug(tuning.device_kind() or "no gpu")
    autotune(jobs, options.out / f"{name}.json", Console(highlight=False))


if __name__ == "__main__":
    main()
