"""The operator without a cluster: files for the API server, local processes for the pods.

In the order in which a run goes through them:

``documents``  YAML as kubectl reads it, with line numbers
``manifests``  the user's files as tasks, pipelines and Secrets, or as a list of problems
``machine``    what this machine has to share out
``adapt``      pure: the manifests and the user's options as the world of one run
``objects``    files for the API server
``ranks``      local processes for the pods
``cluster``    both behind the ports of the reconcile loop
``ending``     pure: when a run is over, and how
``place``      where a run works, ``audience`` who is told how it goes
``run``        one run, from its world to its end

Nothing of the operator is implemented twice here: the loop, its decisions, the memory model and the HTTP client
are the ones that run in a cluster.
"""
