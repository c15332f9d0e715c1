"""What a dispatch costs must not depend on how many hosts take part."""

from pathways_runtime.testing.dispatch_cost import measure_dispatch_cost


def test_thinking_costs_the_same_for_8_and_for_512_hosts():
    small = measure_dispatch_cost(8, 256)
    # The lowest of three: other processes can only add.
    large = min((measure_dispatch_cost(512, 256) for _ in range(3)), key=lambda cost: cost.thinking_us)
    assert large.thinking_us < 4 * small.thinking_us, (small, large)
    assert large.num_hosts == 512 and large.hand_over_us > 0 and large.acknowledge_us > 0
