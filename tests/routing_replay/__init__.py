"""Tests of routing replay."""
