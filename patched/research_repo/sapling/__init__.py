"""Block drafting with chain and tree verification."""
