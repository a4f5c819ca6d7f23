"""Verification at the speed of the weights: fixed buffers, compiled layers, and CUDA graphs replayed over them."""
