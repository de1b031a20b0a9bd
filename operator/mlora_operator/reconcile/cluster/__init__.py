"""The API server, as the loop uses it.

``store``            what was watched
``api_server``       the port of the loop: reads objects, writes what was decided
``rest_client``      requests, and what their errors mean
``cached_reads``     Secrets, namespaces and ConfigMaps: read again and again, not at every wake; ``read_cache``: how
``config_map_texts`` texts of ConfigMaps, by digest
``writer``           a decision becomes writes; ``write_queue``: never two at once about one object
``assumed``          what is being written counts as written
``throttle``         how often a status may change; ``plan_throttle``: when a plan may be sent

May import ``state`` and the root's ``ports``.
"""
