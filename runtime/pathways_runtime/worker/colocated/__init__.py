"""Colocated Python on a worker's host: functions of clients, run in a process of their own beside the executor."""


def files_prefix(executor_pid: int) -> str:
    """What the names of files begin with that processes of an executor have in the folder for sockets."""
    return f"python-{executor_pid}-"
