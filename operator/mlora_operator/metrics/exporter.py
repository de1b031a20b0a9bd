"""All that one operator process exports, put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlora_operator.metrics import families as f
from mlora_operator.metrics.measures import Measures
from mlora_operator.metrics.state import StateCollector
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Snapshot
from mlora_operator.settings import MetricsSettings


class Exporter:
    """``measures`` counts, ``watch`` is told of each pass, ``registry`` is what a scrape reads.

    ``leads``: this replica holds the Lease; ``watching``: what was there at the start has been seen.
    """

    def __init__(
        self,
        settings: MetricsSettings,
        *,
        leads: Callable[[], bool],
        watching: Callable[[], bool],
        now: Callable[[], datetime],
    ) -> None:
        # Of the whole process: one more series for each counter, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.measures = Measures(self.registry, settings.priorities)
        self._state = StateCollector(settings, now)
        self.registry.register(self._state)
        self.registry.register(_Replica(leads, watching))
        ProcessCollector(registry=self.registry)

    def watch(self, snapshot: Snapshot, decision: Decision) -> None:
        self._state.watch(snapshot, decision)
        self.measures.keep_only(frozenset(one.key for one in snapshot.pipelines))

    def end_of_term(self) -> None:
        """Another replica may lead: what this one saw last is no longer what is."""
        self._state.forget()
        self.measures.end_of_term()


class _Replica(Collector):
    def __init__(self, leads: Callable[[], bool], watching: Callable[[], bool]) -> None:
        self._leads, self._watching = leads, watching

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(f.BUILD_INFO.name, f.BUILD_INFO.help, labels=f.BUILD_INFO.labels)
        build.add_metric((_version(),), 1)
        yield build
        yield GaugeMetricFamily(f.LEADER.name, f.LEADER.help, value=float(self._leads()))
        yield GaugeMetricFamily(f.WATCHING.name, f.WATCHING.help, value=float(self._watching()))


def _version() -> str:
    try:
        return version("mlora-operator")
    except PackageNotFoundError:  # run from its sources
        return "unknown"
