"""What is in folders that others are removing meanwhile."""

import os
from collections.abc import Iterator
from pathlib import Path


def all_below(root: Path) -> Iterator[Path]:
    """Every file and folder below, the upper ones first. ``Path.rglob`` fails when one goes while it looks."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield Path(folder, name)
