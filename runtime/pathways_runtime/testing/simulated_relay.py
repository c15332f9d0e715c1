"""Relays of a simulated cluster: the real aggregation, on simulated links and a clock of its own."""

from collections.abc import Callable

from pathways_runtime.core.controller.events import ChildrenAcknowledged, PeerId
from pathways_runtime.core.ids import OpId, SessionId, WaitId
from pathways_runtime.core.relay import Aggregation
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_executor import SimulatedExecutor
from pathways_runtime.testing.simulated_network import Link, Network, Process

Action = Callable[[], None]


class SimulatedRelay(Process):
    """Stands between the controller and some executors, as ``worker.relay`` does.

    Args:
        supervisor: the connection to the controller of the supervisor that it is part of.
        send: takes what is to happen at the controller there, if that connection is still open.

    Attributes:
        children: by number, which is never reused.
    """

    def __init__(
        self,
        node: str,
        supervisor: PeerId,
        clock: ManualClock,
        network: Network,
        controller: Process,
        send: Callable[[Action | ChildrenAcknowledged], None],
    ) -> None:
        super().__init__(f"relay-{supervisor}", node)
        self.supervisor = supervisor
        self.children: list[SimulatedExecutor] = []
        self.num_told = 0
        self._clock = clock
        self._network = network
        self._controller = controller
        self._send = send
        self._links: dict[SimulatedExecutor, Link] = {}
        self._aggregation = Aggregation()

    def add_child(self, executor: SimulatedExecutor) -> int:
        """An executor connects; its number."""
        number = len(self.children)
        self.children.append(executor)
        self._aggregation.add_child(number)
        return number

    # downwards

    def pass_on(self, deliveries: list[tuple[SimulatedExecutor, Action]]) -> None:
        """One message from the controller, for some children."""

        def deliver() -> None:
            links = self._links
            for child, action in deliveries:
                link = links.get(child)
                if link is None:
                    link = links[child] = self._network.link(self, child)
                link.send(action)

        self._network.link(self._controller, self).send(deliver)

    # upwards

    def acknowledge(
        self, child: int, executor: SimulatedExecutor, launches: int, transfers: tuple[tuple[SessionId, OpId], ...]
    ) -> None:
        """A child sends Acknowledge."""
        self._from_child(
            executor, lambda: self._aggregation.acknowledge(child, launches, transfers, self._clock.now_ns)
        )

    def arrays_ready(self, child: int, executor: SimulatedExecutor, session: SessionId, wait_id: WaitId) -> None:
        """A child sends ReadyHere."""
        self._from_child(executor, lambda: self._aggregation.arrays_ready(child, session, wait_id, self._clock.now_ns))

    def forward(self, executor: SimulatedExecutor, action: Action) -> None:
        """A child sends anything else."""

        def arrive() -> None:
            self._tell_progress()
            self._to_controller(action)

        self._from_child(executor, arrive)

    def child_closed(self, child: int, executor: SimulatedExecutor, action: Action) -> None:
        """A child's connection is closed, of which it sends word."""

        def arrive() -> None:
            self._aggregation.remove_child(child)
            self._tell_progress()
            self._to_controller(action)

        self._from_child(executor, arrive)

    def _from_child(self, executor: SimulatedExecutor, arrive: Action) -> None:
        def received() -> None:
            arrive()
            self._tell_when_due()

        self._network.link(executor, self).send(received)

    def _tell_when_due(self) -> None:
        if self.is_dead or self._aggregation.due_ns is None:
            return
        if self._aggregation.is_due(self._clock.now_ns):
            self._tell_progress()
        else:
            self._clock.call_at(self._aggregation.due_ns, self._tell_when_due)

    def _tell_progress(self) -> None:
        if self._aggregation.due_ns is not None:
            told = self._aggregation.take()
            self.num_told += 1
            self._to_controller(
                ChildrenAcknowledged(self.supervisor, told.completed, told.transfers_started, told.ready)
            )

    def _to_controller(self, what: Action | ChildrenAcknowledged) -> None:
        self._network.link(self, self._controller).send(lambda: self._send(what))
