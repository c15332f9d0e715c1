"""What a loss looks like to a program: the one place that knows."""

#: In the text of every error that a lost host has brought about.
_CODE = "DATA_LOSS"
#: In the text of those of a slice that nobody has stood behind yet.
_ABSENT = "is absent until there are workers for it"


def loss_of(error: BaseException) -> str | None:
    """The text of the loss that an error, or what it was raised from, tells of; None if it tells of none."""
    import jax

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, jax.errors.JaxRuntimeError) and _CODE in str(seen):
            return str(seen)
        seen = seen.__cause__
    return None


def is_absence(loss: str) -> bool:
    """Whether the text of a loss tells of a slice that has not been there yet (``run --absent-slices``)."""
    return _ABSENT in loss
