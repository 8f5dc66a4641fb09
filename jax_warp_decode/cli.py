"""The command line: `jax-warp-decode info`, `demo` and `autotune`."""

import argparse
import contextlib
import os
import sys

EXIT_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jax-warp-decode", description="Mixture-of-Experts decode for JAX on NVIDIA GPUs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("info", help="devices, versions, and what can run here, with the reason for what cannot")

    demo = commands.add_parser("demo", help="complete a prompt with a small Mixture-of-Experts language model")
    demo.add_argument("--prompt", default='The "with" statement', help="text to continue (default: %(default)s)")
    demo.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    demo.add_argument("--temperature", type=float, default=0.5, metavar="T",
                      help="0 takes the most likely token every time (default: %(default)s, with a fixed seed)")
    demo.add_argument("--strategy", default="auto", metavar="NAME",
                      help="auto, warp_decode, expert_centric or reference (default: %(default)s)")
    demo.add_argument("--weights", choices=("bf16", "mxfp8"),
                      help="format of the bundled model's experts (default: bf16)")
    demo.add_argument("--checkpoint", metavar="DIR",
                      help="a Hugging Face Qwen3MoeForCausalLM folder instead of the bundled model")

    tune = commands.add_parser("autotune", help="measure kernel configurations on this GPU and keep the fastest")
    shape = tune.add_mutually_exclusive_group(required=True)
    shape.add_argument("--model", metavar="NAME", help="a model whose sizes are known, such as qwen3-30b-a3b")
    shape.add_argument("--shape", type=int, nargs=4, metavar=("H", "I", "E", "K"),
                       help="hidden and intermediate size, experts, experts per token")
    tune.add_argument("--format", nargs="+", default=["bf16"], metavar="NAME",
                      help="of the weights: bf16, mxfp8 (default: bf16)")
    tune.add_argument("--batch", nargs="+", type=int, default=[1, 2, 4, 8], metavar="T",
                      help="tokens per step (default: 1 2 4 8)")
    tune.add_argument("--out", metavar="FILE",
                      help="file to write or to add to (default: $JAX_WARP_DECODE_TUNED, or the user's cache folder)")
    return parser


def _fail(message: str) -> int:
    print(f"jax-warp-decode: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_BAD_INPUT


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, or 2 after one line on stderr about bad input or output."""
    args = _parser().parse_args(argv)
    # Imported after parsing: --help and typing errors need none of it.
    from rich.console import Console

    from jax_warp_decode.errors import ArgumentError, CheckpointError, UnsupportedError

    if getattr(sys.stdout, "errors", None) in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows question marks
    console = Console(highlight=False)
    try:
        if args.command == "info":
            from jax_warp_decode import info

            info.render(info.collect(), console)
        elif args.command == "autotune":
            from jax_warp_decode import autotune

            autotune.command(args, console)
        else:
            from jax_warp_decode import demo

            options = vars(args)
            del options["command"]
            demo.run(demo.Request(**options), console)
        sys.stdout.flush()
    except (ArgumentError, CheckpointError, UnsupportedError) as error:
        return _fail(str(error))
    except OSError as error:
        with contextlib.suppress(OSError):
            # What is left in the buffer has nowhere to go; Python would try, and complain, once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"input or output failed: {error}")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
