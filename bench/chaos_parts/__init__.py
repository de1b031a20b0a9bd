"""The world of ``python -m bench chaos``. In the order of what depends on what:

``nursery``   one process that has imported everything once; ranks, operators and helpers are forked from it
``api``       the API server's part: objects with versions, and their watch
``kubelet``   the kubelet's part: pods whose processes are started again, each by itself
``control``   both over a local socket; ``operator`` is its other end, with the real reconcile loop
``weather``   a proxy in front of the object store that refuses, delays and breaks requests
``reader``    a stranger who reads the bucket all the time, and believes manifests
``work``      the tasks
``story``     which faults come, and at which moments
``judge``     what a fault cost, and what must never be seen
``world``     what a world is for those that play in it and judge it
``local``     the one on this machine, with all of the above
``node``      the one in a real cluster: the chart, its pods, their kubelet; ``watched`` has its tasks, ``pods`` and
              ``containers`` its processes
``player``    plays a story in a world
"""
