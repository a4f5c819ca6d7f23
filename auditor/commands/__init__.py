"""The commands, one a module; `cli` gathers them."""
