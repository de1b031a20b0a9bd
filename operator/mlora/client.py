"""What a user calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlora import arguments
from mlora.backend import Backend
from mlora.cluster_backend import ClusterBackend
from mlora.errors import InvalidInput, MloraError, as_own_errors
from mlora.local_backend import LocalBackend
from mlora.manifests import secret_text, task_text
from mlora.notebook import NotebookBars, notebook
from mlora_operator.api.problem import describe
from mlora_operator.api.task import LoRATaskSpec, TaskStatus
from mlora_operator.cli.fetch.command import manifest_of
from mlora_operator.cli.kube.choice import ClusterChoice
from mlora_operator.cli.logs.story import StoryLine
from mlora_operator.cli.output import stderr
from mlora_operator.cli.run.command import models_of
from mlora_operator.cli.run.progress import Bars
from mlora_operator.cli.validate.command import read_texts
from mlora_operator.download import AdapterSource, Manifest, download, open_source
from mlora_operator.local.adapt import Device, Dtype, RunOptions
from mlora_operator.reporting.published import history_rows
from mlora_worker.protocol import QuantizationType

Duration = float | str  # seconds, or 90s, 15m, 1h30m
Rows = list[dict[str, Any]]
Names = list[str]
Lines = list[StoryLine]


class Client:
    """Tasks of one namespace of a cluster, or of this machine (``Client.local``).

    Every method raises MloraError (``mlora.errors``), also for arguments that make no sense. All of them may be called
    where an event loop runs, as in notebooks.
    """

    def __init__(
        self,
        namespace: str | None = None,
        *,
        context: str | None = None,
        kubeconfig: str | PathLike[str] | None = None,
        endpoint: str | None = None,
    ) -> None:
        """A cluster: by ``kubeconfig``, $KUBECONFIG or ~/.kube/config, or, in a pod, by its own account.

        Nothing is asked of it yet. ``endpoint``: the store's address, where the tasks' own cannot be reached from here.
        """
        file = str(kubeconfig) if kubeconfig is not None else None
        self._backend: Backend = ClusterBackend(ClusterChoice(namespace, context, file), endpoint)

    @classmethod
    def local(
        cls,
        models: Mapping[str, str | PathLike[str]] | None = None,
        *,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        state: str | PathLike[str] | None = None,
        stages: int | None = None,
        dtype: Dtype | None = None,
        quantization: QuantizationType | None = None,
        device: Device = "auto",
        threads: int | None = None,
        s3_endpoint: str | None = None,
        restarts: int | None = None,
        overwrite: bool = False,
    ) -> Client:
        """This machine, as ``mlora run`` uses it; the parameters are its options.

        ``models``: folder or address of each base model, by name. ``secrets``: values of each Secret that tasks name.
        ``state``: folder for statuses and logs; tasks that succeeded there are not trained again.
        """
        with as_own_errors():
            arguments.check_machine(stages, threads, dtype, quantization, device, restarts)
            given_models = arguments.mapping("models", models)
            for name, place in given_models.items():
                arguments.path(f"models[{name!r}]", place)
            places = models_of([f"{name}={place}" for name, place in given_models.items()])
            options = RunOptions(
                places,
                stages=stages,
                dtype=dtype,
                threads=threads,
                device=device,
                s3_endpoint=s3_endpoint,
                restarts=restarts,
                overwrite=overwrite,
                quantization=quantization,
            )
            given = [
                secret_text(name, arguments.texts(f"secrets[{name!r}]", values))
                for name, values in arguments.mapping("secrets", secrets).items()
            ]
            folder = arguments.path("state", state) if state is not None else None
            client = cls.__new__(cls)
            client._backend = LocalBackend(options, folder, given)
        return client

    def submit(
        self,
        name: str,
        spec: LoRATaskSpec | Mapping[str, Any],
        *,
        labels: Mapping[str, str] | None = None,
        replace: bool = False,
    ) -> str:
        """Check a task and bring it where it trains. Returns its name.

        ``spec``: a LoRATaskSpec, or the same as plain data, with the names of the manifest. A task of the same name and
        spec is left as it is; ``replace`` deletes one that has another spec, or has failed. On this machine, training
        begins with ``wait``.
        """
        with as_own_errors():
            arguments.check_labels(labels)
            return self._backend.submit([task_text(name, spec, labels)], replace=replace)[0]

    def submit_files(self, *files: str | PathLike[str], replace: bool = False) -> Names:
        """All that stands in manifest files: tasks, and the Secrets, ConfigMaps and pipelines beside them."""
        with as_own_errors():
            return self._backend.submit(read_texts([str(file) for file in files]), replace=replace)

    def wait(
        self, *names: str, timeout: Duration | None = None, progress: bool | None = None
    ) -> dict[str, TaskStatus]:
        """Until all have succeeded; their statuses by name. ``progress``: by itself, bars in a notebook and on a terminal,
        nothing elsewhere; with True, elsewhere a line for each new state, on standard error.

        Raises TaskNotSuccessful when one failed, TimedOut, TaskRefused. On this machine it trains all tasks that were
        submitted and have not ended, together.
        """
        if not names:
            raise InvalidInput("wait() needs the name of a task")
        arguments.check_names(*names)
        limit = arguments.duration(timeout)
        view = _view(progress)
        with as_own_errors(), view or nullcontext():
            self._backend.wait(names, limit, view.task_changed if view is not None else lambda _: None)
        return {name: self.status(name) for name in names}

    def status(self, name: str) -> TaskStatus:
        arguments.check_names(name)
        with as_own_errors():
            return _status_of(self._backend.task(name))

    def list(self, labels: str | None = None) -> dict[str, TaskStatus]:
        """All tasks by name, or those with ``labels``, a selector as in kubectl."""
        arguments.check_selector(labels)
        with as_own_errors():
            return {one["metadata"]["name"]: _status_of(one) for one in self._backend.tasks(labels)}

    def logs(self, name: str) -> Lines:
        """What happened to a task: conditions, events, progress, oldest first. ``print(*client.logs(name), sep="\\n")``."""
        arguments.check_names(name)
        with as_own_errors():
            return self._backend.story(name)

    def losses(self, name: str) -> Rows:
        """Of a finished task: what its ``history.jsonl`` says, a row for each step and for each evaluation."""
        arguments.check_names(name)
        with as_own_errors():
            return history_rows(*self._published(name))

    def loss_frame(self, name: str) -> Any:
        """The same as a pandas.DataFrame. Raises InvalidInput where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise InvalidInput("pandas is not installed: pip install pandas, or use losses()") from None
        return pandas.DataFrame(self.losses(name))

    def fetch(self, name: str, folder: str | PathLike[str] | None = None) -> Path:
        """Download a finished adapter and verify it; by default into a folder of the task's name. Returns the folder."""
        arguments.check_names(name)
        target = arguments.path("folder", folder if folder is not None else name)
        with as_own_errors():
            download(*self._published(name), target, time.sleep)
        return target

    def delete(self, *names: str) -> None:
        """Delete tasks. What they have written to the store stays."""
        arguments.check_names(*names)
        with as_own_errors():
            self._backend.delete(names)

    def _published(self, name: str) -> tuple[AdapterSource, Manifest]:
        """Where a finished task's adapter is, and its manifest. Raises CommandError, DownloadError."""
        uri, access, uid = self._backend.adapter(name)
        source = open_source(uri, access)
        return source, manifest_of(source, uri, uid, wait=False, left=None)


def _view(progress: bool | None) -> Bars | NotebookBars | None:
    """Where somebody looks, or where it was asked for."""
    if progress is False:
        return None
    if (show := notebook()) is not None:
        return NotebookBars(show)
    return Bars() if progress or stderr().is_terminal else None


def _status_of(task: Mapping[str, Any]) -> TaskStatus:
    try:
        return TaskStatus.model_validate(task.get("status") or {})
    except ValidationError as error:
        name = task["metadata"]["name"]
        raise MloraError(f"the status of loratask/{name} cannot be read: {describe(error)}") from error
