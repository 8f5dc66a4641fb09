"""What the default device is, as far as kernels care."""

import jax

HOPPER = "9.0"


def capability() -> str:
    """Compute capability of the default device, for example "9.0"; an empty string if it is no GPU."""
    if jax.default_backend() != "gpu":
        return ""
    return getattr(jax.devices()[0], "compute_capability", "unknown")
