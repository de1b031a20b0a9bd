"""``python -m mlora_worker.preparing FD``: the preparation process of a rank (``server.py``), whose other end of the socket
``FD`` is the rank's (``client.py``).

torch is not imported here: it would take half a gigabyte and start threads, and a process with threads cannot be forked. To
transformers it looks as if there were none, which is all that a tokenizer needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys

if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    from mlora_worker.preparing.process import main

    with contextlib.suppress(BrokenPipeError, ConnectionError, KeyboardInterrupt):
        main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(0)
