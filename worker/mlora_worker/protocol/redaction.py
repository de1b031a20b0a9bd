"""What may be shown in logs, statuses and events. Pure."""

from __future__ import annotations

import re

from mlora_worker.lines import indented as indented
from mlora_worker.lines import one_line as one_line
from mlora_worker.protocol.plan import StorageAccess

_USER_OF_A_URL = re.compile(r"(?<=://)[^/\s'\"]+@")  # to the last @: a password may have one
_QUERY_OF_A_URL = re.compile(r"(https?://[^\s?'\"]+)\?[^\s\"]*[^\s\"']")  # but the quote that ends it


def without_credentials(text: str) -> str:
    """``text`` with user, password and query of each web address in it as ``***``: a query may be a signature."""
    if "://" not in text:
        return text
    return _QUERY_OF_A_URL.sub(r"\1?***", _USER_OF_A_URL.sub("***@", text))


def without_keys(text: str, access: StorageAccess) -> str:
    """The same, and without the keys of ``access``, which a store may send back in an error."""
    for key in (access.secret_key, access.session_token, access.hub_token, access.access_key):
        value = key.get_secret_value() if key is not None else ""
        if len(value) >= _SHORTEST_KEY:
            text = text.replace(value, "***")
    return without_credentials(text)


_SHORTEST_KEY = 4  # what is shorter is a word in a trial, and would blot out half of the text
