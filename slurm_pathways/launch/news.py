"""What components say of a run (events on their standard output), and how people are told."""

from slurm_pathways.launch.components import LOG_LINES_SHOWN, ComponentEvent

#: From an agent (``launch.agent``), of its node and its step.
AGENT_EVENT = "node_ready"
#: From an agent whose node cannot take part; ``reason`` says why.
AGENT_FAILED_EVENT = "node_failed"
#: From an agent: Slurm has sent SIGTERM to its step, which goes on for the program.
TERMINATING_EVENT = "terminating"
#: From the controller, once every host is bound and every slice's world is formed.
READY_EVENT = "ready"
#: From the controller, when a host's executor has registered; ``name`` is the host's.
HOST_READY_EVENT = "host_ready"
#: From the controller, when somebody serves again for a host that was lost: ``host``, ``name``, ``took_s``.
HOST_BACK_EVENT = "host_back"
#: From the controller, when somebody serves for a host of a slice that was absent: ``host``, ``name``.
HOST_THERE_EVENT = "host_there"
#: From the controller, when it has given a worker up whose executors end at once: ``name``, ``num_executors``.
GIVEN_UP_EVENT = "worker_given_up"
#: From the controller, of a worker that has not what hosts of this run need: ``worker``, ``name``, ``reason``.
REFUSED_EVENT = "worker_refused"
#: From the controller, of a spare that was lent and goes: ``worker``, ``name``, ``companion``, ``reason``.
LEFT_EVENT = "worker_left"
#: From the controller, of a worker whose supervisor does not answer: what is left of it is to be killed.
STUCK_EVENT = "supervisor_stuck"
#: From the controller, when the runtime cannot become ready any more; ``reason`` says why.
FAILED_EVENT = "failed"
#: From controller and proxy, once they accept connections.
LISTENING_EVENT = "listening"

#: From the controller: which virtual host a worker stands behind.
BOUND_EVENT = "bound"
#: From the controller, of a worker that is lost.
LOST_EVENTS = ("host_lost", "worker_lost")
#: From the controller, of what broke; ``reason`` says what and why, ``log_tail`` is the end of the log that shows it.
TROUBLE_EVENTS = frozenset({*LOST_EVENTS, "coordination_lost"})


def describe_trouble(event: ComponentEvent) -> str | None:
    """What an event says to the user of something that broke and that a run may survive; None if nothing."""
    fields = event.fields
    if event.name == GIVEN_UP_EVENT:
        return (
            f"worker {fields['worker']} ({fields['name']}) is given up: {fields['num_executors']} of its executors "
            "ended one after another before they had served; the log of the last one says why"
        )
    if event.name not in TROUBLE_EVENTS:
        return None
    reason, log_tail = fields.get("reason", event.name), fields.get("log_tail", "")
    lines = [f"    | {line}" for line in str(log_tail).splitlines()[-LOG_LINES_SHOWN:]]
    return "\n".join([str(reason), *(["    last lines of its log:", *lines] if lines else [])])


def describe_news(event: ComponentEvent) -> str | None:
    """What an event says to the user of something that broke, or was mended; None if nothing."""
    fields = event.fields
    name, companion = fields.get("name"), fields.get("companion")
    place = f"{name} of {companion}" if companion else name
    if event.name == HOST_BACK_EVENT:
        return f"host {fields['host']} is served again by {place} after {fields['took_s']:.1f} s"
    if event.name == HOST_THERE_EVENT:
        return f"host {fields['host']}, of a slice that was absent, is served by {place}"
    if event.name == HOST_READY_EVENT and companion:
        return f"worker {fields['worker']} ({place}) has joined"
    if event.name == LEFT_EVENT:
        return f"worker {fields['worker']} ({place}) has left: {fields['cause']}"
    if event.name == TERMINATING_EVENT:
        return (
            "Slurm has sent the job's steps SIGTERM: it is cancelled, preempted or at its time limit; the program may "
            "save and end until Slurm kills it"
        )
    return describe_trouble(event)
