"""Drafters: the repository's own, trained or random, and scripted ones."""
