"""What a dispatch costs must not depend on how many hosts take part."""

from pathways_runtime.testing.dispatch_cost import measure_dispatch_cost


def lowest(count, *arguments, **options):
    """Of several measurements: other processes can only add."""
    return min((measure_dispatch_cost(*arguments, **options) for _ in range(count)), key=lambda cost: cost.total_us)


def test_thinking_costs_the_same_for_8_and_for_512_hosts():
    small, large = lowest(2, 8, 256), lowest(3, 512, 256)
    assert large.thinking_us < 4 * small.thinking_us, (small, large)
    assert (small.num_streams, large.num_streams) == (8, 16)
    assert large.hand_over_us > 0 and large.acknowledge_us > 0 and large.wait_us > 0


def test_a_dispatch_over_2048_hosts_costs_at_most_four_times_one_over_8():
    small, large = lowest(2, 8, 128, num_waits=2), lowest(3, 2048, 128, num_waits=2)
    assert large.num_streams == 32
    assert large.total_us < 4 * small.total_us, (small, large)
