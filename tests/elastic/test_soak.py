"""Twenty hosts die while the example trains, and it learns what it learns when none does; ``benchmarks/soak.py``."""

import random
from collections import Counter
from pathlib import Path

import pytest

from slurm_pathways.config import RuntimeSpec
from slurm_pathways.launch.local import LocalRuntime
from tests.elastic.soak import Plan, measure

#: Of one kind that is found by silence, which takes as long as that; the others are seen at once.
KINDS = {"executor": 10, "supervisor": 5, "host": 4, "stopped executor": 1}
SEED = 7


@pytest.mark.timeout(500)
def test_twenty_deaths_change_nothing_of_what_is_learnt(runs_root: Path) -> None:
    deaths = list(Counter(KINDS).elements())
    random.Random(SEED).shuffle(deaths)
    plan = Plan(
        tuple(deaths),
        num_slices=2,
        num_spares=2,
        heartbeat_timeout_s=4.0,
        max_quiet_steps=20,
        awaits_spares=False,
        min_step_s=0.03,
    )
    soak = measure(lambda **spec: LocalRuntime(RuntimeSpec(**spec)), plan, SEED)
    assert soak.not_recovered == ""
    assert [recovery.death for recovery in soak.recoveries] == deaths
    # Some that died were spares, and some losses came together.
    assert sum(recovery.good_step_s is not None for recovery in soak.recoveries) > len(deaths) / 4
    assert soak.worst_difference < 1e-5
    # Who waits in a collective with one that died is freed, and need not end for that.
    assert soak.num_others_lost < len(deaths) / 4
    assert soak.left == []
    assert max(soak.growth_bytes.values()) < 30e6
