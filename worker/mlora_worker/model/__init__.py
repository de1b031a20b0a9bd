"""The frozen base model: how its layers are cut into stages, read, and run on packed rows.

``errors``        what is refused, with the reason for the Failed condition
``partition``     pure: which layers go to which stage
``families``      which types are supported, and where the parts of each lie
``text_part``     of a model that also reads images: which text parts are supported, under the whole model's names
``experts``       where routed experts lie, in models and in files
``architecture``  the shape of a model from the configuration alone
``facts``         what the operator and the coordinator need to know of a model (which modules to adapt: ``stream.targets``)
``renamed``       tensors of files under the names that the model has for them
``load``          reads the tensors of one stage
``stage``         the modules of one stage and how tokens go through them
``rotary``        frequencies of packed rows
``rotation``      another way to rotate heads in the place of the model's own
``steady``        functions element by element, with bits that do not turn on how many elements there are
``fusing``        one pass or kernel for a norm, a gated activation, a rotary embedding, where it equals the model's own
``transposed``    linear modules whose weights files have the other way round
``attention``     causal attention over packed rows
``handed_on``     where packed rows begin, for the attention of layers that do not hand it on
``llama4``        attention in chunks, and experts whose inputs are weighted
``sinks``         the same with a sink for each head
``recurrent``     layers that carry a state, which begins at each packed row, and kernels for them
``loss``          cross entropy over supervised positions, in chunks

Knows nothing of adapters: ``lora`` adds them to the linear modules from outside.
"""
