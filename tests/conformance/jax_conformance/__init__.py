"""Runs JAX's own tests here and on plain JAX, and compares: plan, journal, kinds and table are pure; runner is not."""
