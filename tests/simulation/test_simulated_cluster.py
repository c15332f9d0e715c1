"""The real cores over simulated executors and networks: values tell whether the order holds."""

import random
import time

import pytest

from pathways_runtime.core.ids import DeviceId
from pathways_runtime.core.status import Code
from pathways_runtime.testing.random_program import RandomProgram
from pathways_runtime.testing.simulated_client import WrongValue
from pathways_runtime.testing.simulated_cluster import SimulatedCluster, Stuck


def meshes_of(cluster, *host_ranges):
    """A mesh over all devices of each range of hosts, in an order of its own."""
    meshes = []
    for first, last in host_ranges:
        per_host = cluster.topology.devices_per_host
        devices = [DeviceId(d) for d in range(first * per_host, last * per_host)]
        cluster.rng.shuffle(devices)
        meshes.append(tuple(devices))
    return meshes


def start_programs(cluster, num_clients, meshes, num_steps, **options):
    for number in range(num_clients):
        client = cluster.add_client(f"client-{number}")
        RandomProgram(client, cluster.clock, random.Random(number), meshes, num_steps, **options)


@pytest.mark.parametrize("seed", range(8))
def test_values_are_right_for_several_clients_over_overlapping_meshes(seed):
    cluster = SimulatedCluster(seed, num_slices=2, hosts_per_slice=4, devices_per_host=2, max_launches_in_flight=6)
    meshes = meshes_of(cluster, (0, 4), (4, 8), (2, 6), (0, 8), (3, 4), (5, 6))
    start_programs(cluster, 3, meshes, num_steps=60)
    cluster.run()
    assert min(client.num_checked for client in cluster.clients) >= 8
    assert not any(client.failures for client in cluster.clients)


def test_a_cluster_of_512_hosts(seed=1):
    began_s = time.monotonic()
    cluster = SimulatedCluster(seed, num_slices=8, hosts_per_slice=64, check_every=20_000)
    meshes = meshes_of(cluster, (0, 512), (0, 256), (256, 512), (128, 384), (0, 64))
    start_programs(cluster, 2, meshes, num_steps=12)
    cluster.run()
    assert all(client.num_checked >= 6 for client in cluster.clients)
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize("seed", range(8))
def test_a_broken_order_gives_wrong_values(seed):
    """The negative control: the same check, with one host that lets launches of one client overtake the other's."""

    def run(reordering):
        cluster = SimulatedCluster(seed, num_slices=1, hosts_per_slice=4, reordering=reordering)
        meshes = meshes_of(cluster, (0, 4))
        for number, program in enumerate((b"F", b"G")):
            client = cluster.add_client(f"client-{number}")
            RandomProgram(client, cluster.clock, random.Random(number), meshes, 100, programs=(program,))
        cluster.run()

    run(reordering=())
    with pytest.raises(WrongValue):
        run(reordering=(2,))


def test_a_broken_order_over_overlapping_meshes_is_found_too():
    cluster = SimulatedCluster(5, num_slices=1, hosts_per_slice=6, reordering=(1, 3))
    start_programs(cluster, 3, meshes_of(cluster, (0, 4), (2, 6), (1, 5)), num_steps=40)
    with pytest.raises((WrongValue, Stuck)):
        cluster.run()


def test_the_same_seed_gives_the_same_run():
    def run():
        cluster = SimulatedCluster(3, num_slices=2, hosts_per_slice=2)
        start_programs(cluster, 2, meshes_of(cluster, (0, 2), (2, 4), (1, 3)), num_steps=30)
        cluster.run()
        return cluster.clock.now_ns, cluster.num_dispatched, [client.num_checked for client in cluster.clients]

    assert run() == run()


