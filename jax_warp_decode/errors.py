"""The errors a user can meet. Every message names the argument, what came, what is allowed and the way out."""


class ArgumentError(ValueError):
    """An argument has the wrong rank, shape, dtype or name. Raised at trace time, before anything runs."""


class UnsupportedError(NotImplementedError):
    """A valid request that this strategy, format or device cannot run. The message says what can."""


class CheckpointError(ValueError):
    """A checkpoint folder is incomplete, malformed or of another architecture. Nothing has been loaded."""


def counted(n: int, noun: str) -> str:
    """A number of things in words.

    Example:
      >>> from jax_warp_decode.errors import counted
      >>> counted(1, "tensor"), counted(2, "tensor")
      ('1 tensor', '2 tensors')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
