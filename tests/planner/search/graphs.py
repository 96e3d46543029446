"""Random steps for tests of the planner."""

from __future__ import annotations

from hypothesis import strategies as st
from penstock.planner.search.options import CallNode


@st.composite
def steps(
    draw: st.DrawFn, max_calls: int = 7, max_roles: int = 3, min_calls: int = 1
) -> tuple[CallNode, ...]:
    """Calls of a step in program order; what reads trained weights is a call group of its own."""
    roles = [f"r{i}" for i in range(draw(st.integers(min(min_calls, max_roles), max_roles)))]
    trained = {role for role in roles if draw(st.booleans())}
    calls: list[CallNode] = []
    for i in range(draw(st.integers(min_calls, max_calls))):
        role = draw(st.sampled_from(roles))
        kind = draw(st.sampled_from(["rollout", "forward", "train"]))
        outputs = [call.name for call in calls if not call.trains]
        after = (
            tuple(draw(st.lists(st.sampled_from(outputs), max_size=3, unique=True)))
            if outputs and draw(st.booleans())
            else tuple(outputs[:1])
        )
        train = kind == "train" and role in trained
        own = f"c{i}" if draw(st.booleans()) else f"{role}.generate"
        calls.append(
            CallNode(
                name=f"c{i}",
                call_group=own if role in trained and not train else role,
                after=after,
                role=role,
                reads_older=kind == "rollout",
                trains=train,
            )
        )
    return tuple(calls)


def units_of(calls: tuple[CallNode, ...]) -> list[str]:
    """Call groups in program order."""
    return list(dict.fromkeys(call.call_group for call in calls))


def groups_of(calls: tuple[CallNode, ...], data: st.DataObject) -> dict[str, int]:
    """Call group -> one of three groups."""
    return {name: data.draw(st.integers(0, 2), name) for name in units_of(calls)}


PPO = (
    CallNode("actor.generate", "actor.generate", (), "actor", reads_older=True),
    CallNode("reward.score", "reward", ("actor.generate",), "reward"),
    CallNode("critic.value", "critic.value", ("actor.generate",), "critic"),
    CallNode("ref.logprob", "ref", ("actor.generate",), "ref"),
    CallNode("actor.train", "actor",
        ("actor.generate", "reward.score", "critic.value", "ref.logprob"), "actor", trains=True),
    CallNode("critic.train", "critic",
        ("actor.generate", "reward.score", "critic.value", "ref.logprob"), "critic", trains=True),
)  # fmt: skip
"""Proximal policy optimization, as `calls_of` reports it."""
