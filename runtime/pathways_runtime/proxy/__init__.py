"""The process beside the client: the server side of the IFRT proxy protocol and everything that belongs to a session."""
