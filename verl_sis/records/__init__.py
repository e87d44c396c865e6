"""Per-token records: the schema, and files that follow it. Written by training runs and studies, read by reports."""
