"""The CUDA binding: torch on one GPU."""
