"""Stages of a recovery, as the controller's instructions show them."""

from pathways_runtime.core.controller import instructions as ins

_ALWAYS: dict[type[ins.Instruction], str] = {
    ins.ReplacePeer: "a worker joins",
    ins.LeaveWorld: "a world ends",
    ins.StartCoordination: "a service starts",
    ins.FormMember: "a world forms",
    ins.OpenSession: "a session opens",
    ins.CompileMember: "a program loads",
    ins.StopCoordination: "a service stops",
}


def stage_of(instruction: ins.Instruction) -> str | None:
    """The stage of recovery that an instruction begins."""
    if isinstance(instruction, ins.ChangeHost):
        return "a host is lost" if instruction.worker is None else "a host is back"
    if isinstance(instruction, ins.StartExecutor):
        return "an executor is started anew" if instruction.epoch > 1 else None
    return _ALWAYS.get(type(instruction))
