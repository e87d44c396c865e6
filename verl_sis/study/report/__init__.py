"""``verl-sis report``: studies and training logs as one page that needs no network."""
