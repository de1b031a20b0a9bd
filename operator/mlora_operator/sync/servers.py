"""What is asked of servers of models, by the calls that they document.

| | vLLM | SGLang |
|---|---|---|
| which adapters it has | ``GET /v1/models`` | the same |
| load | ``POST /v1/load_lora_adapter`` | ``POST /load_lora_adapter`` |
| replace | the same with ``load_inplace``; versions without that: unload, then load | unload, then load |
| unload | ``POST /v1/unload_lora_adapter`` | ``POST /unload_lora_adapter`` |

vLLM has the two calls where it was started with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``. LoRAX documents none: it loads
an adapter when a request names its folder.

A and B of routed experts come in one piece for all experts of a layer. vLLM is told so (``is_3d_lora_weight``), since only
some of its models expect that; the others refuse it unless the server has ``--enable-mixed-moe-lora-format``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mlora_operator.sync.needs import AdapterNeeds, sglang_lacks, vllm_lacks
from mlora_operator.sync.requests import ServerConnection, ServerError, ServerRefused

_LIST_SECONDS = 30.0
_LOAD_SECONDS = 300.0  # a large adapter, on a busy server
_NOTHING = AdapterNeeds()


@dataclass(frozen=True, slots=True)
class ServerKind:
    load: str
    unload: str
    in_place: bool  # whether it can replace an adapter in one call
    hint: str  # what makes a server that knows no such call know it
    # Why it must not get an adapter of these needs. Asks for its version only where that decides.
    lacks: Callable[[AdapterNeeds, Callable[[], str]], str | None]


KINDS = {
    "vllm": ServerKind(
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        True,
        "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        vllm_lacks,
    ),
    "sglang": ServerKind(
        "/load_lora_adapter",
        "/unload_lora_adapter",
        False,
        "start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules",
        sglang_lacks,
    ),
}


@dataclass(frozen=True)
class ModelServer:
    """All methods raise ServerSilent and ServerRefused."""

    name: str
    kind: ServerKind
    connection: ServerConnection

    def loaded(self) -> dict[str, str | None]:
        """Where the server has each of its models from, by name; None for a base model."""
        answer = self.connection.get("/v1/models", _LIST_SECONDS)
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list):
            raise ServerRefused(f"{self.connection.url}/v1/models does not list models: is it a {self.name}?")
        return {
            str(one["id"]): str(one.get("root") or "") if one.get("parent") else None
            for one in models
            if isinstance(one, dict) and "id" in one
        }

    def load(self, name: str, path: str, needs: AdapterNeeds = _NOTHING) -> None:
        """Raises ServerRefused for what this server would take and compute wrongly, too."""
        self._post(self.kind.load, self._request(name, path, needs))

    def replace(self, name: str, path: str, needs: AdapterNeeds = _NOTHING) -> None:
        """As ``load``. For versions that know no replacement, there is a moment in which the name is unknown."""
        request = self._request(name, path, needs)
        if self.kind.in_place:
            try:
                self._post(self.kind.load, request | {"load_inplace": True})
                return
            except ServerRefused as error:
                if error.status != 400 or "already" not in str(error):
                    raise
        self.unload(name)
        self._post(self.kind.load, request)

    def unload(self, name: str) -> None:
        try:
            self._post(self.kind.unload, {"lora_name": name})
        except ServerRefused as error:
            if name in self.loaded():  # else somebody else was faster, and there is nothing to do
                raise error

    def _request(self, name: str, path: str, needs: AdapterNeeds) -> dict[str, Any]:
        why = needs.unservable or self.kind.lacks(needs, self._version)
        if why is not None:
            raise ServerRefused(f"{self.name} at {self.connection.url} does not get it: {why}")
        request: dict[str, Any] = {"lora_name": name, "lora_path": path}
        return request | {"is_3d_lora_weight": True} if needs.stacked else request

    def _version(self) -> str:
        try:
            answer = self.connection.get("/version", _LIST_SECONDS)
        except ServerError:  # what lies before a server may let other calls through: of this adapter alone
            return ""
        return str(answer.get("version")) if isinstance(answer, dict) else ""

    def _post(self, path: str, body: dict[str, Any]) -> None:
        try:
            answer = self.connection.post(path, body, _LOAD_SECONDS)
        except ServerRefused as error:
            if error.status in (404, 405) and body["lora_name"] not in str(error):
                raise ServerRefused(f"{error}; {self.kind.hint}", error.status) from error
            raise
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerRefused(f"{self.connection.url}{path} refuses: {answer.get('error_message')}")


def parse_server(text: str, key: str | None, pause: Callable[[float], None]) -> ModelServer:
    """Of ``vllm=http://127.0.0.1:8000``. Raises ValueError."""
    name, _, url = text.partition("=")
    if name not in KINDS:
        known = " or ".join(f"{kind}=URL" for kind in KINDS)
        more = "; LoRAX loads from the folder by itself" if name == "lorax" else ""
        raise ValueError(f"{text!r} is not a server: write {known}{more}")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{text!r} is not a server: the address is http://HOST:PORT, without user and query")
    return ModelServer(name, KINDS[name], ServerConnection(url.rstrip("/"), key, pause))
