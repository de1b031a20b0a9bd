"""Rows of tasks, made away from what trains.

``maker``   what the coordinator asks for

May import ``data``, ``storage``, ``stream`` and ``protocol``; nothing here imports torch.
"""
