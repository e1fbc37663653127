from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from hvdtrain.jobs.files import append_json_line
from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.log import LogLine, LogWriter
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity
from hvdtrain.serve import job_api
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.job_api import MOST_CHARACTERS, CurveCache
from hvdtrain.serve.metrics_export import export
from tests.launch.jobs import kill_marked, program, with_mark

SPECIAL = ["$(touch pwned)", "a'b\"c", "two\nlines", "<script>alert(1)</script>", ""]


def _job(directory: Path, created_s: float, *words: str, **state: Any) -> JobFolder:
    job = create_job(
        directory, JobSpec(options=("-np", "2"), program=words, folder="/", created_s=created_s)
    )
    job.write_state(JobState(launcher=own_identity(), **{"phase": "running", **state}))
    return job


def _get(page: TestClient, path: str, **query: Any) -> Any:
    response = page.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json()


def _wait_until_listed(page: TestClient, jobs: int) -> None:
    deadline = time.monotonic() + 10
    while _get(page, "/api/jobs")["found"] < jobs:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_jobs_are_listed_in_pages(jobs_dir: Path, page: TestClient) -> None:
    names = [_job(jobs_dir, float(n), "train.py", str(n)).name for n in range(7)]
    _job(jobs_dir, 100.0, *SPECIAL, phase="ended", code=1, cause="exception", verdict=SPECIAL[3])
    _wait_until_listed(page, 8)
    response = _get(page, "/api/jobs", count=3)
    assert [row["status"] for row in response["jobs"]] == ["failed", "running", "running"]
    assert response["jobs"][0]["program"] == SPECIAL
    assert response["counts"] == {"failed": 1, "running": 7}
    response = _get(page, "/api/jobs", begin=1, count=2, status="running")
    assert ([row["name"] for row in response["jobs"]], response["found"]) == (names[-2:-4:-1], 7)
    assert _get(page, "/api/jobs", q="train.py 3")["jobs"][0]["name"] == names[3]
    assert _get(page, "/api/jobs", count=10**9)["found"] == 8


