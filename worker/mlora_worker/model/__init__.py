"""The frozen base model: how its layers are cut into stages, read, and run on packed rows.

``errors``        what is refused, with the reason for the Failed condition
``partition``     pure: which layers go to which stage
``architecture``  which models are supported; their shape from the configuration alone
``facts``         what the operator and the coordinator need to know of a model; target modules by name
``load``          reads the tensors of one stage
``stage``         the modules of one stage and how tokens go through them
``attention``     causal attention over packed rows
``loss``          cross entropy over supervised positions, in chunks

Knows nothing of adapters: ``lora`` adds them to the linear modules from outside.
"""
