"""A cache that verifies a block or a tree and goes back, and what it installs on a model."""
