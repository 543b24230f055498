"""Kernels for Hopper GPUs alone, in Gluon and CUDA C++: entries of `fleetfoot.kernels.registry`. Without this room the
Triton kernels serve."""
