"""verl and vLLM on a CPU: the platform, the patches, the tiny world, the quickstart."""
