"""What a user may set: YAML, flags and Python arguments in one validated, frozen model.

Each knob has one default, and it stands here. A validator may refuse what the user said; it never
edits it: what is fitted to the data is fitted in `plan`, and shown there.
"""
