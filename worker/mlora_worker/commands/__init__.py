"""What the operator's commands ask of this package: one question over standard input, one answer.

``stdio``        how a question is asked and answered
``survey``       ``mlora plan``: what a model and its rows would take
``inspect_rows`` ``mlora validate --data``
``merge``        ``mlora export --merged``
``gguf_export``  ``mlora export --gguf``
``plain_export`` ``mlora export --plain``
``adapter_check`` whether an adapter is whole, for all three
``scales``       what PEFT multiplies B A by
"""
