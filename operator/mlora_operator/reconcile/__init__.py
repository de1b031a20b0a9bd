"""From what is to what shall be: observe, decide, act.

``loop``          one pass after the other: what is there, what shall be, and the writes between them
``decide``        the pure function in the middle; it calls the rooms below in their order
``plan``          pure: what the coordinator of a pipeline is told
``ports``         what the edge must offer: the API server (``cluster``), or files and processes (``mlora_operator.local``)
``observer``      who counts what the loop does
``cache``         what decisions have worked out already; ``memoize``: how it is remembered
``failed_passes`` pure: passes that fail, one after the other

The rooms, from the edge to the core. Each may import those below it, and none above:

``cluster``       the API server: what was watched, what is read, what is written
``assignment``    which pipeline serves a task, or why none does
``status``        what users read of tasks and pipelines
``workers``       a pipeline's workers: do they run, shall they, are they well
``admission``     who trains
``state``         typed inputs and outputs of a decision
"""
