"""Data sets, splits, batches and streams as training takes them, and how their files are read."""
