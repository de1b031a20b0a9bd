"""Layers that carry a state from token to token, which begins at each packed row.

``layers``                  which modules take the place of transformers' own
``looking_back``            what they share: row by row, or all rows at once by kernels
``delta_net``, ``mamba``    of gated delta nets, and of Mamba 2
``left_by_token``           what a token leaves for the backward, for estimates of memory
``plain``                   transformers' own, without other libraries' kernels
``choice``                  which kernels a stage takes: those that equal the rows one by one
``convolution``             the causal convolution of all rows at once, with its backward
``triton_convolution``      its kernel
``flash_linear_attention``  the scans of that library, each kernel held to one configuration
"""
