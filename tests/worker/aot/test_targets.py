"""Names of topologies: what each says of its hosts and devices, and what is refused."""

import pytest

from pathways_runtime.worker.aot.targets import Target, TargetError, parse


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("v5e:1x1", Target("v5e:1x1", "tpu", 1, 1)),
        ("v5e:2x2", Target("v5e:2x2", "tpu", 1, 4)),
        ("v5e:2x4", Target("v5e:2x4", "tpu", 2, 4)),
        (" V5E:4X4 ", Target("v5e:4x4", "tpu", 4, 4)),
        ("v6e:16x16", Target("v6e:16x16", "tpu", 64, 4)),
        ("v5p:2x2x1", Target("v5p:2x2x1", "tpu", 1, 4)),
        ("v5p:2x4x4", Target("v5p:2x4x4", "tpu", 8, 4)),
        ("v5p:16x20x28", Target("v5p:16x20x28", "tpu", 2240, 4)),
        ("tpu7x:2x2x1", Target("tpu7x:2x2x1", "tpu", 1, 8)),
        ("cpu:8", Target("cpu:1x8", "cpu", 1, 8)),
        ("cpu:4x2", Target("cpu:4x2", "cpu", 4, 2)),
        ("H100:8", Target("h100:1x8", "cuda", 1, 8)),
        ("h200:2x8", Target("h200:2x8", "cuda", 2, 8)),
    ],
)
def test_topologies(text: str, target: Target) -> None:
    assert parse(text) == target


@pytest.mark.parametrize(
    "text",
    [
        *("", "v5e", "v5e:", "v5e:x", "v5e:3x3", "v5e:2x2x1", "v5e:4x2", "v5e:02x2", "v5e:2x2x", "v5e:-2x2", "v9:2x2"),
        *(
            "v5p:2x2",
            "v5p:4x4x2",
            "v5p:68x4x4",
            "v4:2x2x1",
            "cpu:0",
            "cpu:2x2x2",
            "cpu:129",
            "cpu:5000x1",
            "cuda:1",
            "h100:2x2x2",
        ),
    ],
)
def test_what_is_refused_is_said_with_what_is_allowed(text: str) -> None:
    with pytest.raises(TargetError) as raised:
        parse(text)
    message = str(raised.value)
    assert message.startswith(f"{text}: no such topology. Allowed are ")
    for allowed in (
        "v5e:XxY",
        "v6e:XxY",
        "v5p:XxYxZ",
        "tpu7x:XxYxZ",
        "2x2x4",
        "16x16",
        "cpu:N",
        "cpu:HxN",
        "a100, h100, h200",
    ):
        assert allowed in message
