"""Programs that tests start in a runtime: plain JAX, the last line that they print is a JSON value."""
