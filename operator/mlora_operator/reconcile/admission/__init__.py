"""Who trains. Pure.

``admit``          the tasks of a pipeline that are admitted to its memory
``queue``          those that want one, in their order; ``quota``: how many of one namespace may have one
``capacity``       the memory of a pipeline
``workload``       what one task asks for: of memory, of time; ``deleted_tasks``: what was served to those that are gone
``model_requests`` what it asks of the base model: modules, length
``spec_checks``    new specs are looked into a few at a time
``pipeline_view``  a pipeline as all parts of a pass see it

May import ``state``, and the pure rooms ``scheduling`` and ``memory``.
"""
