"""Targets: loading them, building them, and the real places inside."""
