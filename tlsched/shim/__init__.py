"""The training process: everything that touches torch."""
