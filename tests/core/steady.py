"""How property tests run here: the same examples every time, and nothing written to disk."""

from hypothesis import settings

steady = settings(max_examples=60, deadline=None, derandomize=True, database=None)
