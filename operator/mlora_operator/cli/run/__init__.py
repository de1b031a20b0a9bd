"""``mlora run``: train on this machine, without a cluster.

``command``  its options
``progress`` what it prints while tasks train
"""
