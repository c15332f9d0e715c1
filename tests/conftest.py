"""What all tests share: options, and checks that a test leaves nothing behind."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wheel",
        metavar="DIR",
        type=Path,
        help="folder with the wheel and sdist that are installed: tests/packaging looks into them",
    )
