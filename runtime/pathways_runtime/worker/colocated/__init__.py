"""Colocated Python on a worker's host: functions of clients, run in a process of their own beside the executor."""
