"""The page that the operator serves: what waits, trains and has ended, for people. Read-only.

``board`` takes over what a pass of the reconcile loop saw and decided; ``curves`` keeps losses, ``events`` what happened to
tasks; ``order`` puts tasks in the scheduler's order, ``choosing`` takes those that a reader asked for; ``documents``,
``answers``, ``detail`` (one task) and ``usage`` (by namespace) make the API's JSON of it; ``timelines`` asks coordinators
what their stages did; ``server`` serves all that, with the files in ``files/``, from a thread of its own.

May import what decides, and the client of the coordinators. Nothing imports it but the edges.
"""
