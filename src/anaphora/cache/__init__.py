"""The prefix cache: which KV blocks hold which tokens, who uses them, and which to evict. Imports no torch."""
