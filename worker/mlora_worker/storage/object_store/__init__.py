"""A store: S3 or a folder.

``store``       the interface, and how one is opened
``s3``          S3; ``s3_client``, ``s3_answers``, ``s3_errors``, ``multipart``: its parts
``checked_connection`` connects to the very address that was judged
``file_store``  a folder
``scratch``     files on their way to a store
``disk_space``  is there space on a volume?

May import the root of ``storage``.
"""
