"""`python -m jax_warp_decode` is `jax-warp-decode`."""

import sys

from jax_warp_decode.cli import main

if __name__ == "__main__":
    sys.exit(main())
