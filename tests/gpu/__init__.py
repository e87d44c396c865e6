"""What needs a GPU: run by scripts/gpu_check.sh, never run so far."""
