"""``mlora init``.

``command``  its options, and the file that it writes
``rows``     the first rows of a file
``detect``   which format rows have, by their columns
``template`` the text of a task, with comments
"""
