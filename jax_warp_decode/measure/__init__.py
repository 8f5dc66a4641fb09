"""How speed is measured: inputs like those of a decode step, and the clock. For `autotune` and the benchmarks."""
