"""The arithmetic side: weights, forward pass, sampling."""

import os

# Threads that wait for work spin for a while. OpenMP's default of some milliseconds makes a step several times slower
# where other processes want the same cores all the time; a much shorter spin puts the threads to sleep between any two
# operations. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")
