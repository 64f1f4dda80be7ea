"""Cost of a compiled program: its operations, its kernels, and their order in time."""
