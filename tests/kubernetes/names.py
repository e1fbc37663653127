"""DNS of the tests' Kubernetes: ``python -m tests.kubernetes.names ADDRESS``.

It resolves ``POD.SERVICE.NAMESPACE.svc.cluster.local`` to the endpoints of the service.
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
# Retry the API server for this long before a query fails.
_RETRY_S = 20.0


class Resolver(BaseResolver):
    """A resolver without a cache, because restarted pods have new addresses."""

    def resolve(self, request, handler):
        """Return the reply to a query."""
        reply = request.reply()
        name = str(request.q.qname).rstrip(".")
        addresses = _addresses(name) if name.endswith(_DOMAIN) else None
        if not addresses:
            reply.header.rcode = RCODE.NXDOMAIN
        elif request.q.qtype == QTYPE.A:
            for address in addresses:
                reply.add_answer(RR(request.q.qname, QTYPE.A, rdata=A(address), ttl=_TTL_S))
        return reply


def _addresses(name: str) -> list[str]:
    *hosts, service, namespace = name.removesuffix(_DOMAIN).split(".")
    if (service, namespace) == ("kubernetes", "default"):
        return [API_ADDRESS]
    endpoints = _ask(f"/api/v1/namespaces/{namespace}/endpoints/{service}")
    addresses = [
        one for part in endpoints.get("subsets") or () for one in part.get("addresses") or ()
    ]
    return [one["ip"] for one in addresses if not hosts or [one.get("hostname")] == hosts]


def _ask(path: str) -> Mapping:
    request = urllib.request.Request(
        f"https://{API_ADDRESS}{path}", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    # The certificate is self-signed.
    context = ssl._create_unverified_context()
    deadline = time.monotonic() + _RETRY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as response:
                return json.load(response)
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.NOT_FOUND:
                return {}
            # The machine is busy.
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


if __name__ == "__main__":
    DNSServer(Resolver(), address=sys.argv[1], port=53).start_thread()
    while True:
        time.sleep(3600)
