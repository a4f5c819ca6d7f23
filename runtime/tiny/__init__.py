"""A small hybrid target and its drafter, trained on what ships with every Python: drafts are really accepted."""
