"""Reward functions for verl: ``verl_sis.rewards.math`` and ``verl_sis.rewards.search``."""
