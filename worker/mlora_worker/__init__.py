"""Data plane of the mLoRA operator: trains many LoRA adapters on one frozen base model.

What lives here, from the edge to the core (imports point downwards only, ``.importlinter`` contracts in
``pyproject.toml`` enforce it):

``__main__``      one rank of a pipeline: reads its configuration and runs until it is told to stop
``coordinator``   the part of rank 0 that talks to the operator, has rows prepared and issues work
``pipeline``      one stage: transport, links between ranks, the loop that runs items of the stream
``preparing``     makes rows of tasks, away from what trains
``lora``          the low-rank function, adapters, dropout masks, per-task optimizer
``model``         reads a stage's own layers, packed attention, loss
``data``          rows to token sequences with supervised positions
``storage``       S3 and files, the adapter's manifest
``stream``        pure: items of work, the rule that issues them, grouping of tasks
``protocol``      pure: what the operator and the coordinator say to each other

The operator may import ``protocol`` and ``stream`` only. Nothing here knows of Kubernetes.
"""

import os

# Kernels that torch and oneDNN each keep, one for each product and number of rows; both read this when torch is imported.
# Their own limit is 1,024, of half a MiB each: microbatches of many widths would take as much memory as no budget knows.
# Making one takes 1.5 ms. Where rows of all tasks share a product a microbatch needs some ten; where each task's are
# multiplied by themselves, as in torch's bfloat16 products, four tasks need more than 64.
for _cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "256")
