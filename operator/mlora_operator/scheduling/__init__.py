"""Who goes first, who gets a place, who has to leave. Pure: ``schedule`` turns entrants into places.

``entrant`` (a task as it stands), ``room`` (memory as it is asked) and ``policy`` go in; ``admission.Place`` comes out.
``priority``, ``fair_share`` and ``shortest_remaining`` are the policies. May import: api.
"""
