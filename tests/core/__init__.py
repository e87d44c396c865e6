"""Tests of the mathematics in verl_sis.core."""
