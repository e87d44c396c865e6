"""Tests of the registered loss and of verl's base losses under it, without a worker."""
