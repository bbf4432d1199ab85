"""Pools whose workers are something else than processes of this machine."""
