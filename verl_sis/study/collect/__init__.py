"""``verl-sis study collect``: rollouts of the real engine, scored by the real trainer, as a table of tokens."""
