"""Simulated pipelines, for the figures of docs/contributors/lorapp.md and for tests of what the product decides.

``simulate``       one pipeline under a rule: discrete events, no clock but its own
``peer_schedules`` GPipe, 1F1B
``fixed_rule``     a rule that is given the groups
``formulae``       bubbles and memory, in closed form
``figures``        the pictures and the table of docs/contributors/lorapp.md
"""
