"""Training and evaluation data in verl's format, from public data sets: ``verl-sis data``."""
