"""The controller's thinking: hosts, worlds, programs, and the one order of operations."""
