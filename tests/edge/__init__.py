"""The examples that need other libraries; skipped where those are missing. `make edge` has them."""
