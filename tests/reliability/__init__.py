"""The same faults done to other loaders and to this one: what each makes of them."""
