"""Arithmetic without a plan: compiled kernels, which import nothing of the package except its errors."""
