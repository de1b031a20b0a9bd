"""A folder, and servers of models, in step with finished adapters: what ``mlora sync`` does.

``places``   which adapters there are below the addresses of a store, and under which names
``folder``   the folder in which they are shown: one version beside the other, a name changed in one step
``needs``    what a server must know to serve an adapter right
``servers``  what is asked of vLLM and SGLang, by their documented calls
``requests`` one request to such a server: bounded, retried, its errors in one line
``passes``   one pass: what differs is fetched, shown, loaded, and taken away again
``news``     what a pass reports

Nothing but the standard library and boto3 is imported here, so that it runs where nothing else is installed.
"""

from mlora_operator.sync.folder import FolderLocked, ShownAdapters, open_folder
from mlora_operator.sync.news import News, NewsKind
from mlora_operator.sync.passes import SyncPass
from mlora_operator.sync.places import AdapterPlace, Places, joined, places_below
from mlora_operator.sync.servers import ModelServer, parse_server

__all__ = [
    "AdapterPlace",
    "FolderLocked",
    "ModelServer",
    "News",
    "NewsKind",
    "Places",
    "ShownAdapters",
    "SyncPass",
    "joined",
    "open_folder",
    "parse_server",
    "places_below",
]
