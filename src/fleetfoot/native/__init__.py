"""CPU kernels in C, and the library that they are built into."""
