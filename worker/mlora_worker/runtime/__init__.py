"""The process that a rank is: its memory allocator, threads, signals, log and certificates.

``allocator``       freed memory stays with the process
``threads``         how many compute
``precision``       which type products are made in
``kernel_compiler`` can kernels be compiled here? ``numba_loops``: loops for the processor
``termination``     a signal to end
``log_lines``       one record, one line
``fences``          what a process gives up before it runs what a stranger wrote; ``system_calls``: which it may still make
``tls``             certificates, read again when they change

Knows nothing of tasks, stages or stores.
"""
