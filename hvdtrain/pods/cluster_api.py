"""Requests to the API server of a cluster, by the official client; answers are plain data.

The client's typed methods would save nothing: what they return has classes of its own instead of
the names of manifests, and they lack ``sinceTime`` for logs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import JobError
from hvdtrain.pods.names import JOB_LABEL, Object, plural

__all__ = ["ClusterApi", "RefusedError", "SilentClusterError", "persist"]

TIMEOUT_S = 20.0
DELETE_TIMEOUT_S = 180.0
POLL_S = 0.5
# An account's rights may come a moment after its pod; then a refusal is final.
REFUSED_S = 10.0
# Foreground: the objects that a Job owns go first, so nothing is left when it is gone.
_WITH_ALL = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_Result = TypeVar("_Result")
_DOES = {"POST": "created", "DELETE": "deleted", "PATCH": "changed", "GET": "read"}


class ClusterApi:
    """One namespace of a cluster.

    All methods raise a ``JobError`` if the cluster refuses or does not answer.

    Args:
        client: A ``DynamicClient`` of the package kubernetes.
        namespace: The name of the namespace.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    @classmethod
    def of_context(cls, context: str, namespace: str) -> ClusterApi:
        """Return the cluster of a context and a namespace; empty for those of kubectl.

        Raises:
            JobError: The configuration does not have it.
        """
        kubernetes = _package()
        try:
            client = kubernetes.config.new_client_from_config(
                context=context or None, client_configuration=_configuration()
            )
            known, active = kubernetes.config.list_kube_config_contexts()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise JobError(
                f"no cluster is known: {str(error).rstrip('.')}. Does kubectl get pods work here?"
            ) from None
        (used,) = [one for one in known if one["name"] == (context or active["name"])]
        namespace = namespace or used["context"].get("namespace") or "default"
        return cls(_by_paths(client), namespace)

    @classmethod
    def of_pod(cls) -> ClusterApi:
        """Return the cluster that this process runs in.

        Raises:
            JobError: It does not run in a pod, or the pod has no account.
        """
        kubernetes = _package()
        try:
            configuration = _configuration()
            kubernetes.config.load_incluster_config(configuration)
            namespace = _NAMESPACE_FILE.read_text().strip()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise JobError(f"this pod may not ask its cluster: {error}") from None
        return cls(_by_paths(kubernetes.client.ApiClient(configuration)), namespace)

    def create(self, objects: Sequence[Object]) -> None:
        """Create objects in place of those that an earlier run of the job has left, all or none.

        The first, a Job, owns the others.
        """
        owner, *others = objects
        name = owner["metadata"]["name"]
        self._remove_old(name)
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": name,
            "uid": self.create_one(owner)["metadata"]["uid"],
            "blockOwnerDeletion": True,
        }
        try:
            for one in others:
                metadata = {**one["metadata"], "ownerReferences": [reference]}
                self.create_one({**one, "metadata": metadata})
        except JobError:
            with contextlib.suppress(JobError):
                self.delete(name)
            raise

    def create_one(self, one: Object, *, dry_run: bool = False) -> Object:
        """Create an object and return it as the cluster has it; a dry run only validates it."""
        version = one["apiVersion"]
        root = "apis" if "/" in version else "api"
        path = f"/{root}/{version}/namespaces/{self.namespace}/{plural(one['kind'])}"
        name = one["metadata"].get("name")
        what = f"{one['kind']} {name}" if name else one["kind"]
        query = [("dryRun", "All")] if dry_run else []
        return dict(self._send("POST", path, what, content=one, query=query))

    def delete(self, name: str) -> None:
        """Start to delete a Job, and the objects that it owns."""
        self._send("DELETE", self._job(name), f"Job {name}", content=_WITH_ALL)

    def job(self, name: str) -> Object | None:
        """Return a Job; None if it does not exist."""
        return self.read(self._job(name))

    def patch_job(self, name: str, content: Object) -> None:
        """Change a Job."""
        self._send("PATCH", self._job(name), f"Job {name}", content=content)

    def pods(self, name: str) -> list[Object]:
        """Return the pods of a job."""
        path, query = self._core("pods"), [("labelSelector", f"{JOB_LABEL}={name}")]
        return list(self._send("GET", path, "its pods", query=query)["items"])

    def log(self, pod: str, container: str, since: str) -> str:
        """Return the output of a container, each line after the node's time.

        Args:
            pod: The name of its pod.
            container: Its name there.
            since: A time of such a line, with whose second to start; empty for the beginning.
        """
        query = [("container", container), ("timestamps", "true")]
        query += [("sinceTime", since)] if since else []
        path = self._core(f"pods/{pod}/log")
        return self._request("GET", path, f"the log of {pod}", None, query).decode(errors="replace")

    def why_not_created(self, name: str) -> str:
        """Return why pods of a job can't be created, in the cluster's words; empty if unknown."""
        query = [("fieldSelector", "reason=FailedCreate")]
        try:
            events = self._send("GET", self._core("events"), "its events", query=query)["items"]
        except JobError:
            return ""
        ours = (name, f"{name}-worker")
        said = [e.get("message", "") for e in events if e["involvedObject"].get("name") in ours]
        return said[-1] if said else ""

    def workers(self, name: str) -> int:
        """Return how many workers a job is to have."""
        found = self._send("GET", self._stateful_set(name), f"StatefulSet {name}-worker")
        return int(found["spec"]["replicas"])

    def scale_workers(self, name: str, workers: int) -> None:
        """Set how many workers a job is to have."""
        path, content = f"{self._stateful_set(name)}/scale", {"spec": {"replicas": workers}}
        self._send("PATCH", path, f"StatefulSet {name}-worker", content=content)

    def may(self, verb: str, resource: str, group: str = "") -> bool:
        """Return whether this user has a right in this namespace.

        Args:
            verb: The action, such as ``create``.
            resource: Its object, such as ``jobs`` or ``pods/log``.
            group: The API group of the resource; empty for the core group.
        """
        name, _, part = resource.partition("/")
        wanted = {"verb": verb, "group": group, "resource": name, "subresource": part}
        wanted["namespace"] = self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = self._send("POST", path, "what this user may do", content=review)
        return bool(answer["status"]["allowed"])

    def read(self, path: str) -> Object | None:
        """Return what the cluster has at a path of its API; None if there is nothing."""
        try:
            return dict(self._send("GET", path, path))
        except _NotFoundError:
            return None

    def _remove_old(self, name: str) -> None:
        if self.job(name) is None:
            return
        self.delete(name)
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        while self.job(name) is not None:
            if time.monotonic() > deadline:
                raise JobError(
                    f"Job {name} is still there {DELETE_TIMEOUT_S:g} s after it was deleted: "
                    f"kubectl -n {self.namespace} describe job {name} says why."
                )
            time.sleep(POLL_S)

    def _core(self, rest: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/{rest}"

    def _job(self, name: str) -> str:
        return f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}"

    def _stateful_set(self, name: str) -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets/{name}-worker"

    def _send(
        self,
        method: str,
        path: str,
        what: str,
        *,
        content: Object | None = None,
        query: Sequence[tuple[str, str]] = (),
    ) -> Any:
        return json.loads(self._request(method, path, what, content, query))

    def _request(
        self,
        method: str,
        path: str,
        what: str,
        content: Object | None,
        query: Sequence[tuple[str, str]],
    ) -> bytes:
        kubernetes = _package()
        from urllib3.exceptions import HTTPError

        kind = "merge-patch+json" if method == "PATCH" else "json"
        try:
            answer = self._client.request(
                method,
                path,
                body=content,
                query_params=list(query),
                content_type=f"application/{kind}",
                serialize=False,
                _request_timeout=TIMEOUT_S,
            )
            return bytes(answer.data)
        except kubernetes.client.ApiException as error:
            try:
                said = json.loads(error.body)["message"]
            except (TypeError, ValueError, KeyError):
                said = error.reason
            raise _ERRORS.get(error.status, JobError)(
                f"{what} can't be {_DOES[method]} in namespace {self.namespace}: {said}"
            ) from None
        except (HTTPError, OSError) as error:
            raise SilentClusterError(f"the cluster does not answer: {error}") from None


