"""The command line, `jax-warp-decode COMMAND`: which commands there are, and how bad input ends."""

import argparse
import contextlib
import importlib
import io
import os
import sys

from jax_warp_decode import __version__

EXIT_BAD_INPUT = 2

# name: (module with `add_arguments(parser)` and `main(options) -> int`, what it does). A module is imported when its
# command is asked for.
COMMANDS = {
    "info": ("info", "devices, versions, and what can run here, with the reason for what cannot"),
    "demo": ("demo", "complete a prompt with a small Mixture-of-Experts language model"),
    "generate": ("generate_command", "continue one prompt, or several at once, with tokens per second"),
    "bench": ("bench_command", "how fast a model's experts run here, and how far that is from the limit; needs a GPU"),
    "profile": ("profile_command", "trace decode steps and say where each microsecond goes; needs a GPU"),
    "autotune": ("autotune", "measure configurations and strategies, so that the fastest are taken; needs a GPU"),
    "plan": ("plan", "spread a model's experts over GPUs: memory, step time and the best split"),
    "convert": ("checkpoints.convert", "quantise the experts of a checkpoint folder"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}\n")


def _fail(message: str) -> int:
    print(f"jax-warp-decode: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_BAD_INPUT


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 2 after one line on stderr about bad input or output."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="jax-warp-decode", description="Mixture-of-Experts decode for JAX on NVIDIA GPUs.")
    parser.add_argument("--version", action="version", version=f"jax-warp-decode {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        if argv[:1] == [name]:
            command.set_defaults(module=importlib.import_module(f"jax_warp_decode.{module}"))
            command.get_default("module").add_arguments(command)
    options = vars(parser.parse_args(argv))
    module = options.pop("module")
    del options["command"]

    from jax_warp_decode.device import plugin_errors

    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows question marks
    with plugin_errors() as not_loaded:
        code = _run(module, argparse.Namespace(**options), not_loaded)
    for error in not_loaded:
        print(f"jax-warp-decode: warning: a plugin of JAX does not load: {' '.join(error.split())}", file=sys.stderr)
    return code


def _run(module, options: argparse.Namespace, not_loaded: list[str]) -> int:
    from jax_warp_decode.device import explain_failure, start_refusal
    from jax_warp_decode.errors import ArgumentError, CheckpointError, UnsupportedError

    try:
        code = module.main(options)
        sys.stdout.flush()
        return code
    except (ArgumentError, CheckpointError, UnsupportedError) as error:
        return _fail(str(error))
    except (AssertionError, RuntimeError) as error:
        if line := explain_failure(error):
            return _fail(line)
        if line := start_refusal(not_loaded):
            not_loaded.clear()  # said
            return _fail(line)
        raise
    except MemoryError as error:
        return _fail(f"out of host memory: {error}")
    except OSError as error:
        with contextlib.suppress(OSError):
            # What is left in the buffer has nowhere to go; Python would try, and complain, once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"input or output failed: {error}")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
