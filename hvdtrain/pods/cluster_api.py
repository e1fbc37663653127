"""Requests to the API server of a cluster through the official client.

Responses are plain data. The client's typed methods are not used, because they return objects whose
field names differ from those in manifests, and they lack ``sinceTime`` for logs.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import JobError
from hvdtrain.pods.names import JOB_LABEL, Object, plural

__all__ = ["ClusterApi", "RefusedError"]

TIMEOUT_S = 20.0
DELETE_TIMEOUT_S = 180.0
POLL_S = 0.5
# Foreground deletes the objects that a Job owns first, so nothing is left once the Job is deleted.
_DELETE_OPTIONS = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PARTICIPLES = {"POST": "created", "DELETE": "deleted", "PATCH": "changed", "GET": "read"}


class RefusedError(JobError):
    """The user or the account lacks a permission."""


class _NotFoundError(JobError):
    """The object or its kind does not exist."""


_ERRORS = {401: RefusedError, 403: RefusedError, 404: _NotFoundError}


class ClusterApi:
    """One namespace of a cluster.

    All methods raise a ``JobError`` if the cluster refuses a request or does not answer.

    ``client`` is a ``DynamicClient`` of the package kubernetes.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    @classmethod
    def of_context(cls, context: str, namespace: str) -> ClusterApi:
        """Return the API for a kubectl context and a namespace.

        If ``context`` is empty, the current context is used. If ``namespace`` is empty, the
        namespace of the context is used.

        Raises:
            JobError: If the context is missing in the kubectl configuration.
        """
        kubernetes = _package()
        try:
            client = kubernetes.config.new_client_from_config(
                context=context or None, client_configuration=_configuration()
            )
            contexts, current = kubernetes.config.list_kube_config_contexts()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise JobError(
                f"no cluster is configured: {str(error).rstrip('.')}. Check that kubectl get pods "
                "works here."
            ) from None
        (used,) = [one for one in contexts if one["name"] == (context or current["name"])]
        namespace = namespace or used["context"].get("namespace") or "default"
        return cls(_dynamic_client(client), namespace)

    @classmethod
    def of_pod(cls) -> ClusterApi:
        """Return the API of the cluster and namespace that this process runs in.

        Raises:
            JobError: If the process does not run in a pod with a service account.
        """
        kubernetes = _package()
        try:
            configuration = _configuration()
            kubernetes.config.load_incluster_config(configuration)
            namespace = _NAMESPACE_FILE.read_text().strip()
        except (kubernetes.config.ConfigException, OSError) as error:
            raise JobError(f"this pod can't access its cluster: {error}") from None
        return cls(_dynamic_client(kubernetes.client.ApiClient(configuration)), namespace)

    def create(self, objects: Sequence[Object]) -> None:
        """Delete the objects of a previous run and create all objects, or none if that fails.

        The first object must be a Job. It becomes the owner of the other objects.
        """
        owner, *others = objects
        name = owner["metadata"]["name"]
        self._delete_previous(name)
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
        """Create an object and return it as the cluster stored it.

        If ``dry_run`` is true, the object is only validated.
        """
        path = self._path(one["apiVersion"], plural(one["kind"]))
        what = f"{one['kind']} {one['metadata'].get('name') or ''}".rstrip()
        query = [("dryRun", "All")] if dry_run else []
        return dict(self._send("POST", path, what, content=one, query=query))

    def delete(self, name: str) -> None:
        """Start to delete a Job and the objects that it owns."""
        self._send("DELETE", self._job_path(name), f"Job {name}", content=_DELETE_OPTIONS)

    def job(self, name: str) -> Object | None:
        """Return a Job; None if it does not exist."""
        return self.read(self._job_path(name))

    def patch_job(self, name: str, content: Object) -> None:
        """Merge ``content`` into a Job."""
        self._send("PATCH", self._job_path(name), f"Job {name}", content=content)

    def jobs(self) -> list[Object]:
        """Return the Job objects of all hvdtrain jobs in this namespace."""
        return self._list(self._path("batch/v1", "jobs"), "jobs", ("labelSelector", JOB_LABEL))

    def pods(self, name: str | None = None) -> list[Object]:
        """Return the pods of one job, or of all hvdtrain jobs in this namespace."""
        label = JOB_LABEL if name is None else f"{JOB_LABEL}={name}"
        return self._list(self._path("v1", "pods"), "pods", ("labelSelector", label))

    def log(self, pod: str, container: str, since: str) -> str:
        """Return the output of a container. Each line starts with the time at the node.

        The result starts with the second that contains the time ``since``. If ``since`` is empty,
        the result is the complete output.
        """
        query = [("container", container), ("timestamps", "true")]
        query += [("sinceTime", since)] if since else []
        path = self._path("v1", f"pods/{pod}/log")
        return self._request("GET", path, f"log of {pod}", query=query).decode(errors="replace")

    def creation_problems(self) -> dict[str, str]:
        """Return why pods can't be created, by Job or StatefulSet; empty without permission."""
        query = ("fieldSelector", "reason=FailedCreate")
        try:
            events = self._list(self._path("v1", "events"), "events", query)
        except RefusedError:
            return {}
        return {one["involvedObject"].get("name", ""): one.get("message", "") for one in events}

    def workers(self, name: str) -> int:
        """Return the requested number of workers of a job."""
        found = self._send("GET", self._workers_path(name), f"StatefulSet {name}-worker")
        return int(found["spec"]["replicas"])

    def scale_workers(self, name: str, workers: int) -> None:
        """Set the number of workers of a job."""
        path, content = f"{self._workers_path(name)}/scale", {"spec": {"replicas": workers}}
        self._send("PATCH", path, f"StatefulSet {name}-worker", content=content)

    def may(self, verb: str, resource: str, group: str = "") -> bool:
        """Return whether this user has a permission, such as ``may("create", "jobs", "batch")``."""
        name, _, part = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": name, "subresource": part}
        attributes["namespace"] = self.namespace
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = self._send("POST", path, "access review", content=review)
        return bool(answer["status"]["allowed"])

    def read(self, path: str) -> Object | None:
        """Return the object at a path of the API; None if it does not exist."""
        try:
            return dict(self._send("GET", path, path))
        except _NotFoundError:
            return None

    def _delete_previous(self, name: str) -> None:
        if self.job(name) is None:
            return
        self.delete(name)
        deadline = time.monotonic() + DELETE_TIMEOUT_S
        while self.job(name) is not None:
            if time.monotonic() > deadline:
                raise JobError(
                    f"Job {name} still exists {DELETE_TIMEOUT_S:g} s after it was deleted; "
                    f"kubectl -n {self.namespace} describe job {name} shows the reason."
                )
            time.sleep(POLL_S)

    def _path(self, version: str, resource: str) -> str:
        root = "apis" if "/" in version else "api"
        return f"/{root}/{version}/namespaces/{self.namespace}/{resource}"

    def _job_path(self, name: str) -> str:
        return self._path("batch/v1", f"jobs/{name}")

    def _workers_path(self, name: str) -> str:
        return self._path("apps/v1", f"statefulsets/{name}-worker")

    def _list(self, path: str, what: str, query: tuple[str, str]) -> list[Object]:
        return list(self._send("GET", path, what, query=[query])["items"])

    def _send(self, *arguments: Any, **options: Any) -> Any:
        return json.loads(self._request(*arguments, **options))

    def _request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        content: Object | None = None,
        query: Sequence[tuple[str, str]] = (),
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
                message = json.loads(error.body)["message"]
            except (TypeError, ValueError, KeyError):
                message = error.reason
            raise _ERRORS.get(error.status, JobError)(
                f"{what} can't be {_PARTICIPLES[method]} in namespace {self.namespace}: {message}"
            ) from None
        except (HTTPError, OSError) as error:
            raise JobError(f"the cluster does not answer: {error}") from None


def _configuration() -> Any:
    """Return the settings of all clients."""
    configuration = _package().client.Configuration()
    # With retries it would take four times as long to notice that a cluster does not answer.
    configuration.retries = False
    return configuration


def _dynamic_client(client: Any) -> Any:
    """Return a client for requests by path. API discovery is left out because it can't time out."""
    return _package().dynamic.DynamicClient(client, discoverer=lambda _client, _cache: None)


def _package() -> Any:
    try:
        import kubernetes.client
        import kubernetes.config
        import kubernetes.dynamic
    except ImportError:
        raise JobError(
            "jobs on Kubernetes need the kubernetes package: pip install 'hvdtrain[kubernetes]'"
        ) from None
    return kubernetes
