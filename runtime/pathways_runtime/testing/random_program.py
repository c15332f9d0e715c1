"""A random client program for the simulation: chains of F and G over meshes that overlap, with copies between them."""

import random
from collections.abc import Sequence

from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_client import ClientArray, Mesh, SimulatedClient

_LONGEST_PAUSE_NS = 40_000
_MOST_ARRAYS = 4


class RandomProgram:
    """Takes ``num_steps`` steps once its programs are compiled; checks values now and then, and all at the end.

    Args:
        meshes: those of one size can exchange arrays.
        copies: how often a step is a copy to another mesh.
        may_chain_copies: whether a copy may be copied before a program has run on it.
    """

    def __init__(
        self,
        client: SimulatedClient,
        clock: ManualClock,
        rng: random.Random,
        meshes: Sequence[Mesh],
        num_steps: int,
        copies: float = 0.2,
        programs: Sequence[bytes] = (b"F", b"G"),
        may_chain_copies: bool = True,
    ) -> None:
        self._client = client
        self._clock = clock
        self._rng = rng
        self._meshes = list(meshes)
        self._programs = list(programs)
        self._steps_left = num_steps
        self._copies = copies
        self._may_chain_copies = may_chain_copies
        self._copied: list[ClientArray] = []
        self._arrays: list[ClientArray] = []
        self._uncompiled = len(self._meshes) * len(self._programs)
        for mesh in self._meshes:
            for program in self._programs:
                client.compile(program, mesh, self._compiled)

    def _compiled(self) -> None:
        self._uncompiled -= 1
        if not self._uncompiled:
            self._step()

    def _step(self) -> None:
        client, rng = self._client, self._rng
        if client.num_undispatched > client.max_undispatched:
            # As a proxy does that stops reading its client.
            self._clock.call_later(_LONGEST_PAUSE_NS, self._step)
            return
        if not self._steps_left:
            for array in self._arrays:
                client.check(array)
            return
        self._steps_left -= 1
        usable = [m for m in self._meshes if all(client.has_program(p, m) for p in self._programs)]
        if len(self._arrays) < _MOST_ARRAYS and usable:
            self._arrays.append(client.make_array(rng.choice(usable)))
        if self._arrays:
            place = rng.randrange(len(self._arrays))
            array = self._arrays[place]
            others = [mesh for mesh in usable if len(mesh) == len(array.mesh) and mesh != array.mesh]
            may_copy = self._may_chain_copies or array not in self._copied
            if others and may_copy and rng.random() < self._copies:
                result = client.copy(array, rng.choice(others))
                self._copied = [result, *self._copied[:_MOST_ARRAYS]]
            else:
                result = client.run_program(rng.choice(self._programs), array)
            self._arrays[place] = result
            if rng.random() < 0.1:
                client.check(result)
            client.delete(array)
        self._clock.call_later(rng.randrange(_LONGEST_PAUSE_NS), self._step)
