"""What the operator tells Prometheus: counts of what it did, and gauges of what it last saw.

``families`` names everything that is exported; ``measures`` counts what happens; ``state`` reads the last pass when
somebody asks; ``server`` answers ``/metrics``. Nothing here decides or writes, and the reconcile loop knows of it only as a
``Observer``.
"""
