"""What the runtime costs, side by side with what a user would run instead. ``python -m benchmarks``."""
