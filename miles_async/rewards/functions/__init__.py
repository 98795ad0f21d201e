"""The rewards that `rm_type` names, one file each; `rewards/plugin.py` says what a reward declares."""
