"""From rows that users wrote to tokens to train on.

``prepare``       all of it for one task, with the length policy and the counts that users see
``task_rows``     what one task trains on and is evaluated on; ``reading``: from where a worker may read
``dataset_files`` the files of a data set, and the rows of each
``files``         which kind a file is; ``records`` (JSON Lines, JSON arrays, CSV), ``parquet``, ``compression``
``rows``          pure: the nouns between a file and its tokens
``formats``       pure: rows to chats and texts; rows without an answer are dropped and counted
``tokenizer``     loads the base model's tokenizer
``template``      chats to tokens; which positions are supervised is proven by rendering, not guessed
``conversations`` chats, rendered: ``proof`` (which characters are answers), ``closing`` (where a turn ends)
``cuts``          which tokens these are; ``tokens``, ``prefix``: their places, and a shorter way to them
``special_text``  special tokens in a user's own text are text
``rendering``     the chat template, applied
``own_template``  a task's own chat template, in a process of its own (``template_process``), in a ``sandbox``
``tokenising``    many rows at a time, while the next ones are read
``token_rows``    tokenised rows, in memory or mapped from files (``row_files``); ``cache``: kept on disk by content
``tally``         what became of the rows
``selection``     pure: which usable rows are trained on, and which held out
``order``         pure: which rows belong to which step
``schedule``      pure: the learning rate of a step

May import ``storage``, ``stream`` and ``protocol``; knows nothing of devices or other tasks.
"""
