"""What is asked of a cluster's API server, by its official client; each answer is plain data."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import JobError
from hvdtrain.pods.names import JOB_LABEL, STOP, Object, plural, resource_of

__all__ = ["ClusterApi", "RefusedError", "SilentClusterError", "persist"]

TIMEOUT_S = 20.0
DELETE_TIMEOUT_S = 180.0
POLL_S = 0.5
# An account's rights may come a moment after its pod; then a refusal is final.
REFUSED_S = 10.0
# What it owns goes first, so that nothing of it is left once it is gone itself.
_WITH_ALL = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_Result = TypeVar("_Result")
_MERGE = "application/merge-patch+json"


class ClusterApi:
    """One namespace of a cluster.

    Args:
        client: A ``DynamicClient`` of the package kubernetes.
        namespace: Where objects are.
    """

    def __init__(self, client: Any, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    @classmethod
    def of_context(cls, context: str, namespace: str) -> ClusterApi:
        """The cluster that kubectl's configuration names; empty words stand for its defaults.

        Raises:
            JobError: There is no such configuration.
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
        """The cluster that this process runs in a pod of.

        Raises:
            JobError: It runs in none, or with no account.
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
        """Create all of them; the first owns the others, and goes again where one can't be.

        Raises:
            JobError: The cluster refuses one; the message says which and why.
        """
        owner, *others = objects
        made = self._send("POST", _collection(owner, self.namespace), owner, _named(owner))
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": made["metadata"]["uid"],
            "blockOwnerDeletion": True,
        }
        try:
            for one in others:
                owned = {**one, "metadata": {**one["metadata"], "ownerReferences": [reference]}}
                self._send("POST", _collection(one, self.namespace), owned, _named(one))
        except JobError:
            with contextlib.suppress(JobError):
                self.delete(owner["metadata"]["name"])
            raise

    def delete(self, name: str) -> None:
        """Delete a Job, and what it owns; that goes on after this has returned.

        Raises:
            JobError: The cluster refuses.
        """
        self._send("DELETE", self._path(name), _WITH_ALL, f"Job {name}")

    def replace_old(self, name: str) -> None:
        """See that there is no such Job, which an earlier run of the same job may have left.

        Raises:
            JobError: The cluster refuses, or takes too long.
        """
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

    def _path(self, name: str) -> str:
        return f"/apis/batch/v1/namespaces/{self.namespace}/jobs/{name}"

    def pods(self, name: str) -> list[Object]:
        """The pods of a job.

        Raises:
            JobError: The cluster does not say.
        """
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        query = [("labelSelector", f"{JOB_LABEL}={name}")]
        found = self._send("GET", path, None, "its pods", query)
        return list(found["items"])

    def log(self, pod: str, container: str, since: str) -> str:
        """Return what a container has printed, each line after the node's time.

        Args:
            pod: The name of its pod.
            container: Its name there.
            since: A time of such a line, with whose second to start; empty for the beginning.

        Raises:
            JobError: The cluster does not say.
        """
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        query = [("container", container), ("timestamps", "true")]
        query += [("sinceTime", since)] if since else []
        data: bytes = self._send_raw("GET", path, None, f"the log of {pod}", query)
        return data.decode(errors="replace")

    def workers(self, name: str) -> int:
        """How many workers a job is to have.

        Raises:
            JobError: The cluster does not say.
        """
        path = f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets/{name}-worker"
        found = self._send("GET", path, None, f"StatefulSet {name}-worker")
        return int(found["spec"]["replicas"])

    def job(self, name: str) -> Object | None:
        """A Job; None if it does not exist.

        Raises:
            JobError: The cluster does not say.
        """
        return self.read(self._path(name))

    def ask_to_stop(self, name: str, how: str) -> None:
        """Leave word with a Job that runs, which its launcher takes.

        Raises:
            JobError: The cluster refuses.
        """
        word = {"metadata": {"annotations": {STOP: how}}}
        self._send("PATCH", self._path(name), word, f"Job {name}")

    def why_not_created(self, name: str) -> str:
        """Why pods of a job can't even be created, in the cluster's words; empty for not known."""
        path = f"/api/v1/namespaces/{self.namespace}/events"
        query = [("fieldSelector", "reason=FailedCreate")]
        try:
            events = self._send("GET", path, None, "what happened", query)["items"]
        except JobError:
            return ""
        ours = (name, f"{name}-worker")
        said = [e.get("message", "") for e in events if e["involvedObject"].get("name") in ours]
        return said[-1] if said else ""

    def scale_workers(self, name: str, workers: int) -> None:
        """Have so many workers.

        Raises:
            JobError: The cluster refuses.
        """
        path = f"/apis/apps/v1/namespaces/{self.namespace}/statefulsets/{name}-worker/scale"
        self._send("PATCH", path, {"spec": {"replicas": workers}}, f"StatefulSet {name}-worker")

    def give_up(self, name: str) -> None:
        """Start no launcher again that ends with a failure.

        Raises:
            JobError: The cluster refuses.
        """
        self._send("PATCH", self._path(name), {"spec": {"backoffLimit": 0}}, f"Job {name}")

    def refused_rights(self, objects: Sequence[Object]) -> list[str]:
        """What this user may not create of them, as ``create jobs.batch``.

        Raises:
            JobError: The cluster does not say.
        """
        refused = []
        for resource, group in dict.fromkeys(map(resource_of, objects)):
            if not self.may("create", resource, group):
                refused.append(f"create {resource}{f'.{group}' if group else ''}")
        return refused

    def may(self, verb: str, resource: str, group: str = "") -> bool:
        """Return whether this user has a right in this namespace.

        Args:
            verb: The action, such as ``create``.
            resource: Its object, such as ``jobs`` or ``pods/log``.
            group: The API group of the resource; empty for the core group.

        Raises:
            JobError: The cluster does not answer.
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
        answer = self._send("POST", path, review, "what this user may do")
        return bool(answer["status"]["allowed"])

    def read(self, path: str) -> Object | None:
        """What the cluster has at a path of its API; None where there is nothing.

        Raises:
            JobError: This user may not see it, or the cluster does not answer.
        """
        try:
            return dict(self._send("GET", path, None, path))
        except _NotFoundError:
            return None

    def try_to_create(self, one: Object) -> Object:
        """An object as it would be in the cluster; it is not created (a dry run).

        Raises:
            JobError: The cluster would refuse it; the message says why.
        """
        query = [("dryRun", "All")]
        return dict(self._send("POST", _collection(one, self.namespace), one, one["kind"], query))

    def _send(
        self,
        method: str,
        path: str,
        content: Object | None,
        what: str,
        query: Sequence[tuple[str, str]] = (),
    ) -> Any:
        return json.loads(self._send_raw(method, path, content, what, query))

    def _send_raw(
        self,
        method: str,
        path: str,
        content: Object | None,
        what: str,
        query: Sequence[tuple[str, str]],
    ) -> bytes:
        with _as_job_error(method, what, self.namespace):
            answer = self._client.request(
                method,
                path,
                body=content,
                query_params=list(query),
                content_type=_MERGE if method == "PATCH" else "application/json",
                serialize=False,
                _request_timeout=TIMEOUT_S,
            )
            data: bytes = answer.data
            return data


