"""What is known of one task.

``run``               its way from plan to adapter
``progress``          how far it has trained
``in_flight``         what the stream has of it
``checkpoint_state``  its checkpoints, to the store and back
``eviction``          that it left because memory ran out
``prepared``          what is ready before it trains; ``step``: its step in the pipeline; ``outcome``: what it comes to
``known_plan``        its plan, beside what is known of it already
``evaluation``        held-out rows: when, and what came of it
``history``           its curve
``report``            what the operator reads of it
``fault_attribution`` who is to blame for a fault that came out of computing several tasks together
``probe``             a task that was made up, to tell a task's fault from the pipeline's
``fault_message``     what a user reads of a fault; ``failure_reason``: its reason; ``failure_text``: without credentials
"""
