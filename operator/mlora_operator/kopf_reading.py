"""How kopf lists and watches: in pages of few bytes, and of each object what the operator reads.

kopf itself pages by a number of objects alone, and holds each object whole until five seconds after its last event. It has
no setting for either, so two of its functions are replaced, both by ones of the same signature.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kopf._cogs.clients import api, errors, fetching, watching

from mlora_operator.reconcile.cluster.excerpt import excerpt
from mlora_operator.reconcile.cluster.pages import UNPACKED, Expired, pages, read_at_most

OBJECTS = ("ADDED", "MODIFIED", "DELETED")
_watch_whole = watching.watch_objs


def install() -> None:
    """For all operators of this process. May be called again."""
    fetching.fetch_objs = fetch
    watching.watch_objs = watch


async def fetch(
    *, settings: Any, resource: Any, namespace: str | None, logger: Any
) -> AsyncIterator[tuple[list[dict[str, Any]], str]]:
    """Excerpts of a page's objects, and the list's resource version."""

    async def ask(params: Mapping[str, str], most: int | None) -> bytes | None:
        url = resource.get_url(namespace=namespace, params=dict(params))
        try:
            response = await api.request("get", url, settings=settings, headers=UNPACKED, logger=logger)
        except errors.APIClientError as error:
            if error.status == 410:
                raise Expired from error
            raise
        async with response:
            text = await read_at_most(response.content.iter_any(), most)
            if text is None:
                response.close()  # what is left of it is not waited for
            return text

    async for page in pages(ask, _selectors(settings, resource)):
        kind = page.get("kind", "").removesuffix("List")
        of_all = {"kind": kind, "apiVersion": page.get("apiVersion", "")}
        # Go writes an empty list as null.
        objects = [of_all | excerpt(resource.plural, one) for one in page.get("items") or ()]
        version = page["metadata"]["resourceVersion"]
        del page
        yield objects, version


def _selectors(settings: Any, resource: Any) -> dict[str, str]:
    watched = settings.watching
    texts = {
        "labelSelector": ",".join(sorted(set(watched.label_selectors.collect(resource)))),
        "fieldSelector": ",".join(sorted(set(watched.field_selectors.collect(resource)))),
    }
    return {name: text for name, text in texts.items() if text}


async def watch(*, resource: Any, **rest: Any) -> AsyncIterator[dict[str, Any]]:
    """kopf's own events, with excerpts in the objects' place."""
    async with contextlib.aclosing(_watch_whole(resource=resource, **rest)) as events:
        async for event in events:
            if event["type"] in OBJECTS:
                event["object"] = excerpt(resource.plural, event["object"])
            yield event
