"""Rollout modes: how a rollout function generates. `mode.py` defines what a mode says, `shipped.py` has the modes."""
