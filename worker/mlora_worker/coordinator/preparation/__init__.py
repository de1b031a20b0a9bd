"""A task before it is admitted, off the critical path.

``prepare``          rows, targets and output
``initial``          the adapter that it starts from
``texts``            rows and templates of ConfigMaps, by digest
``expected_tensors`` the tensors that its adapter will have
``fingerprint``      what must be the same for a checkpoint to count
``disk_check``       does what it will write fit on the disks?
"""
