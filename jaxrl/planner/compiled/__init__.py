"""What a compiled program costs: its operations, its kernels, and their order in time."""
