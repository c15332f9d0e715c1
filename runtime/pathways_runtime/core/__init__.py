"""Pure logic: no clock, no sockets, no JAX, no randomness of its own. Events in, instructions out."""
