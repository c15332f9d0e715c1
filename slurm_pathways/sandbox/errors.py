"""What goes wrong with a sandbox, in words for whoever asked for it."""


class SandboxError(Exception):
    """The sandbox cannot do what was asked; the message says what is in the way and what to do."""
