"""Measurements. Run them from the repository's root: `python -m benchmarks`, `python -m benchmarks.idle`."""
