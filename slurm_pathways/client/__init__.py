"""What runs inside the user's JAX program: the connection to the runtime, and array moves without a detour."""
