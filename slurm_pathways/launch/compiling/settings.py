"""Which settings of a run ``compile`` has too."""

#: By field of ``RuntimeSpec``. What the devices are, the topology says; nothing moves between them.
USED_SETTINGS = frozenset(
    {"compile_cache_dir", "run_dir", "keep_logs", "log_dir", "startup_timeout_s", "failure_grace_s", "kill_after_s"}
)
