"""The errors a user can meet. Every message names the argument, what came, what is allowed and the way out."""


class ArgumentError(ValueError):
    """An argument has the wrong rank, shape, dtype or name. Raised at trace time, before anything runs."""


class UnsupportedError(NotImplementedError):
    """A valid request that this strategy, format or device cannot run. The message says what can."""


class CheckpointError(ValueError):
    """A checkpoint folder is incomplete, malformed or of another architecture. Nothing has been loaded."""
