from slurm_pathways.launch.components import ComponentEvent
from slurm_pathways.launch.news import TERMINATING_EVENT, describe_news, describe_trouble


def test_what_was_mended_is_news_and_no_trouble() -> None:
    back = ComponentEvent(
        "controller", "host_back", {"host": 1, "worker": 4, "name": "host-4", "lost_worker": 1, "took_s": 0.7041}
    )
    assert describe_news(back) == "host 1 is served again by host-4 after 0.7 s"
    assert describe_trouble(back) is None


def test_losses_and_workers_that_are_given_up_are_trouble() -> None:
    lost = ComponentEvent("controller", "host_lost", {"reason": "host 1 (node1) was lost", "log_tail": "a\nb"})
    assert describe_news(lost) == "host 1 (node1) was lost\n    last lines of its log:\n    | a\n    | b"
    given_up = ComponentEvent("controller", "worker_given_up", {"worker": 1, "name": "node1", "num_executors": 5})
    words = describe_news(given_up)
    assert words is not None and words.startswith("worker 1 (node1) is given up: 5 of its executors ended one after")
    assert describe_news(ComponentEvent("controller", "bound", {"host": 1})) is None


def test_the_end_of_the_job_is_news() -> None:
    words = describe_news(ComponentEvent("controller", TERMINATING_EVENT))
    assert words is not None and words.startswith("Slurm has sent the job's steps SIGTERM: it is cancelled, preempted")
