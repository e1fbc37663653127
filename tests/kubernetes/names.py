"""Names inside the tests' Kubernetes: ``python -m tests.kubernetes.names ADDRESS``.

It answers for ``POD.SERVICE.NAMESPACE.svc.cluster.local`` with what the API server knows of the
service's endpoints, as the cluster's DNS does.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus

from dnslib import QTYPE, RCODE, RR, A
from dnslib.server import BaseResolver, DNSServer

from tests.kubernetes.node import API_ADDRESS, TOKEN

_DOMAIN = ".svc.cluster.local"
_TTL_S = 1
# No answer for so long is one to ask again for; that there is no such name would be a lie.
_SILENT_S = 20.0


class Resolver(BaseResolver):
    """Asks the API server each time: a pod that comes back has another address."""

    def resolve(self, request, handler):
        """The answer to a query."""
        reply = request.reply()
        name = str(request.q.qname).rstrip(".")
        found = _addresses(name) if name.endswith(_DOMAIN) else None
        if not found:
            reply.header.rcode = RCODE.NXDOMAIN
        elif request.q.qtype == QTYPE.A:
            for address in found:
                reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(address), ttl=_TTL_S))
        return reply


def _addresses(name: str) -> list[str]:
    *hosts, service, namespace = name.removesuffix(_DOMAIN).split(".")
    if (service, namespace) == ("kubernetes", "default"):
        return [API_ADDRESS]
    found = _ask(f"/api/v1/namespaces/{namespace}/endpoints/{service}")
    addresses = [one for part in found.get("subsets") or () for one in part.get("addresses") or ()]
    return [one["ip"] for one in addresses if not hosts or [one.get("hostname")] == hosts]


def _ask(path: str) -> Mapping:
    request = urllib.request.Request(
        f"https://{API_ADDRESS}{path}", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    # Made by the server for itself, and both are on this node.
    context = ssl._create_unverified_context()
    until = time.monotonic() + _SILENT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return json.load(answer)
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.NOT_FOUND:
                return {}
            # The machine is busy.
            if time.monotonic() > until:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    DNSServer(Resolver(), address=sys.argv[1], port=53).start_thread()
    while True:
        time.sleep(3600)
