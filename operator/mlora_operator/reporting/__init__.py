"""A task's losses for the tools in which people compare runs: TensorBoard, MLflow, Weights & Biases.

``curves`` says what is reported and what a reporter does, ``published`` reads it beside a finished adapter, ``targets``
opens the reporters, of which each has a file and loads its library when it is opened. The cluster is the
affair of ``cli.report``.
"""
