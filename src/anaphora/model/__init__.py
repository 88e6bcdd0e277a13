"""The arithmetic side: weights, forward pass, sampling."""

import os

# Threads that wait for work spin for a moment only. OpenMP's default of some milliseconds makes a step several times
# slower wherever another process wants the same cores, and the server's own processes do. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
