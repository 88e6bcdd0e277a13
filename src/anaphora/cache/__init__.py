"""The prefix cache: which KV blocks hold which tokens, who uses them, and which to give up. No torch."""
