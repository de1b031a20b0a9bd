"""What `helm test` runs in a pod, with the standard library alone: is all there that the operator needs?"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
GROUP = "mlora.dev/v1alpha1"


def ask(path):
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    headers = {"Authorization": f"Bearer {Path(ACCOUNT, 'token').read_text(encoding='utf-8')}"}
    request = urllib.request.Request(f"https://{host}:{port}{path}", headers=headers)
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return json.load(answer)


def resources_are_served():
    served = {one["name"] for one in ask(f"/apis/{GROUP}")["resources"]}
    missing = {"loratasks", "loratasks/status", "lorapipelines", "lorapipelines/status"} - served
    assert not missing, f"{GROUP} lacks {', '.join(sorted(missing))}: are the CRDs of this version installed?"


def rights_are_there():
    namespace = os.environ["RELEASE_NAMESPACE"]
    for plural in ("loratasks", "lorapipelines"):
        ask(f"/apis/{GROUP}/namespaces/{namespace}/{plural}?limit=1")


def secrets_cannot_be_listed():
    try:
        ask(f"/api/v1/namespaces/{os.environ['RELEASE_NAMESPACE']}/secrets?limit=1")
    except urllib.error.HTTPError as error:
        if error.code != 403:
            raise
    else:
        raise AssertionError("the operator's account may list secrets: who else has bound rights to it?")


def operator_is_healthy():
    try:
        with urllib.request.urlopen(os.environ["HEALTH_URL"], timeout=10) as answer:
            assert answer.status == 200
    except urllib.error.HTTPError as error:
        raise AssertionError(f"/healthz: {error.read().decode()}") from error


failed = 0
for check in (resources_are_served, rights_are_there, secrets_cannot_be_listed, operator_is_healthy):
    words = check.__name__.replace("_", " ")
    try:
        check()
        print(f"ok      {words}", flush=True)
    except Exception as error:
        failed += 1
        print(f"FAILED  {words}: {error}", flush=True)
sys.exit(1 if failed else 0)
