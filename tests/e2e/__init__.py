"""Whole training runs: real verl, real vLLM, real Ray, on a CPU."""
