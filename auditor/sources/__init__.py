"""What is read: which files, their bytes and their text."""
