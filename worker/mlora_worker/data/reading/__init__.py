"""Files become rows.

``dataset_files`` the files of a data set, and the rows of each
``detection``     the format of a data set whose task names none
``file_formats``  which kind of file a name says it is
``records``       JSON Lines, JSON arrays, CSV; ``parquet``; ``compression``
``row_formats``   pure: which columns are prompt, answer, conversation
``row_types``     pure: the nouns between a file and its tokens
``row_bounds``    pure: how much a row may be made of
``columns``       which columns rows have, to name those that no row has
``selection``     pure: which usable rows are trained on, and which held out
``tally``         what became of the rows
"""
