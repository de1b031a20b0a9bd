"""Bytes that outlive a worker: S3 and files, the base model's files, checkpoints, the finished adapter.

``errors``         what can go wrong, with the reason that a user sees
``uri``            pure: the two kinds of address
``limits``         pure: bounds on what stores and servers say; ``wire``: how slowly they may say it
``busy``           pure: how long a busy server asks to be left alone
``first_bytes``    pure: what lies in the place of another file
``versioned_json`` JSON documents with a version
``egress_policy``  addresses that a task may not send a worker to

``object_store``   a store: S3 or a folder
``remote``         where rows and models are read from besides: web servers, hubs
``base_model``     the base model's files and tensors
``artifacts``      what tasks make: checkpoints and adapters

May import ``mlora_worker.protocol``; knows nothing of rows, stages or the coordinator.
"""
