"""What architectures are like, found by building them."""
