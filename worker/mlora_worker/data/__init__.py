"""From rows that users wrote to tokens to train on.

``formats``    pure: JSON Lines to chats; rows without an answer are dropped and counted
``tokenizer``  loads the base model's tokenizer
``template``   chats to tokens; which positions are supervised is proven by rendering, not guessed
``prepare``    all of it for one task, with the length policy and the counts that users see
``order``      pure: which rows belong to which step
``schedule``   pure: the learning rate of a step

May import ``storage``, ``stream`` and ``protocol``; knows nothing of devices or other tasks.
"""
