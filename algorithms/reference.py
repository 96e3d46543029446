"""A KL to a reference, and a reference that follows the policy, for any step that trains one.

`with_reference` makes another step of a step: the policy that it trains adds the KL to its loss, as
in `reference_grpo`, and the reference moves before the step's own lines, as TRL's `sync_ref_model`
has it. No algorithm has a line for either.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..dataflow.errors import FlowError
from ..dataflow.graph.check import hints_of
from ..dataflow.options import NonNegativeFloat, PositiveFraction, PositiveInt, option_class
from .losses.tokens import KLGradient, RegularizedLoss, TokenPolicyLoss
from .ops.kl import KLEstimator
from .ops.rollout_correction import CorrectedPolicyBatch, CorrectedReferencePolicyBatch
from .roles import Policy, PolicyBatch, ReferencePolicyBatch

_REF = "ref"


@option_class
class ReferenceOptions:
    """Options of a reference, besides those that a step has for its own."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the role `ref` in the loss of the policy; with 0 there is no such term.
    For algorithms that have none of their own."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of that KL."""
    kl_gradient: KLGradient = "as_is"
    """Gradient of that estimate."""
    sync_every: PositiveInt | None = None
    """Steps between two moves of the reference to the policy; null leaves it for all of a stage."""
    sync_share: PositiveFraction = 1.0
    """Share of the way that it moves: 1 copies the policy, 0.6 keeps 0.4 of what it was."""

    def __post_init__(self) -> None:
        if self.kl_coef:
            self.loss(TokenPolicyLoss())  # refuses what does not make one

    def loss(self, policy: TokenPolicyLoss) -> RegularizedLoss:
        """The policy's loss with the KL term added."""
        return RegularizedLoss(
            policy=policy,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            kl_gradient=self.kl_gradient,
        )


class RegularizedPolicy:
    """A policy whose train call adds a KL to the loss; in all else the policy itself."""

    def __init__(self, policy: Policy, ref: Policy, options: ReferenceOptions) -> None:
        self._policy, self._ref, self._options = policy, ref, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def train(self, loss: Any, batch: Any, *, temperature: float = 1.0, **given: Any) -> Any:
        """As `Policy.train`."""
        kinds = {
            PolicyBatch: ReferencePolicyBatch,
            CorrectedPolicyBatch: CorrectedReferencePolicyBatch,
        }
        if not isinstance(loss, TokenPolicyLoss) or type(batch) not in kinds:
            has = isinstance(loss, RegularizedLoss)
            raise FlowError(
                f"'algorithm.reference.kl_coef' is {self._options.kl_coef}, but the loss "
                f"{type(loss).__name__} {'has a KL of its own' if has else 'takes no KL term'}",
                fix="set that of the algorithm (algorithm.cfg), and leave this one out"
                if has
                else "leave it out, or take an algorithm whose loss is of tokens, such as grpo",
            )
        ref_logprob = self._ref.logprob(batch.tokens, batch.mask, temperature=temperature)
        batch = kinds[type(batch)](**vars(batch), ref_logprob=ref_logprob)
        return self._policy.train(self._options.loss(loss), batch, temperature=temperature, **given)


def with_reference(step: Callable[..., Any], options: ReferenceOptions) -> Callable[..., Any]:
    """Return the step with a role `ref` that does what the options say, or the step itself.

    Raises:
        FlowError: If the step has no reference that could move, or several policies to move to.
    """
    if not options.kl_coef and options.sync_every is None:
        return step
    hints, signature = hints_of(step), inspect.signature(step)
    own = signature.parameters
    policies = [name for name in own if hints.get(name) is Policy and name != _REF]
    leader = "actor" if "actor" in policies else "".join(policies)
    if leader not in policies or not (options.kl_coef or _REF in own):
        raise FlowError(
            f"'algorithm.reference' is set, but '{step.__name__}' "
            + (f"has the policies {policies}" if options.kl_coef else "has no role 'ref'"),
            fix="it is for a step with one policy, or one that is called 'actor'; sync_every needs "
            "a reference, which kl_coef adds",
        )

    @functools.wraps(step)
    def stepped(*, ref: Policy, **given: Any) -> Any:
        moved: tuple[Any, ...] = ()
        if options.sync_every is not None:
            moved = (ref.follow(given[leader], share=options.sync_share, every=options.sync_every),)
        if _REF in own:
            given[_REF] = ref
        if options.kl_coef:
            for name in policies:
                given[name] = RegularizedPolicy(given[name], ref, options)
        result = step(**given)
        return (*(result if isinstance(result, tuple) else (result,)), *moved) if moved else result

    role = inspect.Parameter(_REF, inspect.Parameter.KEYWORD_ONLY, annotation=Policy)
    keyword = [one.replace(kind=role.kind) for name, one in own.items() if name != _REF]
    changed: Any = stepped
    changed.__annotations__ = {**hints, _REF: Policy}
    changed.__signature__ = signature.replace(parameters=[*keyword, role])
    return changed