def test_a_job_has_history_and_curves(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py", step=3)
    append_json_line(job.events, {"kind": "began", "attempt": 1})
    for step in range(100):
        append_json_line(job.metrics, {"time": float(step), "step": step, "loss": 1 / (step + 1)})
    response = _get(page, f"/api/jobs/{job.name}")
    assert (response["status"], response["step"], response["metrics"]["step"]) == ("running", 3, 99)
    assert [event["kind"] for event in response["events"]] == ["began"]
    curves = _get(page, f"/api/jobs/{job.name}/metrics", count=10)
    assert curves.keys() == {"time", "step", "loss"}
    assert (curves["step"][0], curves["step"][-1]) == (0, 99)
    assert 10 <= len(curves["step"]) <= 12
    assert page.get("/api/jobs/nothing").status_code == 404


def test_a_job_has_versions_and_remaining_time(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py", step=20, total_steps=100, mpi="Open MPI 5.0.7")
    spec = dataclasses.replace(job.read_spec(), version="1.2", versions={"Keras": "3.14"})
    job.write_spec(dataclasses.replace(spec, variables={"OMP_NUM_THREADS": "1"}))
    for step in (0, 10, 20):
        append_json_line(job.metrics, {"time": step / 10, "step": step, "loss": 1.0})
    response = _get(page, f"/api/jobs/{job.name}")
    assert response["environment"] == {
        "versions": {"hvdtrain": "1.2", "Keras": "3.14"},
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    assert (response["mpi"], response["total_steps"], response["left_s"]) == (
        "Open MPI 5.0.7",
        100,
        8,
    )
    _wait_until_listed(page, 1)
    [row] = _get(page, "/api/jobs")["jobs"]
    assert (row["left_s"], row["goodput"], row["curve"]["of"]) == (8, None, "loss")
    assert (row["metrics"]["loss"], row["is_over"]) == (1.0, False)
    (job.path / "spec.json").write_text("{")
    assert _get(page, f"/api/jobs/{job.name}")["environment"]["versions"] == {}


def test_a_curve_has_few_points(jobs_dir: Path) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    empty = {"curve": {"of": "rate", "values": []}, "goodput": None}
    assert CurveCache().get(job, is_over=True) == empty
    # A restart resets the samples.
    for time_s, samples in enumerate([0, 10, 30, 0, 40]):
        append_json_line(job.metrics, {"time": float(time_s), "step": 1, "samples": samples})
    curve = CurveCache().get(job, is_over=False)["curve"]
    assert curve == {"of": "rate", "values": [10, 20, 40]}
    job.metrics.unlink()
    for step in range(1000):
        append_json_line(job.metrics, {"time": float(step), "step": step, "loss": 1000 - step})
    append_json_line(job.events, {"kind": "summary", "kept": 0.5})
    # The view of a job may be older than its files.
    cache = CurveCache()
    assert cache.get(job, is_over=False)["goodput"] is None
    details = cache.get(job, is_over=True)
    values = details["curve"]["values"]
    assert details["curve"]["of"] == "loss"
    assert (values[0], values[-1], details["goodput"]) == (1000, 1, 0.5)
    assert 20 <= len(values) <= job_api.CURVE_POINTS + 2


def test_curves_are_cached(jobs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, curves = _job(jobs_dir, 1.0, "a.py"), CurveCache()

    def values(loss: float | None, *, is_over: bool) -> list[float]:
        if loss is not None:
            append_json_line(job.metrics, {"time": loss, "loss": loss})
        return curves.get(job, is_over=is_over)["curve"]["values"]

    assert values(1.0, is_over=False) == [1.0]
    # The curve of a running job may be ten seconds old.
    assert values(2.0, is_over=False) == [1.0]
    assert values(None, is_over=True) == [1.0, 2.0]
    monkeypatch.setattr(job_api, "CURVE_INTERVAL_S", 0.0)
    assert values(3.0, is_over=False) == [1.0, 2.0, 3.0]
    monkeypatch.setattr(job_api, "_curve", None)
    assert values(None, is_over=False) == [1.0, 2.0, 3.0], "nothing has changed"


def test_a_log_is_read_in_parts(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    writer = LogWriter(job.log)
    for number in range(1000):
        text = f"{number} {SPECIAL[number % 5]}"
        line = LogLine(time_s=float(number), rank=number % 4, stream="stdout", text=text)
        writer.append([line])
    path = f"/api/jobs/{job.name}/log"
    last = _get(page, path, count=3)
    assert [line[5].split()[0] for line in last["lines"]] == ["997", "998", "999"]
    assert last["lines"][1][3:5] == [2, "stdout"]
    seen, position = [], 0
    while len(part := _get(page, path, begin=position, count=300)["lines"]):
        seen += [int(line[5].split()[0]) for line in part]
        position = part[-1][1]
    assert seen == list(range(1000))
    assert position == last["next"]
    found = _get(page, path, begin=0, ranks="1-2", grep="<script>")
    assert {line[3] for line in found["lines"]} == {1, 2}
    assert len(found["lines"]) == sum(n % 5 == 3 and n % 4 in (1, 2) for n in range(1000))
    writer.append([LogLine(time_s=1.0, rank=-1, stream="stderr", text="more")])
    assert _get(page, path, begin=last["next"])["lines"][0][3:] == [-1, "stderr", "more"]


def test_a_log_is_read_backwards(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    LogWriter(job.log).append([LogLine(1.5, n % 2, "stdout", f"line {n}") for n in range(100)])

    def get_log(**query: Any) -> tuple[list[str], dict[str, Any]]:
        response = _get(page, f"/api/jobs/{job.name}/log", **{"count": 10, **query})
        return [line[5].removeprefix("line ") for line in response["lines"]], response

    texts, last = get_log()
    assert texts == [str(n) for n in range(90, 100)]
    texts, earlier = get_log(before=last["begin"], ranks="1")
    assert texts == [str(n) for n in range(71, 90, 2)]
    assert get_log(before=earlier["begin"], grep="line 8")[0] == ["8"]
    assert get_log(begin=last["next"])[1] == {"lines": [], "next": last["next"], "complete": True}
    assert get_log(grep="no such text")[1] == {"lines": [], "begin": 0, "next": last["next"]}


def test_many_ranks_have_fewer_rows(
    jobs_dir: Path, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    path = f"/api/jobs/{job.name}/ranks"
    assert _get(page, path) == {"rows": [], "now": {}}
    for number in range(100):
        row = {"time": float(number), "step": [number] * 4, "own_s": [0.1, 0.2, None, 0.4]}
        append_json_line(job.ranks, row)
    response = _get(page, path, count=50)
    assert response["now"] == row
    assert response["rows"][0] == {"time": 0.0, "own_s": [0.1, 0.2, None, 0.4]}
    assert 40 <= len(response["rows"]) <= 52
    monkeypatch.setattr(job_api, "MOST_RANK_CELLS", 40)
    assert 5 <= len(_get(page, path, count=50)["rows"]) <= 12


def test_very_long_lines_are_truncated(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    lines = ["x" * MOST_CHARACTERS, "y" * (MOST_CHARACTERS + 7)]
    LogWriter(job.log).append(
        [LogLine(time_s=1.0, rank=0, stream="stdout", text=text) for text in lines]
    )
    for query in ({"begin": 0}, {"count": 5}):
        one, other = _get(page, f"/api/jobs/{job.name}/log", **query)["lines"]
        assert one[5] == lines[0]
        more = " ... 7 more characters; use hvdtrain logs"
        assert other[5] == lines[1][:MOST_CHARACTERS] + more
        assert other[0] == one[1]


def test_metrics_for_prometheus(jobs_dir: Path, page: TestClient) -> None:
    for number, status in enumerate(("running", "ended", "running")):
        code = 0 if status == "ended" else None
        job = _job(jobs_dir, float(number), f'a"{number}.py', phase=status, code=code, ranks=4)
        now = {"time": 1.0, "step": 10 + number, "loss": 0.5, "reduced_bytes_per_s": 7 << 20}
        append_json_line(job.metrics, now)
    _wait_until_listed(page, 3)
    families = text_string_to_metric_families(page.get("/metrics").text)
    found = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert found["hvdtrain_jobs", "running"] == 2
    assert found["hvdtrain_jobs", "done"] == 1
    steps = sorted(value for name, value in found.items() if name[0] == "hvdtrain_job_step")
    assert steps == [10, 12], "only running jobs"
    assert sum(value for name, value in found.items() if name[0] == "hvdtrain_job_ranks") == 8
    rates = [v for name, v in found.items() if name[0] == "hvdtrain_job_reduced_bytes_per_second"]
    assert rates == [7 << 20] * 2
    assert not [name for name in found if name[0].startswith("hvdtrain_rank")]


def test_rank_metrics_for_prometheus(jobs_dir: Path) -> None:
    job = _job(jobs_dir, 1.0, "a.py", ranks=2)
    now = {"step": [2, None], "phase": ["training", ""], "rss_mb": [3, 4], "own_s": [0.5, 1]}
    append_json_line(job.ranks, now)
    families = text_string_to_metric_families(export(JobIndex(jobs_dir), with_ranks=True).decode())
    samples = [sample for family in families for sample in family.samples]
    assert {(s.name, s.labels["rank"]): s.value for s in samples if "rank" in s.labels} == {
        ("hvdtrain_rank_step", "0"): 2,
        ("hvdtrain_rank_own_step_seconds", "0"): 0.5,
        ("hvdtrain_rank_own_step_seconds", "1"): 1,
        ("hvdtrain_rank_memory_bytes", "0"): 3 << 20,
        ("hvdtrain_rank_memory_bytes", "1"): 4 << 20,
    }


@pytest.mark.parametrize(
    "query", [{"begin": "-1"}, {"begin": "x"}, {"count": "1e9"}, {"ranks": "3-1"}, {"ranks": "a"}]
)
def test_invalid_queries_are_refused(jobs_dir: Path, page: TestClient, query) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    assert page.get(f"/api/jobs/{job.name}/log", params=query).status_code == 400


BODIES = {
    "invalid-json": b"{",
    "list": b"[]",
    "string": b'{"program": "rm -rf /", "folder": "/"}',
    "numbers": b'{"program": [1], "folder": "/"}',
    "zero": b'{"program": ["a\\u0000b"], "folder": "/"}',
    "missing-folder": b'{"program": ["a"], "folder": "/nowhere"}',
    "empty": b"",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_invalid_bodies_are_refused(page: TestClient, body: bytes, jobs_dir: Path) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/api/jobs", "/api/plan"):
        assert page.post(path, content=body, headers=headers).status_code == 400
    assert page.post("/api/jobs", content=b"{}").status_code == 415
    assert page.post("/api/jobs", content=b"x" * (2 << 20), headers=headers).status_code == 413
    assert not jobs_dir.exists()


def test_a_job_that_may_be_running_is_not_changed(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "train.py")
    _wait_until_listed(page, 1)
    (job.path / "state.json").write_bytes(b"")
    _wait_for(page, job.name, "unknown")
    for way in ("stop", "restart"):
        response = page.post(f"/api/jobs/{job.name}/{way}", json={})
        assert (response.status_code, f"{job.name} may be running: " in response.text) == (
            400,
            True,
        )


def test_option_files_are_read(page: TestClient, tmp_path: Path, jobs_dir: Path) -> None:
    # Paths are relative to the folder of the job.
    (tmp_path / "job.toml").write_text(
        "np = 2\non = 'slurm'\nsbatch = ['--partition=gpu']\n[env]\nMY_KEY = 'hunter2'"
    )
    typed = ["--num-proc=2", "--on=slurm", "--sbatch=--partition=gpu", "--env=MY_KEY=hunter2"]
    plans = []
    for options in (["--config", "job.toml"], typed):
        request = {"program": ["true"], "options": options, "folder": str(tmp_path)}
        response = page.post("/api/plan", json=request)
        assert response.status_code == 200, response.text
        plans.append(response.json()["plan"])
    assert plans[0] == plans[1]
    assert "--partition=gpu" in plans[0]
    missing = {"program": ["true"], "options": ["--config=none.toml"], "folder": str(tmp_path)}
    refused = page.post("/api/plan", json=missing)
    assert (refused.status_code, "none.toml can't be read" in refused.text) == (400, True)
    job = _job(jobs_dir, 1.0, "true", phase="ended", code=0)
    _wait_until_listed(page, 1)
    for way in ("clone", "restart"):
        missing = {"options": ["--config=none.toml"]}
        response = page.post(f"/api/jobs/{job.name}/{way}", json=missing)
        assert (response.status_code, "none.toml can't be read" in response.text) == (400, True)


@pytest.mark.mpi
@pytest.mark.essential
def test_a_real_job_is_planned_submitted_stopped_restarted_and_cloned(
    page: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = page.headers["x-csrf-token"]
    for name, value in with_mark(mark).items():
        monkeypatch.setenv(name, value)
    body = program(
        "print(sys.argv[1:], len(os.environ['MY_KEY']), flush=True); time.sleep(60)",
        [sys.executable],
    )
    options = ["-np", "1", "-x", "MY_KEY=abc"]
    request = {"program": [*body, *SPECIAL], "options": options, "folder": str(tmp_path)}
    try:
        assert " -np 1 " in page.post("/api/plan", json=request).json()["plan"]
        refused = page.post("/api/plan", json={**request, "options": ["-np", "none"]})
        assert (refused.status_code, "got 'none'" in refused.json()["error"]) == (400, True)
        name = page.post("/api/jobs", json=request).json()["name"]
        _wait_for(page, name, "running", text=f"{SPECIAL!r} 3")
        assert page.post(f"/api/jobs/{name}/restart", json={}).status_code == 400
        assert page.post(f"/api/jobs/{name}/stop", json={}).status_code == 200
        _wait_for(page, name, "stopped")
        again = [sys.executable, "-c", "print('again')"]
        changes = {"program": again, "options": ["-x", "MY_KEY=abcd"]}
        other = page.post(f"/api/jobs/{name}/clone", json=changes).json()["name"]
        assert page.post(f"/api/jobs/{name}/restart", json=changes).json() == {"name": name}
        _wait_for(page, other, "done", text="again")
        _wait_for(page, name, "done", text="again")
        assert _get(page, f"/api/jobs/{name}")["attempt"] == 2
        assert not (tmp_path / "pwned").exists()
    finally:
        kill_marked(mark)


def _wait_for(page: TestClient, name: str, status: str, text: str = "") -> None:
    deadline = time.monotonic() + 60
    while True:
        seen = _get(page, f"/api/jobs/{name}")
        log = [line[5] for line in _get(page, f"/api/jobs/{name}/log")["lines"]]
        if seen["status"] == status and (not text or text in log):
            return
        assert time.monotonic() < deadline, (seen, log)
        time.sleep(0.2)
