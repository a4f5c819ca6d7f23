"""Rules, one brittle pattern a file. A new file here is a new rule: nothing else lists them."""
