"""Waiting on an event loop for what nothing announces: it turns, and nobody sleeps."""

import asyncio
from collections.abc import Callable

DEADLINE_S = 20.0


async def until(condition: Callable[[], object], what: str) -> None:
    """Let the loop turn until something is so."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + DEADLINE_S
    while not condition():
        assert loop.time() < deadline_s, f"not in {DEADLINE_S} s: {what}"
        await asyncio.sleep(0)
