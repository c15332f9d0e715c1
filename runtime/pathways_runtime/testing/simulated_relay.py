"""Relays of a simulated cluster: the real aggregation, on simulated links and a clock of its own."""

from collections.abc import Callable

from pathways_runtime.core.controller.events import ChildrenAcknowledged, PeerEvent, PeerId
from pathways_runtime.core.ids import HostIndex, OpId, SessionId, WaitId
from pathways_runtime.core.relay import Aggregation
from pathways_runtime.testing.manual_clock import ManualClock
from pathways_runtime.testing.simulated_network import Network


class SimulatedRelay:
    """Stands between the controller and some executors, as ``worker.relay`` does.

    Args:
        host: where it runs. supervisor: its connection to the controller.
        tell: takes events to the controller, at once.
    """

    def __init__(
        self,
        host: HostIndex,
        supervisor: PeerId,
        clock: ManualClock,
        network: Network,
        tell: Callable[[PeerEvent], None],
    ) -> None:
        self.host = host
        self.supervisor = supervisor
        self.is_lost = False
        self.children: list[HostIndex] = []
        self.num_told = 0
        self._name = f"relay-{host}"
        self._clock = clock
        self._network = network
        self._tell = tell
        self._numbers: dict[HostIndex, int] = {}
        self._aggregation = Aggregation()

    def add_child(self, host: HostIndex) -> int:
        """An executor connects; its number."""
        number = self._numbers[host] = len(self.children)
        self.children.append(host)
        self._aggregation.add_child(number)
        return number

    def remove_child(self, host: HostIndex) -> None:
        """An executor is gone."""
        self._aggregation.remove_child(self._numbers[host])

    # downwards

    def pass_on(self, deliveries: dict[HostIndex, Callable[[], None]]) -> None:
        """One message from the controller, for some children."""
        self._network.link("controller", self._name).send(lambda: self._deliver(deliveries))

    def _deliver(self, deliveries: dict[HostIndex, Callable[[], None]]) -> None:
        if not self.is_lost:
            for host, deliver in deliveries.items():
                self._network.link(self._name, str(host)).send(deliver)

    # upwards

    def acknowledge(self, host: HostIndex, launches: int, transfers: tuple[tuple[SessionId, OpId], ...]) -> None:
        """A child sends Acknowledge."""
        child = self._numbers[host]
        self._from_child(host, lambda: self._aggregation.acknowledge(child, launches, transfers, self._clock.now_ns))

    def arrays_ready(self, host: HostIndex, session: SessionId, wait_id: WaitId) -> None:
        """A child sends ReadyHere."""
        child = self._numbers[host]
        self._from_child(host, lambda: self._aggregation.arrays_ready(child, session, wait_id, self._clock.now_ns))

    def forward(self, host: HostIndex, event: PeerEvent) -> None:
        """A child sends anything else."""

        def arrive() -> None:
            self._tell_progress()
            self._to_controller(event)

        self._from_child(host, arrive)

    def _from_child(self, host: HostIndex, arrive: Callable[[], None]) -> None:
        def received() -> None:
            if not self.is_lost:
                arrive()
                self._tell_when_due()

        self._network.link(str(host), self._name).send(received)

    def _tell_when_due(self) -> None:
        if self.is_lost or self._aggregation.due_ns is None:
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

    def _to_controller(self, event: PeerEvent) -> None:
        def arrive() -> None:
            # A connection that is closed brings nothing more.
            if not self.is_lost:
                self._tell(event)

        self._network.link(self._name, "controller").send(arrive)