@pytest.mark.parametrize("seed", range(6))
def test_a_lost_host_costs_what_it_had_a_part_in_and_nothing_else(seed):
    cluster = SimulatedCluster(seed, num_slices=2, hosts_per_slice=3, max_launches_in_flight=4, check_every=10)
    meshes = meshes_of(cluster, (0, 3), (3, 6), (2, 5))
    everywhere = cluster.add_client("everywhere")
    RandomProgram(everywhere, cluster.clock, random.Random(seed), meshes, 60, may_chain_copies=False)
    elsewhere = cluster.add_client("elsewhere")
    RandomProgram(elsewhere, cluster.clock, random.Random(seed), meshes[1:2], 60)
    cluster.clock.call_later(random.Random(seed).randrange(1_500_000), lambda: cluster.lose_worker(0))
    cluster.run()
    assert elsewhere.failures == [] and elsewhere.num_checked >= 8
    assert everywhere.failures
    messages = [failure.message for failure in everywhere.failures]
    assert any("host 0 (node-0) was lost" in message for message in messages), messages
    # The slice that has lost nobody goes on for everybody.
    assert everywhere.num_checked > 0 or len(everywhere.failures) > 10


@pytest.mark.parametrize("seed", range(8))
def test_values_are_right_behind_relays(seed):
    shape = {"num_slices": 2, "hosts_per_slice": 4, "devices_per_host": 2}
    cluster = SimulatedCluster(seed, **shape, max_launches_in_flight=6, relay_fanout=2)
    assert [relay.node for relay in cluster.relays()] == ["node-0", "node-4"]
    meshes = meshes_of(cluster, (0, 4), (4, 8), (2, 6), (0, 8), (3, 4), (5, 6))
    start_programs(cluster, 3, meshes, num_steps=60)
    cluster.run()
    assert min(client.num_checked for client in cluster.clients) >= 8
    assert not any(client.failures for client in cluster.clients)
    assert all(relay.num_told > 0 for relay in cluster.relays())


def test_a_broken_order_behind_a_relay_gives_wrong_values():
    cluster = SimulatedCluster(5, num_slices=1, hosts_per_slice=6, reordering=(1, 3), relay_fanout=3)
    start_programs(cluster, 3, meshes_of(cluster, (0, 4), (2, 6), (1, 5)), num_steps=40)
    with pytest.raises((WrongValue, Stuck)):
        cluster.run()


@pytest.mark.parametrize("seed", range(6))
def test_a_lost_child_of_a_relay_costs_what_it_had_a_part_in_and_nothing_else(seed):
    lose_in_cluster_with_relays(seed, host=1, lost={1})


@pytest.mark.parametrize("seed", range(6))
def test_a_lost_relay_takes_the_executors_behind_it_along_and_nobody_hangs(seed):
    failures = lose_in_cluster_with_relays(seed, host=0, lost={0, 1, 2})
    for child in (1, 2):
        assert failures[child].code is Code.DATA_LOSS
        assert failures[child].message.startswith(f"host {child} (node-{child}) was lost at ")
        # Its own supervisor may say first that it has ended for that reason.
        relay_is_gone = failures[child].message.endswith("its relay, the supervisor of host 0 (node-0), is gone (gone)")
        assert relay_is_gone or "its executor was killed by signal 9" in failures[child].message


def lose_in_cluster_with_relays(seed, host, lost):
    shape = {"num_slices": 2, "hosts_per_slice": 3}
    cluster = SimulatedCluster(seed, **shape, max_launches_in_flight=4, check_every=10, relay_fanout=2)
    assert [relay.node for relay in cluster.relays()] == ["node-0", "node-3"]
    meshes = meshes_of(cluster, (0, 3), (3, 6), (2, 5))
    everywhere = cluster.add_client("everywhere")
    RandomProgram(everywhere, cluster.clock, random.Random(seed), meshes, 60, may_chain_copies=False)
    elsewhere = cluster.add_client("elsewhere")
    RandomProgram(elsewhere, cluster.clock, random.Random(seed), meshes[1:2], 60)
    cluster.clock.call_later(random.Random(seed).randrange(1_500_000), lambda: cluster.lose_worker(host))
    cluster.run()
    assert set(cluster.lost_hosts) == lost
    assert elsewhere.failures == [] and elsewhere.num_checked >= 8
    assert everywhere.failures
    return cluster.lost_hosts
