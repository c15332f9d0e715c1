"""The process beside the client: the server of the IFRT proxy protocol, and all that belongs to one session."""
