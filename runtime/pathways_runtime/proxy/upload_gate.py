"""Holds a session's uploads back while host buffers take too much memory."""

import asyncio
from collections.abc import Callable, Collection

from pathways_runtime.core.ids import Handle
from pathways_runtime.proxy.frontend import Flow
from pathways_runtime.proxy.host_memory import HostMemory

#: How soon a gate that holds some back looks whether it still must.
_LOOK_AGAIN_S = 0.02


class UploadGate:
    """Says which of a session's uploads go on: all, as long as there is memory.

    When it is scarce, none goes on while memory becomes free without any. Otherwise somebody may wait for what is being
    uploaded, and hold up all that would free memory: then the oldest goes on, and those that are asked for.

    Args:
        becomes_free: whether host buffers of this session go away by themselves: links take what was sent to them, or
            the session takes up its requests again once the controller has dispatched some.
        wanted: the host buffers without which the session's next request cannot go on.
    """

    def __init__(
        self, memory: HostMemory, becomes_free: Callable[[], bool], wanted: Callable[[], Collection[Handle]]
    ) -> None:
        self._memory = memory
        self._becomes_free = becomes_free
        self._wanted = wanted
        self._handles: dict[Flow, Handle] = {}
        self._paused: set[Flow] = set()
        #: Uploads are chosen; otherwise all go on.
        self.is_choosing = False

    def enter(self, handle: Handle, flow: Flow) -> None:
        """An upload begins."""
        self._handles[flow] = handle
        self.advanced()
        if self.is_choosing:
            self._choose()

    def leave(self, flow: Flow) -> None:
        """An upload is over, done or not."""
        self._handles.pop(flow, None)
        self._paused.discard(flow)
        if self.is_choosing:
            self._choose()

    def advanced(self) -> None:
        """Bytes of an upload have come."""
        if self._memory.is_scarce and not self.is_choosing:
            self.is_choosing = True
            self._choose()
            self._look_again_soon()

    def _choose(self) -> None:
        if not self._memory.is_scarce:
            going_on: Collection[Flow] = self._handles
        elif self._becomes_free() or not self._handles:
            going_on = ()
        else:
            wanted = {min(self._handles.values()), *self._wanted()}
            going_on = {flow for flow, handle in self._handles.items() if handle in wanted}
        for flow in self._handles:
            if flow in going_on and flow in self._paused:
                self._paused.discard(flow)
                flow.resume_reading()
            elif flow not in going_on and flow not in self._paused:
                self._paused.add(flow)
                flow.pause_reading()

    def _look_again_soon(self) -> None:
        # Nobody tells when a link has sent what it had.
        asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._choose()
        self.is_choosing = self._memory.is_scarce and bool(self._handles)
        if self.is_choosing:
            self._look_again_soon()
