"""What may go wrong between the operator and a coordinator; all of it ``CoordinatorError``:

- ``Unreachable``: no connection, no answer in time, or a 5xx; comes and goes with pods.
- ``Starting``: the coordinator is there but its stages still load the model (503).
- ``Unauthorized``: the token is not the coordinator's.
- ``Untrusted``: the certificate is not the coordinator's. Whoever answered there was sent nothing.
- ``Invalid``: one side does not understand the other, or answers without measure; the message has the answer.
- ``NotUnderstood``: of these, where the coordinator does not understand what it was sent (422).
"""

from __future__ import annotations


class CoordinatorError(Exception):
    pass


class Unreachable(CoordinatorError):
    pass


class Starting(CoordinatorError):
    pass


class Unauthorized(CoordinatorError):
    pass


class Untrusted(CoordinatorError):
    pass


class Invalid(CoordinatorError):
    pass


class NotUnderstood(Invalid):
    pass
