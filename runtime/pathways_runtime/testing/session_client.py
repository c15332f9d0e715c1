"""A client of a session for scripted tests: two slices of two hosts of two devices, numpy workers behind it."""

import numpy as np

from pathways_runtime.core.dtype import DType
from pathways_runtime.core.ids import DeviceId, Handle, RequestId
from pathways_runtime.core.session import events, instructions, requests, responses
from pathways_runtime.core.sharding import REPLICATED, Sharding, TileAssignment, TileKind
from pathways_runtime.core.status import Status
from pathways_runtime.core.topology import Topology
from pathways_runtime.testing.session_driver import SessionDriver
from pathways_runtime.testing.session_workers import Program

TOPOLOGY = Topology(num_slices=2, hosts_per_slice=2, devices_per_host=2, platform="cpu")
DEVICES = tuple(DeviceId(i) for i in range(TOPOLOGY.num_devices))
SLICE_0, SLICE_1 = DEVICES[:4], DEVICES[4:]
ON_SLICE_0 = Sharding(SLICE_0, REPLICATED, "device")
ON_SLICE_1 = Sharding(SLICE_1, REPLICATED, "device")
ROWS_0 = Sharding(SLICE_0, TileAssignment(TileKind.TILED, (4, 1), places=(0, 1, 2, 3)), "device")
SHAPE = (4, 3)
VALUES = np.arange(12, dtype=np.int32).reshape(SHAPE)


class Client:
    """Shorthand for what most tests do first. Handles count up from 1."""

    def __init__(self, driver: SessionDriver) -> None:
        self.driver = driver
        self._last = 0

    def mint(self) -> Handle:
        self._last += 1
        return Handle(self._last)

    def array(self, sharding: Sharding = ON_SLICE_0, values: np.ndarray = VALUES) -> Handle:
        """An array of VALUES."""
        handle = self.mint()
        self.driver.stored[handle] = values
        answer = self.driver.ask(
            requests.MakeArrayFromHostBuffer(DType.S32, values.shape, sharding, handle, None, handle)
        )
        assert answer == responses.ArrayHandle(handle)
        return handle

    def identity(self, sharding: Sharding = ON_SLICE_0, donated: tuple[int, ...] = ()) -> Handle:
        """A loaded executable that returns its one argument."""
        request_id = self.ask_to_compile(sharding, donated)
        self.driver.compile_all()
        answer = self.driver.answers[request_id]
        assert isinstance(answer, responses.Compiled)
        return answer.loaded_executable_handle

    def ask_to_compile(self, sharding: Sharding = ON_SLICE_0, donated: tuple[int, ...] = ()) -> RequestId:
        """The compilation of such an executable, not answered yet."""
        name = f"identity {len(self.driver.programs)}".encode()
        output = events.ProgramOutput(DType.S32, SHAPE, sharding.tiles, "device")
        compiled = events.CompiledProgram(name.decode(), b"print", (output,), donated, 1, {"flops": 12.0}, "HloModule")
        program = Program(sharding.devices, lambda arguments: arguments, donated)
        self.driver.programs[name] = (compiled, program)
        return self.driver.request(requests.Compile(name, b"options", sharding.devices))

    def execute(self, executable: Handle, argument: Handle) -> Handle:
        """The result of an execution."""
        result = self.mint()
        answer = self.driver.ask(requests.LoadedExecutableExecute(executable, (argument,), (result,)))
        assert answer == responses.Executed(Handle(0), ())
        return result

    def last(self) -> list[instructions.Instruction]:
        """What the latest event gave."""
        return self.driver.log[-1][1]

    def refused(self, request: requests.Request) -> Status:
        """The failure that a request is answered with."""
        answer = self.driver.ask(request)
        assert isinstance(answer, Status)
        return answer
