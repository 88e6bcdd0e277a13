"""The engine: decides which tokens of which sequences are computed in each step. Imports no torch."""
