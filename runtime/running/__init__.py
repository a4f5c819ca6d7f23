"""A run: a repository's entry points, called and measured."""
