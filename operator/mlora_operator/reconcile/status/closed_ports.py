"""Stores that a task's workers cannot reach, where the network policy is the likely cause: its setting is named. Pure."""

from __future__ import annotations

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.manifests.networkpolicy import is_open, port_of
from mlora_operator.reconcile.state.snapshot import Task
from mlora_operator.settings import NetworkPolicySettings
from mlora_worker.protocol import Failure, FailureReason, TaskReport


def explained(
    task: Task, reported: TaskReport | None, serves: LoRAPipelineSpec, policy: NetworkPolicySettings
) -> TaskReport | None:
    """``reported``, with the ports that are closed to it named in why its store is unreachable; else the very object."""
    if reported is None or task.spec is None:
        return reported
    if not any(_is_unreachable(one) for one in (reported.failure, reported.blocked)):
        return reported
    closed = sorted(port for port in _ports(task.spec) if not is_open(port, serves, policy))
    if not closed:
        return reported
    ports = " and ".join(str(port) for port in closed)
    words = (
        f"; the network policy of the workers does not open port {ports}: ask your platform team to add it "
        "to networkPolicy.workerPorts in the values of the operator's chart"
    )
    return reported.model_copy(
        update={name: _with(getattr(reported, name), words) for name in ("failure", "blocked")}
    )


def _ports(spec: LoRATaskSpec) -> set[int]:
    """That the task's own addresses lead to. Of a Service the network judges the port behind it, which cannot be seen."""
    addresses = [spec.storage.endpoint, *spec.dataset.addresses]
    if spec.evaluation is not None and spec.evaluation.uri is not None:
        addresses.append(spec.evaluation.uri)
    found = (port_of(one) for one in addresses if one is not None and one.startswith(("http://", "https://")))
    return {port for port in found if port is not None}


def _is_unreachable(failure: Failure | None) -> bool:
    return failure is not None and failure.reason is FailureReason.STORAGE_UNREACHABLE


def _with(failure: Failure | None, words: str) -> Failure | None:
    if failure is None or not _is_unreachable(failure):
        return failure
    return failure.model_copy(update={"message": failure.message + words})
