"""What the code holds and does, over the whole repository."""
