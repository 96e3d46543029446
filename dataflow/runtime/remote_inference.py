"""Inference with weights where they are served, instead of where they are read.

A call that is given a role calls methods of its contract that no step may call; they take arrays
and return a named tuple of arrays. Usually the group that makes the call holds a copy of the role.
It need not: another group can serve it, and the call is given a stand-in, which makes an inference
request of each method call. Either way one version of the weights is read. A request says which,
and is refused by a process that holds another; the scheduler keeps the version until the call ends.

This module knows nothing of how a request travels: see `SendRequest`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from numpy.typing import NDArray

from ..errors import PlanError, WorkerError, no_exit
from ..graph.role import Role, Worker, call_spec

Array = NDArray[Any]
"""Numbers or truth values, of any shape."""


@dataclass(frozen=True)
class InferenceRequest:
    role: str  # The role that is asked
    method: str  # A method of the role's contract
    version: int  # Version of the weights that must answer
    # Arguments by position; None where the caller has nothing to say.
    arguments: tuple[Array | None, ...]


SendRequest = Callable[[InferenceRequest, type[Any]], Any]
"""Takes a request to the server of the role and returns the answer, an object of the given class.

Called from several threads at once. Raises a `WorkerError` if there is no answer.
"""


class ServedWeights:
    """The roles that a process serves, and the version of their weights that it holds.

    Versions are told from the thread that changes weights; requests come from others.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._workers: dict[str, Role] = {}
        self._methods: dict[str, Mapping[str, type[Any]]] = {}
        self._versions: dict[str, int | None] = {}
        self._lock = threading.Lock()

    def add(self, role: str, contract: type[Role], worker: Role) -> None:
        """Serve a role, as soon as it is known which version it holds."""
        self._methods[role] = remote_methods(role, contract)
        self._workers[role] = worker

    def set_version(self, role: str, version: int | None) -> None:
        if role in self._workers:
            with self._lock:
                self._versions[role] = version

    @contextmanager
    def changing(self, role: str, version: int) -> Generator[None]:
        self.set_version(role, None)
        yield
        self.set_version(role, version)

    def answer_all(self, requests: Sequence[InferenceRequest]) -> list[Any]:
        """Answer requests, in order; those that can be are answered together."""
        alike: dict[tuple[str, str, int], list[int]] = {}
        for index, one in enumerate(requests):
            alike.setdefault((one.role, one.method, one.version), []).append(index)
        answers: list[Any] = [None] * len(requests)
        for indices in alike.values():
            for index, answer in zip(
                indices, self._answer([requests[i] for i in indices]), strict=True
            ):
                answers[index] = answer
        return answers

    def answer(self, request: InferenceRequest, returns: type[Any]) -> Any:
        """A `SendRequest` within one process."""
        (found,) = self._answer([request])
        if isinstance(found, Exception):
            raise found
        return found

    def _answer(self, requests: Sequence[InferenceRequest]) -> Sequence[Any]:
        one = requests[0]
        try:
            worker = self._check(one)
            with torch.no_grad(), no_exit():
                answers = _answer_together(worker, requests)
            self._check(one)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is passed on
            return [error] * len(requests)
        return answers

    def _check(self, request: InferenceRequest) -> Role:
        with self._lock:
            worker, holds = self._workers.get(request.role), self._versions.get(request.role)
        if worker is None:
            served = ", ".join(self._workers) or "nothing"
            raise WorkerError(f"{self._where} does not serve '{request.role}'; it serves {served}")
        known = self._methods[request.role]
        if request.method not in known:
            raise WorkerError(f"'{request.role}' serves {', '.join(known)}, not '{request.method}'")
        if holds != request.version:
            has = "weights that are being changed" if holds is None else f"version {holds}"
            raise WorkerError(
                f"'{request.role}.{request.method}' was called for version {request.version} of "
                f"the weights, but {self._where} holds {has}; this is a fault of the engine, "
                "please report it"
            )
        return worker


def _answer_together(worker: Role, requests: Sequence[InferenceRequest]) -> Sequence[Any]:
    # Answer requests together; if that fails each by itself, so that faults harm no other.
    one = requests[0]
    try:
        answers = worker.answer_all(one.method, [each.arguments for each in requests])
    except Exception as error:  # noqa: BLE001 - user code may raise anything; it is passed on
        if len(requests) == 1:
            return [error]
        return [_answer_together(worker, [each])[0] for each in requests]
    if answers is None:
        return [_answer_one(worker, each) for each in requests]
    if len(answers) != len(requests):
        raise WorkerError(
            f"'{one.role}' gave {len(answers)} answers to {len(requests)} requests for "
            f"'{one.method}'; {type(worker).__name__}.answer_all must return one for each, in order"
        )
    return answers


def _answer_one(worker: Role, request: InferenceRequest) -> Any:
    try:
        return getattr(worker, request.method)(*request.arguments)
    except Exception as error:  # noqa: BLE001 - user code may raise anything; it is passed on
        return error


class ServedRole:
    def __init__(self, role: str, contract: type[Role], send: SendRequest) -> None:
        methods = {
            name: _requesting(name, inspect.signature(getattr(contract, name)), returns)
            for name, returns in remote_methods(role, contract).items()
        }
        self._stand_in: Any = type(f"Served{contract.__name__}", (_StandIn, contract), methods)
        self._role, self._send = role, send

    def at(self, version: int) -> Role:
        return self._stand_in(self._role, version, self._send)


class _StandIn:
    def __init__(self, role: str, version: int, send: SendRequest) -> None:
        self._served, self._version, self._send = role, version, send


def _requesting(name: str, signature: inspect.Signature, returns: type[Any]) -> Callable[..., Any]:
    def request(self: Any, *args: Array | None, **kwargs: Array | None) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = tuple(bound.arguments.values())[1:]
        return self._send(InferenceRequest(self._served, name, self._version, arguments), returns)

    return request


def remote_methods(role: str, contract: type[Role]) -> Mapping[str, type[Any]]:
    """Methods of a contract that other groups can call -> the NamedTuples that they return.

    Raises:
        PlanError: If there is none, or one returns something else.
    """
    found: dict[str, type[Any]] = {}
    for name, method in inspect.getmembers(contract, inspect.isfunction):
        if name.startswith("_") or hasattr(Worker, name) or call_spec(method) is not None:
            continue
        returns = get_type_hints(method).get("return")
        if not (isinstance(returns, type) and issubclass(returns, tuple)):
            raise PlanError(
                f"role '{role}' cannot be served: '{contract.__name__}.{name}' returns "
                f"{returns!r}, and a method of a served role returns a NamedTuple of arrays"
            )
        found[name] = returns
    if not found:
        raise PlanError(
            f"role '{role}' cannot be served: its contract {contract.__name__} has no method "
            "beside those that steps call, so a worker that is given it has nothing to call"
        )
    return found
