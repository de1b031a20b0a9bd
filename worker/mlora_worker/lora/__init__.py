"""LoRA on frozen linear modules, for many tasks at once.

``function``   adds every segment's low-rank product to one frozen linear, forward and backward
``reference``  the same in plain autograd, for tests
``bound``      what each task brings to a microbatch, known from its load on but for rows and weights
``triton_*``   the products on a GPU: tables of a microbatch, from rows of its tasks; kernels, their parts, their launches
``dropout``    masks that are recomputed, never stored, and depend on the task alone
``linear``     the module that takes a frozen linear's place
``adapter``    one task's parameters on one stage, their names and their start
``magnitudes`` what DoRA multiplies outputs by, and how it is trained
``vera``       the vectors of VeRA, and the matrices that they make
``optimizer``  one task's optimizer: AdamW, or ``lion``
``peft_fields`` which fields a PEFT configuration of a plain adapter has
``lasting``    where on the CPU their memory lies

Knows nothing of models: it sees linear modules by their path.
"""
