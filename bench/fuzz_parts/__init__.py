"""Parts of the benchmark of hostile objects: ``texts`` and ``fields`` make them, ``judge`` reads what they caused."""
