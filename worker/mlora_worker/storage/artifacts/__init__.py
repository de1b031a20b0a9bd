"""What tasks make.

``adapter``         PEFT's layout: configuration, checks, publishing with the manifest last; ``model_card``: its README.md
``checkpoint``      a task's state between two runs; ``task_state``: the same in memory; ``agreement``: can it be true?
``existing_output`` what is stored at an output already, and whose it is
``write_probe``     can the output be written? asked before training
``local_spool``     what a task has done, on rank 0's own volume until its store has it

May import ``object_store``.
"""
