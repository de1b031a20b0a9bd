"""The matrices of the frozen base model, however they lie in memory.

``weight``   the one type behind which plain and quantised weights stand, and how such a weight multiplies
``plain``    an ordinary tensor, and products with one
``onednn``   the same tensor, and products by oneDNN
``choose``   which of the two a stage takes
``quantised`` what becomes dense for a pass; ``int8``, ``four_bits`` (nf4), ``fp8``, ``mxfp4``: how it is packed
``linear``   the module that has such a weight; puts it in the place of torch's own
``experts``  the module of many such weights, of which each token takes some; ``grouped``: all of them in one product

Knows nothing of models nor of adapters: ``model`` makes the weights, ``lora`` and the loss multiply with them.
"""
