"""How many examples a law has of which an example costs much."""

from hypothesis import settings

COSTLY = settings(max_examples=max(2, settings.default.max_examples // 5))
"""As many as any by default, six in ``make check``, and a fifth of all in ``make proofs``."""
