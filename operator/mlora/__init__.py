"""mLoRA from Python: submit tasks, wait for them, look at their losses, fetch their adapters. docs/users/python.md.

    from mlora import Client

    client = Client(namespace="team-a")          # a cluster, by the kubeconfig or a pod's own account
    client.submit("support-bot", {...})          # the spec of a LoRATask
    client.wait("support-bot")
    client.fetch("support-bot", "./support-bot")

``Client`` is all that is needed. The types of a task are the API's own, and each error is one of ``mlora.errors``.

``client``          what a user calls
``cluster_backend`` behind it a cluster, by the modules of the ``mlora`` command
``local_backend``   behind it this machine, by what ``mlora run`` does
``backend``         what both offer
``arguments``       what a caller gives, checked
``background``      coroutines where an event loop may be running already, as in notebooks
``errors``          the tree of exceptions
``manifests``       specs of Python as manifests
``notebook``        bars below a notebook's cell

This is an edge, as the command line is: nothing imports it, and it computes nothing itself.
"""

from mlora.client import Client
from mlora.errors import (
    AdapterDamaged,
    AdapterMissing,
    InvalidInput,
    MloraError,
    NotReachable,
    TaskNotSuccessful,
    TaskRefused,
    TimedOut,
)
from mlora_operator.api.meta import Storage
from mlora_operator.api.task import LoRATaskSpec, Output, TaskStatus
from mlora_operator.cli.logs.story import StoryLine
from mlora_worker.protocol import DatasetSpec as Dataset
from mlora_worker.protocol import Evaluation, InitFrom, LoRASpec, TrainingSpec

__all__ = [
    "AdapterDamaged",
    "AdapterMissing",
    "Client",
    "Dataset",
    "Evaluation",
    "InitFrom",
    "InvalidInput",
    "LoRASpec",
    "LoRATaskSpec",
    "MloraError",
    "NotReachable",
    "Output",
    "Storage",
    "StoryLine",
    "TaskNotSuccessful",
    "TaskRefused",
    "TaskStatus",
    "TimedOut",
    "TrainingSpec",
]
