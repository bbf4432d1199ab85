"""Faults, each in a process of its own, and what has to be true after them."""
