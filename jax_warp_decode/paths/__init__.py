"""One module a strategy, all with the same signature: run(x, routing, experts, *, activation, ...) -> y."""
