"""The arithmetic side: weights, forward pass, sampling."""

import os

# Threads that wait for work spin for a fraction of a millisecond. OpenMP's default of some milliseconds makes a step several
# times slower where other processes want the same cores all the time; a short spin puts the threads to sleep between
# any two operations. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")
