"""A client program that goes on whatever is lost: it makes new arrays in place of those that failed, and continues."""

import random
from collections.abc import Callable, Sequence

from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_client import ClientArray, Mesh, SimulatedClient
from pathways_runtime.testing.simulated_executor import WITHOUT_RESULT

#: Steps come in bursts, as recovery takes much longer than a step.
_LONGEST_PAUSE_NS = 40_000
_LONGEST_REST_NS = 2_000_000_000
_LONGEST_BURST = 10
_MOST_ARRAYS = 4
_PROGRAMS = (b"F", b"G", WITHOUT_RESULT)


class RecoveringProgram:
    """Takes steps until ``stop``: runs programs, copies arrays between meshes, asks for values, compiles anew.

    Args:
        meshes: those of one size can exchange arrays.
    """

    def __init__(self, client: SimulatedClient, clock: ManualClock, rng: random.Random, meshes: Sequence[Mesh]) -> None:
        self.client = client
        self.meshes = list(meshes)
        self._clock = clock
        self._rng = rng
        self._arrays: list[ClientArray] = []
        #: Made by a copy, and no program has run on them since.
        self._copied: list[ClientArray] = []
        self._compiling: set[tuple[bytes, Mesh]] = set()
        self._steps_to_rest = 0
        self._is_resting = False
        #: Steps asked for; only the latest is taken.
        self._num_steps = 0
        self._is_over = False
        for mesh in self.meshes:
            self._compile(mesh)
        self._go_on(_LONGEST_PAUSE_NS)

    def nudge(self) -> None:
        """Something happens: if it rests, it begins anew now."""
        if self._is_resting:
            self._is_resting = False
            self._go_on(_LONGEST_PAUSE_NS)

    def stop(self) -> None:
        """No more steps; what it has of arrays it gives up."""
        self._is_over = True
        for array in self._arrays:
            self.client.delete(array)
        self._arrays, self._copied = [], []

    def detach(self) -> None:
        """The client goes, in the middle of whatever it does."""
        self._is_over = True
        self.client.detach()

    def work_everywhere(self, on_missing: Callable[[str], None]) -> None:
        """Make an array on each mesh, run the programs on it, copy the result to a mesh like it, and check all.

        Called after ``stop``. Programs that are not there are compiled first.
        """
        for mesh in self.meshes:
            missing = [p for p in _PROGRAMS if not self.client.has_program(p, mesh)]
            if missing:
                self._await_programs(mesh, missing, on_missing)
            else:
                self._work(mesh)

    def _await_programs(self, mesh: Mesh, missing: list[bytes], on_missing: Callable[[str], None]) -> None:
        left = list(missing)

        def compiled(program: bytes) -> None:
            left.remove(program)
            if not self.client.has_program(program, mesh):
                on_missing(f"{self.client.name}: {program!r} for devices {mesh}")
            elif not left:
                self._work(mesh)

        for program in missing:
            self.client.compile(program, mesh, lambda program=program: compiled(program))  # type: ignore[misc]

    def _work(self, mesh: Mesh) -> None:
        client = self.client
        made = client.make_array(mesh)
        ran = client.run_program(b"F", made)
        again = client.run_program(b"G", ran)
        client.run_for_effect(again)
        alike = [other for other in self.meshes if len(other) == len(mesh) and other != mesh]
        arrays = [made, ran, again, *(client.copy(again, other) for other in alike)]
        for array in arrays:
            client.wait_for(array)
            client.check(array, len(array.mesh))
            client.delete(array)

    def _compile(self, mesh: Mesh) -> None:
        for program in _PROGRAMS:
            key = (program, mesh)
            if key not in self._compiling and not self.client.has_program(*key):
                self._compiling.add(key)
                self.client.compile(program, mesh, lambda key=key: self._compiling.discard(key))  # type: ignore[misc]

    def _step(self) -> None:
        client, rng = self.client, self._rng
        if self._is_over:
            return
        if client.num_undispatched > client.max_undispatched:
            # As a proxy does that stops reading its client.
            self._go_on(_LONGEST_PAUSE_NS)
            return
        if not self._steps_to_rest:
            self._steps_to_rest = rng.randint(1, _LONGEST_BURST)
            self._begin_burst()
        self._steps_to_rest -= 1
        if self._arrays:
            self._advance(rng.randrange(len(self._arrays)))
        self._is_resting = not self._steps_to_rest
        self._go_on(_LONGEST_REST_NS if self._is_resting else _LONGEST_PAUSE_NS)

    def _go_on(self, longest_ns: int) -> None:
        self._num_steps += 1
        number = self._num_steps

        def step() -> None:
            if number == self._num_steps:
                self._step()

        self._clock.call_later(self._rng.randrange(longest_ns), step)

    def _begin_burst(self) -> None:
        client, rng = self.client, self._rng
        # What failed is made anew, and so is one that did not.
        kept = [array for array in self._arrays if not client.has_failed(array)]
        for array in [*(a for a in self._arrays if a not in kept), *kept[:1]]:
            client.delete(array)
        self._arrays = kept[1:]
        mesh = rng.choice(self.meshes)
        if rng.random() < 0.1 and not any(m == mesh for _, m in self._compiling):
            for program in _PROGRAMS:
                if client.has_program(program, mesh):
                    client.forget_program(program, mesh)
        self._compile(rng.choice(self.meshes))
        while len(self._arrays) < _MOST_ARRAYS:
            self._arrays.append(client.make_array(rng.choice(self.meshes)))

    def _advance(self, place: int) -> None:
        client, rng = self.client, self._rng
        array = self._arrays[place]
        alike = [mesh for mesh in self.meshes if len(mesh) == len(array.mesh) and mesh != array.mesh]
        program = rng.choice(_PROGRAMS)
        if alike and array not in self._copied and rng.random() < 0.3:
            result = client.copy(array, rng.choice(alike))
            self._copied = [result, *self._copied[:_MOST_ARRAYS]]
        elif not client.has_program(program, array.mesh):
            return
        elif program == WITHOUT_RESULT:
            client.run_for_effect(array)
            return
        else:
            result = client.run_program(program, array)
        self._arrays[place] = result
        if rng.random() < 0.3:
            client.check(result)
        if rng.random() < 0.2:
            client.wait_for(result)
        client.delete(array)
