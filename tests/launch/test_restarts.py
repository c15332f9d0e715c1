from slurm_pathways.launch.restarts import LONG_LIFE_S, MAX_SHORT_LIVES, Restarts, describe_restart


def test_who_never_registered_is_not_started_again() -> None:
    restarts = Restarts()
    assert restarts.is_another_due("worker-0", 50.0) is None
    restarts.note("worker-0", "executor_started", {}, 51.0)
    assert restarts.is_another_due("worker-0", 52.0) is None


def test_short_lives_in_a_row_are_counted_by_worker() -> None:
    restarts = Restarts()
    for life in range(MAX_SHORT_LIVES):
        restarts.note("worker-0", "registered", {}, float(life))
        assert restarts.is_another_due("worker-0", life + 0.5) is (life < MAX_SHORT_LIVES - 1)
    restarts.note("worker-1", "registered", {}, 9.0)
    assert restarts.is_another_due("worker-1", 9.5) is True


def test_a_long_life_makes_good_for_short_ones() -> None:
    restarts = Restarts()
    for number in range(3 * MAX_SHORT_LIVES):
        restarts.note("worker-0", "registered", {}, 100.0 * number)
        lived_s = LONG_LIFE_S if number % 2 else LONG_LIFE_S - 1
        assert restarts.is_another_due("worker-0", 100.0 * number + lived_s) is True


def test_a_later_life_without_the_controller_is_short_however_long_it_tries() -> None:
    restarts, needs_controller = Restarts(), Restarts(must_register=True)
    for one in (restarts, needs_controller):
        one.note("worker-0", "registered", {}, 0.0)
        assert one.is_another_due("worker-0", 40.0) is True
    assert [restarts.is_another_due("worker-0", 80.0 + 30 * n) for n in range(5)] == [True, True, True, True, False]
    assert needs_controller.is_another_due("worker-0", 80.0) is None


def test_nobody_is_started_again_when_the_controller_has_ended_the_run() -> None:
    restarts = Restarts()
    restarts.note("worker-0", "registered", {}, 0.0)
    restarts.note("worker-0", "ended", {"reason": "the controller refused it", "is_run_over": False}, 1.0)
    assert restarts.is_another_due("worker-0", 1.0) is True
    restarts.note("worker-0", "ended", {"reason": "the controller shuts down", "is_run_over": True}, 2.0)
    assert restarts.is_another_due("worker-0", 2.0) is None


def test_words() -> None:
    assert describe_restart(None) == ""
    assert describe_restart(True) == "; it is started again"
    assert "ended 5 times in a row within 10 s of its start" in describe_restart(False)