def persist(
    act: Callable[[], _Result], *, patience_s: float, give_up: Callable[[], bool]
) -> _Result:
    """Call a function until it succeeds, and return its result.

    Args:
        act: The function; a JobError is a failure.
        patience_s: Seconds to try; at most REFUSED_S if the account lacks a right.
        give_up: Returns whether to stop trying.

    Raises:
        JobError: The last failure.
    """
    begun, said = time.monotonic(), ""
    while True:
        try:
            return act()
        except JobError as error:
            most_s = min(patience_s, REFUSED_S if isinstance(error, RefusedError) else patience_s)
            if give_up() or time.monotonic() - begun > most_s:
                raise
            if str(error) != said:
                said = str(error)
                print(f"hvdtrain: {said}; trying again", file=sys.stderr, flush=True)
        time.sleep(POLL_S)


class SilentClusterError(JobError):
    """The cluster does not answer, or can't be reached."""


class _NotFoundError(JobError):
    """The object does not exist, or the cluster has no objects of that kind."""


class RefusedError(JobError):
    """The user or the account lacks a right."""


_ERRORS = {401: RefusedError, 403: RefusedError, 404: _NotFoundError}


def _configuration() -> Any:
    """Return the settings that all clients share."""
    configuration = _package().client.Configuration()
    # With retries a silent cluster would take four times as long.
    configuration.retries = False
    return configuration


def _by_paths(client: Any) -> Any:
    """Return a client for requests by path.

    It does not ask first which kinds of objects the cluster has, which has no time-out.
    """
    return _package().dynamic.DynamicClient(client, discoverer=lambda _client, _cache: None)


def _package() -> Any:
    try:
        import kubernetes.client
        import kubernetes.config
        import kubernetes.dynamic
    except ImportError:
        raise JobError(
            "jobs on Kubernetes need its client: pip install 'hvdtrain[kubernetes]'"
        ) from None
    return kubernetes
