"""In: a ``Log`` and its findings. Out: a ``Diagnosis``: what each repair saves, measured by running the repaired log
through the cache, and the hit rate that all of them reach together."""
