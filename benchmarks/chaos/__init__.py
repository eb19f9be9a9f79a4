"""ckpt-chaos on a small job of ours. Run it from the repository's root: `python -m benchmarks.chaos`."""
