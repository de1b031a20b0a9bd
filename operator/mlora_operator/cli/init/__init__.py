"""``mlora init``.

``command``  its options, and the file that it writes
``rows``     the first rows of a file
``template`` the text of a task, with comments
"""
