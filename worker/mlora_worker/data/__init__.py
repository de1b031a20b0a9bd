"""From rows that users wrote to tokens to train on.

``prepare``       all of it for one task, with the length policy and the counts that users see
``task_rows``     what one task trains on and is evaluated on
``row_access``    from where a worker may read rows, and where it keeps what it has tokenised
``errors``        data that cannot be trained on

``reading``       files become rows
``tokenizing``    rows become tokens, and it is proven which of them are learnt
``training_rows`` tokenised rows: kept, chosen, ordered, weighted

May import ``storage``, ``stream`` and ``protocol``; knows nothing of devices or other tasks.
"""
