"""Studies away from training: what the estimators do, by exact enumeration."""
