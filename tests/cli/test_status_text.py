from slurm_pathways.status import as_text


def test_losses_and_hosts_that_are_about_to_serve_again() -> None:
    lost = {"worker": 1, "slice_index": 0, "at_unix_s": 1000.0, "found_after_s": 0.31}
    text = as_text(
        {
            "run_dir": "/tmp/run-1",
            "devices": [
                {"id": number, "slice_index": 0, "host": number // 2, "state": state}
                for number, state in enumerate(("idle", "idle", "joining", "joining"))
            ],
            "failures": [
                {
                    **lost,
                    "host": 1,
                    "name": "node1",
                    "cause": "its executor ended with exit code 1",
                    "served_again_after_s": 0.75,
                    "served_again_by": "node4",
                },
                {
                    **lost,
                    "host": 1,
                    "name": "node4",
                    "cause": "its supervisor has been silent for 8.1 s",
                    "found_after_s": None,
                    "served_again_after_s": None,
                    "served_again_by": None,
                },
            ],
        }
    )
    assert "\njoining: hosts 1\n" in text
    assert text.split("losses\n")[1].split("\n\n")[0].splitlines() == [
        "  host  name   at            found after s  cause                                     served again",
        "  1     node1  00:16:40 UTC  0.3            its executor ended with exit code 1       after 0.75 s by node4",
        "  1     node4  00:16:40 UTC  -              its supervisor has been silent for 8.1 s  -",
    ]
