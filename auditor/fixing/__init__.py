"""From findings to edits to a fork, each edit proven."""
