"""The nouns of a decision: what it is made from, and what it says. Pure.

``snapshot``        all that is known at one moment
``decision``        all that shall be done
``cause``           a reason, and a message
``acceptance``      whether a task is served, and where
``plan_refusal``    what workers say of a plan that they do not understand
``references``      Secrets and ConfigMaps that tasks and pipelines name
``isolation``       an object about which no decision can be made, beside all others
``decode``          objects of the API server become tasks and pipelines
``pods``            the pods of a pipeline become one group of workers
``serving``         whose tasks a pipeline takes
``store_requests``  what is requested of a store for an address
``output_folders``  where addresses lead, and which lie in each other
``endpoint_policy`` addresses that workers may not be sent to
``log_fields``      what a log record says of an object

May import ``api``, ``manifests`` and ``settings``; knows no other room of ``reconcile``.
"""