def persist(
    act: Callable[[], _Result], *, patience_s: float, give_up: Callable[[], bool]
) -> _Result:
    """Do something with a cluster, again while that fails, and return its result.

    Args:
        act: Is called until it raises no JobError.
        patience_s: Seconds for that; for what this user may not do at most REFUSED_S.
        give_up: Whether not to try again.

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
    """There is no such object, or the cluster knows no objects of that kind."""


class RefusedError(JobError):
    """This user may not do that."""


_ERRORS = {401: RefusedError, 403: RefusedError, 404: _NotFoundError}
_DOES = {"POST": "created", "DELETE": "deleted", "PATCH": "changed", "GET": "read"}


@contextlib.contextmanager
def _as_job_error(method: str, what: str, namespace: str) -> Iterator[None]:
    kubernetes = _package()
    from urllib3.exceptions import HTTPError

    try:
        yield
    except kubernetes.client.ApiException as error:
        try:
            said = json.loads(error.body)["message"]
        except (TypeError, ValueError, KeyError):
            said = error.reason
        kind = _ERRORS.get(error.status, JobError)
        raise kind(f"{what} can't be {_DOES[method]} in namespace {namespace}: {said}") from None
    except (HTTPError, OSError) as error:
        raise SilentClusterError(f"the cluster does not answer: {error}") from None


def _configuration() -> Any:
    """What clients have in common."""
    configuration = _package().client.Configuration()
    # Who asks again waits four times as long for a cluster that says nothing.
    configuration.retries = False
    return configuration


def _by_paths(client: Any) -> Any:
    """A client that is asked by paths alone.

    It need not find out before what there is, for which it would wait without end.
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


def _collection(one: Object, namespace: str) -> str:
    version = one["apiVersion"]
    root = "/apis" if "/" in version else "/api"
    return f"{root}/{version}/namespaces/{namespace}/{plural(one['kind'])}"


def _named(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"
