"""Selective Importance Sampling (SIS, arXiv 2607.04728) as a plugin for verl.

Importing this package imports neither torch nor verl.
"""

__version__ = "0.1.0"
