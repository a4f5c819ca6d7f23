"""A small hybrid target and its drafter, trained on what ships with every Python, so that drafts are really accepted."""
