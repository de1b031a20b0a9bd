"""Tokenised rows.

``token_rows``    in memory, or mapped from files (``row_files``)
``row_cache``     kept on disk by content
``step_order``    pure: which rows belong to which step
``pairs``         pure: what an objective takes of a row that is a pair
``reference_files`` on disk: what the frozen base thinks of pairs
``row_weights``   pure: what a row counts for in its step
``learning_rate`` pure: the learning rate of a step
"""
