"""SIS inside verl: the registered loss, the worker, and what differs per engine."""
