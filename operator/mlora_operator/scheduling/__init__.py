"""Which task goes first, which is admitted, which has to leave. Pure: ``schedule`` turns entrants into admissions.

``entrant`` (a task as it stands), ``memory`` (as it is asked) and ``policy`` go in; ``admission.Admission`` comes out.
``priority``, ``fair_share`` and ``shortest_remaining`` are the policies. May import: api.
"""
