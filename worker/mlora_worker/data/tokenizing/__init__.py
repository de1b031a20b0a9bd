"""Rows become tokens, and it is proven which of them are learnt.

``tokenizer``         loads the base model's tokenizer; ``text_tokens``, ``prefix_tokens``: where tokens stand in a text
``chat_template``     chats to tokens; ``rendering``: the template, applied
``conversations``     chats, rendered
``answer_spans``      which characters are answers; ``answer_tokens``: which tokens these are
``turn_ends``         where a turn ends
``special_text``      special tokens in a user's own text are text
``sandboxed_template`` a task's own template, in a process of its own (``sandbox_process``), in a ``sandbox``
``template_messages`` what a template that fails may tell
``tokenize``          many rows at a time, while the next ones are read; ``chunks``: how many
"""
