"""``python -m bench network``: two ranks on either side of a link of a given rate, this project against its peers.

``link.py``      a network namespace, and a link to it whose rate is shaped
``formulae.py``  the bytes that each side must send
``sides.py``     this project's ranks and the peers', on that link
``command.py``   which rates, the table, and the JSON line
"""

from bench.network.command import main

__all__ = ["main"]
