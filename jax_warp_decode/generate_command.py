"""`jax-warp-decode generate`: continues one prompt or several of different lengths, and streams what comes."""

import argparse

CHUNK = 8  # tokens between two looks at the device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT",
                        help="text to continue; repeat it for several, which decode together")
    parser.add_argument("--checkpoint", metavar="DIR",
                        help="a Hugging Face folder of Qwen3-MoE, Mixtral or gpt-oss (default: the bundled model)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T",
                        help="0 takes the most likely token every time (default: %(default)s)")
    parser.add_argument("--top-p", type=float, metavar="P",
                        help="sample only from the most likely tokens that make up this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--strategy", default="auto", metavar="NAME", help="how the experts run (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    """Runs the command; bad input raises the package's errors."""
    from rich.console import Console

    run(options, Console(highlight=False))
    return 0


def run(options: argparse.Namespace, console) -> None:
    """`main` on a console of the caller's."""
    import itertools
    import pathlib

    import jax
    import jax.numpy as jnp

    from jax_warp_decode.checkpoints import load_model
    from jax_warp_decode.demo import bundled_model
    from jax_warp_decode.errors import ArgumentError, counted
    from jax_warp_decode.models.decode_loop import generate_ragged
    from jax_warp_decode.models.decode_step import DecodeModel, DecoderWeights
    from jax_warp_decode.text import codec_for, end_tokens

    if not all(options.prompt):
        raise ArgumentError("prompt: got an empty text, expected at least one character to continue")
    if not -2**63 <= options.seed < 2**63:
        raise ArgumentError(f"seed: got {options.seed}, expected a number of 64 bits")
    folder = bundled_model("bf16") if options.checkpoint is None else pathlib.Path(options.checkpoint)
    module = load_model(folder, strategy=options.strategy, dtype=jnp.bfloat16)
    codec, ends = codec_for(folder, module.config.vocab_size), end_tokens(folder)
    model, weights = DecodeModel.of(module), DecoderWeights.from_model(module)
    prompts = [codec.encode(text) for text in options.prompt]

    def start(max_new_tokens):
        rng = jax.random.key(options.seed) if options.temperature > 0 else None
        return generate_ragged(model, weights, prompts, max_new_tokens, temperature=options.temperature,
                               top_p=options.top_p, rng=rng, chunk=CHUNK, max_len=max_len)

    max_len = None
    max_len = start(options.max_new_tokens).max_len  # checks everything; and a shorter trial then has the same shapes
    with console.status("compiling"):
        for _ in itertools.islice(start(min(options.max_new_tokens, 1 + CHUNK)), 2):
            pass
    generation = start(options.max_new_tokens)
    unfinished = {number: codec.stream() for number in range(len(prompts))}
    screen = _Screen(console, options.prompt)
    with screen.show():
        for ids in generation:
            for number, stream in list(unfinished.items()):
                column = ids[:, number].tolist()
                end = next((i for i, token in enumerate(column) if token in ends), None)
                screen.add(number, "".join(map(stream, column[:end])))
                if end is not None:
                    del unfinished[number]
            if not unfinished:
                break
    rate = generation.tokens_per_second
    speed = "" if rate != rate else (f", {rate:,.0f} tokens/s per prompt, {rate * len(prompts):,.0f} in all, "
                                     f"{1e3 / rate:,.2f} ms per step")
    sizes = ", ".join(counted(len(prompt), "token") for prompt in prompts)
    console.print(f"{counted(len(prompts), 'prompt')} of {sizes}: first token after "
                  f"{generation.prefill_seconds * 1e3:,.1f} ms{speed}", soft_wrap=True, markup=False)


class _Screen:
    """Where the text goes: a live view on a terminal; else one prompt streams and several are printed at the end."""

    def __init__(self, console, prompts):
        self._console, self._prompts, self._texts = console, prompts, [""] * len(prompts)
        self._stream = len(prompts) == 1

    def show(self):
        import contextlib

        from rich.live import Live

        if self._console.is_terminal and not self._stream:
            return Live(self, console=self._console, refresh_per_second=12)
        return self._plain(contextlib.ExitStack())

    def _plain(self, stack):
        if self._stream:
            self._write(self._prompts[0])
            stack.callback(self._write, "\n")
        else:
            stack.callback(lambda: self._write("".join(f"{text}\n" for text in self._numbered())))
        return stack

    def _numbered(self):
        pairs = enumerate(zip(self._prompts, self._texts, strict=True), start=1)
        return [f"[{number}] {prompt}{text}" for number, (prompt, text) in pairs]

    def __rich__(self):
        from rich.text import Text

        return Text("\n".join(self._numbered()))

    def add(self, number: int, text: str) -> None:
        from jax_warp_decode.demo import printable

        text = printable(text)
        self._texts[number] += text
        if self._stream:
            self._write(text)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()
