"""Bytes between processes: frames on stream sockets, shared memory, the data plane."""
