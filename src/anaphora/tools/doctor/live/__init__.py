"""In: the address of a running server. Out: the figures of its ``/metrics`` over a sample and since its start, and what
to do next."""
