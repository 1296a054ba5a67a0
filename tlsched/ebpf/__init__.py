"""The classifier: the BPF programs, and how they are loaded and read."""
