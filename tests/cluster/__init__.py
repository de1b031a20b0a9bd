"""A Kubernetes cluster of one node, made of the real programs, on the machine that runs the tests.

The node is one process (``node.py``) in process, mount and network namespaces of its own, with every program
of the cluster below it. That is what makes it easy to take away again: when that process ends, the kernel ends
all that runs below it and drops its mounts, bridge, addresses and packet filter rules. So a run that was killed
at any point leaves nothing that the next one has to hunt for.

Only the standard library is imported here, because the slow artefacts are built while the Python environment is
still being installed. A reader starts at ``lifecycle.py`` (up and down), then ``node.py`` and ``programs.py``.

``python3 -m tests.cluster --help`` lists the commands; the Makefile has a target for each.
"""
