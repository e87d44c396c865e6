"""Retrieval for agentic search: an index of passages, a server in front of it, and the tool that verl's agent calls."""
