"""Bytes that outlive a worker: S3 and files, the base model's files, the finished adapter.

``errors``             what can go wrong, with the reason that a user sees
``uri``                pure: the two kinds of address
``store``              the interface of a store, and how one is opened
``s3``, ``files``      its two kinds
``sources``            where rows are read from: a store, the ``web``, a ``hub``; ``destinations``: what is refused
``patterns``           pure: addresses with ``*``, splits of a data set
``probe``              can the output be written? asked before training
``adapter``            PEFT's layout: configuration, checks, publishing with the manifest last
``checkpoint``         a task's state between two runs: adapter and moments with the manifest last, pruned
``kept``               what a task has done, on rank 0's own volume until its store has it
``space``              is there room on a volume?
``scratch``            files on their way to a store
``model_card``         pure: the README.md beside the weights
``safetensors_reader`` tensors of a model by name, each read on its own
``model_source``       the base model: its small files in a local folder, its tensors by name

May import ``mlora_worker.protocol``; knows nothing of rows, stages or the coordinator.
"""
