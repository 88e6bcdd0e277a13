"""The engine: which tokens of which sequences are computed in each step. No torch."""
