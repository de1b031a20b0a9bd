"""The base model.

``model_source``       its small files in a local folder, its tensors by name
``model_folder``       which files it has; ``model_names``: which of them count
``safetensors_reader`` its tensors, each read on its own
``weight_cache``       tensors that were fetched before; ``cached_weights``: the source that looks there first

May import ``remote`` and ``object_store``.
"""
