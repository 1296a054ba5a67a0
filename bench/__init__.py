"""Benchmarks: one command per question."""
