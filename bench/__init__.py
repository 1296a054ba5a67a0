"""Benchmarks: one command a question, `python -m bench NAME`. Figures, no verdicts."""
