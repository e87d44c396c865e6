"""Slow, plain-Python references written from the equations, and tests of the references themselves."""
