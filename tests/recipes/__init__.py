"""Tests of ``recipes``: every variant composes, is what it says it is, and has the paper's numbers."""
