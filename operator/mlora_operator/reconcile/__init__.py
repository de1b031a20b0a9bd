"""From what is to what shall be: observe, decide, act.

``snapshot`` and ``decision`` hold the nouns, ``decide`` is the pure function between them, ``ports`` says
what the edge must offer: the API server (``apiserver``), or files and processes (``mlora_operator.local``).
``loop`` drives the three.

Of a decision, ``places`` says who trains, ``starts`` whose workers may start, ``health`` how they fare, ``pipelines`` how
many there shall be, ``plans`` what the coordinator is told, ``tasks`` (with ``hindrances``, ``figures``) what users read.

Only ``act``, ``loop`` and ``apiserver`` do I/O. May import: api, settings, scheduling, memory, manifests.
"""
