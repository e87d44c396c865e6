"""Tests of verl_sis."""
