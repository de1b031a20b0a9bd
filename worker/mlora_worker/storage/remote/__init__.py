"""Where rows and models are read from besides stores.

``dataset_source`` the files that the addresses of a data set name
``http``           web servers
``hub``            model and data hubs
``globs``          pure: addresses with ``*``, splits of a data set
``line_splitter``  pure: lines of a large object that is read piece by piece

May import ``object_store``.
"""
