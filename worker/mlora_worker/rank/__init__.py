"""One rank of a pipeline, from its configuration to its end.

``start``      which of the two it is
``first``      rank 0: the hub of the links, the coordinator, and stage 0
``later``      any other rank: one stage, which does what rank 0 says
``parts``      what both are made of: engine, links between stages, ports, metrics
``base_model`` the base model, and what the operator has to know of its stage
``stores``     where what tasks have made goes
"""
