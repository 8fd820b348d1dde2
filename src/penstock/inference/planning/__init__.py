"""Everything that is known before a byte moves: bytes, cuts, the plan, and jobs at scale."""
