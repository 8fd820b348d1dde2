"""One job on several processes: workers, their parts, and what they agree on."""
