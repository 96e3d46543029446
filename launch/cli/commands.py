"""The commands there are: what each does, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["COMMANDS", "command_of"]

COMMANDS: Mapping[str, str] = {
    "run": "train as an algorithm, a model and a task say; or continue a run",
    "graph": "show the graph that an algorithm's step function makes",
    "plan": "say where each node should run, in which layout, and how long a step takes",
    "profile": "measure this machine, for plans and for runs that are planned",
}


def command_of(name: str) -> Callable[[list[str]], int]:
    """What runs the command on the words after it, and returns the exit code."""
    # Imported only now: each needs what the others do not.
    if name == "graph":
        from .graph import graph_command

        return graph_command
    if name == "plan":
        from .plan import plan_command

        return plan_command
    if name == "profile":
        from .profile import profile_command

        return profile_command
    from .run import run_command

    return run_command
