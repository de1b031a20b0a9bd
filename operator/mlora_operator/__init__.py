"""Control plane of the mLoRA operator: queues LoRATasks, fits them into memory, reconciles pipelines.

What lives here, from the edge to the core (imports point downwards only):

``handlers``      kopf: indexes and events that wake the reconcile loop; the process's entry point
``leader``        of several replicas one acts: the rules of the Lease; ``lease`` is that object in the API server
``local``         the same operator with files for the API server and local processes for the pods
``cli``           the ``mlora`` command, one file a command
``download``      a finished adapter into a folder; boto3 and the standard library alone
``reconcile``     observe (edge), decide (pure), act (edge)
``coordinator``   HTTP client of the pipelines' coordinators
``manifests``     pure: Service, Secret, StatefulSet, NetworkPolicy of a pipeline
``scheduling``    pure: order, admission
``memory``        pure: what a set of tasks needs on every stage
``api``           pure: the two resources, their conditions, their CRDs

Of the worker's house only ``mlora_worker.protocol`` and the pure ``mlora_worker.stream`` are imported.
"""
