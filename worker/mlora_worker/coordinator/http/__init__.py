"""The coordinator over HTTP.

``server``       its routes, and who may ask
``plan_parsing`` a plan is read task by task: one that cannot be understood fails alone
"""
