"""Plain decoding, and what is held against it."""
