"""The user's settings: YAML, flags and Python arguments in one validated, frozen model.

Each knob has one default, and it stands here. A validator may refuse a setting, but never changes
it. Settings that depend on the data are fitted in `plan`, which shows them.
"""
