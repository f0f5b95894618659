"""Arithmetic on arrays: the compiled kernels and nothing else."""
