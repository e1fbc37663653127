"""What the page asks of jobs; their folders are made here, and one job is real."""

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

NASTY = ["$(touch pwned)", "a'b\"c", "two\nlines", "<script>alert(1)</script>", ""]


def _job(directory: Path, created_s: float, *words: str, **state: Any) -> JobFolder:
    job = create_job(
        directory, JobSpec(options=("-np", "2"), program=words, folder="/", created_s=created_s)
    )
    job.write_state(JobState(launcher=own_identity(), **{"phase": "running", **state}))
    return job


def _get(page: TestClient, path: str, **query: Any) -> Any:
    answer = page.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _until_listed(page: TestClient, jobs: int) -> None:
    deadline = time.monotonic() + 10
    while _get(page, "/api/jobs")["found"] < jobs:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_newest_jobs_come_first_a_part_at_a_time(jobs_dir: Path, page: TestClient) -> None:
    names = [_job(jobs_dir, float(n), "train.py", str(n)).name for n in range(7)]
    _job(jobs_dir, 100.0, *NASTY, phase="ended", code=1, cause="exception", verdict=NASTY[3])
    _until_listed(page, 8)
    told = _get(page, "/api/jobs", count=3)
    assert [row["status"] for row in told["jobs"]] == ["failed", "running", "running"]
    assert told["jobs"][0]["program"] == NASTY
    assert told["counts"] == {"failed": 1, "running": 7}
    told = _get(page, "/api/jobs", begin=1, count=2, status="running")
    assert ([row["name"] for row in told["jobs"]], told["found"]) == (names[-2:-4:-1], 7)
    assert _get(page, "/api/jobs", q="train.py 3")["jobs"][0]["name"] == names[3]
    assert _get(page, "/api/jobs", count=10**9)["found"] == 8


def test_a_job_is_told_with_its_history(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py", step=3)
    append_json_line(job.events, {"kind": "began", "attempt": 1})
    for step in range(100):
        append_json_line(job.metrics, {"time": float(step), "step": step, "loss": 1 / (step + 1)})
    told = _get(page, f"/api/jobs/{job.name}")
    assert (told["status"], told["step"], told["metrics"]["step"]) == ("running", 3, 99)
    assert [event["kind"] for event in told["events"]] == ["began"]
    curves = _get(page, f"/api/jobs/{job.name}/metrics", count=10)
    assert curves.keys() == {"time", "step", "loss"}
    assert (curves["step"][0], curves["step"][-1]) == (0, 99)
    assert 10 <= len(curves["step"]) <= 12
    assert page.get("/api/jobs/nothing").status_code == 404


def test_a_job_is_told_with_what_it_ran_with_and_what_is_left(
    jobs_dir: Path, page: TestClient
) -> None:
    job = _job(jobs_dir, 1.0, "a.py", step=20, total_steps=100, mpi="Open MPI 5.0.7")
    spec = dataclasses.replace(job.spec(), version="1.2", versions={"Keras": "3.14"})
    job.write_spec(dataclasses.replace(spec, variables={"OMP_NUM_THREADS": "1"}))
    for step in (0, 10, 20):
        append_json_line(job.metrics, {"time": step / 10, "step": step, "loss": 1.0})
    told = _get(page, f"/api/jobs/{job.name}")
    assert told["environment"] == {
        "versions": {"hvdtrain": "1.2", "Keras": "3.14"},
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    assert (told["mpi"], told["total_steps"], told["left_s"]) == ("Open MPI 5.0.7", 100, 8)
    _until_listed(page, 1)
    [row] = _get(page, "/api/jobs")["jobs"]
    assert (row["left_s"], row["goodput"], row["curve"]["of"]) == (8, None, "loss")
    assert (row["metrics"]["loss"], row["is_over"]) == (1.0, False)
    (job.path / "spec.json").write_text("{")
    assert _get(page, f"/api/jobs/{job.name}")["environment"]["versions"] == {}


def test_a_curve_has_few_points_whatever_a_job_wrote(jobs_dir: Path) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    nothing = {"curve": {"of": "rate", "values": []}, "goodput": None}
    assert CurveCache().of(job, is_over=True) == nothing
    # The second time samples begin anew.
    for time_s, samples in enumerate([0, 10, 30, 0, 40]):
        append_json_line(job.metrics, {"time": float(time_s), "step": 1, "samples": samples})
    curve = CurveCache().of(job, is_over=False)["curve"]
    assert curve == {"of": "rate", "values": [10, 20, 40]}
    job.metrics.unlink()
    for step in range(1000):
        append_json_line(job.metrics, {"time": float(step), "step": step, "loss": 1000 - step})
    append_json_line(job.events, {"kind": "summary", "kept": 0.5})
    details = CurveCache().of(job, is_over=True)
    values = details["curve"]["values"]
    assert details["curve"]["of"] == "loss"
    assert (values[0], values[-1], details["goodput"]) == (1000, 1, 0.5)
    assert 20 <= len(values) <= job_api.POINTS + 2


def test_goodput_is_read_once_the_end_is_known(jobs_dir: Path) -> None:
    """The view of a job may be older than its files."""
    job, curves = _job(jobs_dir, 1.0, "a.py"), CurveCache()
    append_json_line(job.events, {"kind": "summary", "kept": 0.5})
    assert curves.of(job, is_over=False)["goodput"] is None
    assert curves.of(job, is_over=True)["goodput"] == 0.5


def test_a_curve_is_not_read_again_without_need(
    jobs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, curves = _job(jobs_dir, 1.0, "a.py"), CurveCache()

    def values(loss: float | None, *, is_over: bool) -> list[float]:
        if loss is not None:
            append_json_line(job.metrics, {"time": loss, "loss": loss})
        return curves.of(job, is_over=is_over)["curve"]["values"]

    assert values(1.0, is_over=False) == [1.0]
    # That of a running job may be some seconds old.
    assert values(2.0, is_over=False) == [1.0]
    assert values(None, is_over=True) == [1.0, 2.0]
    monkeypatch.setattr(job_api, "CURVE_INTERVAL_S", 0.0)
    assert values(3.0, is_over=False) == [1.0, 2.0, 3.0]
    monkeypatch.setattr(job_api, "_curve", None)
    assert values(None, is_over=False) == [1.0, 2.0, 3.0], "nothing has changed"


def test_a_log_is_read_a_part_at_a_time(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    writer = LogWriter(job.log)
    for number in range(1000):
        text = f"{number} {NASTY[number % 5]}"
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

    def ask(**query: Any) -> tuple[list[str], dict[str, Any]]:
        told = _get(page, f"/api/jobs/{job.name}/log", **{"count": 10, **query})
        return [line[5].removeprefix("line ") for line in told["lines"]], told

    texts, last = ask()
    assert texts == [str(n) for n in range(90, 100)]
    texts, earlier = ask(before=last["begin"], ranks="1")
    assert texts == [str(n) for n in range(71, 90, 2)]
    assert ask(before=earlier["begin"], grep="line 8")[0] == ["8"]
    assert ask(begin=last["next"])[1] == {"lines": [], "next": last["next"], "complete": True}
    assert ask(grep="no such text")[1] == {"lines": [], "begin": 0, "next": last["next"]}


def test_of_many_ranks_fewer_rows_are_told(
    jobs_dir: Path, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    path = f"/api/jobs/{job.name}/ranks"
    assert _get(page, path) == {"rows": [], "now": {}}
    for number in range(100):
        row = {"time": float(number), "step": [number] * 4, "own_s": [0.1, 0.2, None, 0.4]}
        append_json_line(job.ranks, row)
    told = _get(page, path, count=50)
    assert told["now"] == row
    assert told["rows"][0] == {"time": 0.0, "own_s": [0.1, 0.2, None, 0.4]}
    assert 40 <= len(told["rows"]) <= 52
    monkeypatch.setattr(job_api, "MOST_RANK_CELLS", 40)
    assert 5 <= len(_get(page, path, count=50)["rows"]) <= 12


def test_of_a_very_long_line_the_page_gets_the_beginning(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    lines = ["x" * MOST_CHARACTERS, "y" * (MOST_CHARACTERS + 7)]
    LogWriter(job.log).append(
        [LogLine(time_s=1.0, rank=0, stream="stdout", text=text) for text in lines]
    )
    for query in ({"begin": 0}, {"count": 5}):
        one, other = _get(page, f"/api/jobs/{job.name}/log", **query)["lines"]
        assert one[5] == lines[0]
        more = " ... 7 more characters: hvdtrain logs prints them"
        assert other[5] == lines[1][:MOST_CHARACTERS] + more
        assert other[0] == one[1]


def test_prometheus_reads_how_far_jobs_are(jobs_dir: Path, page: TestClient) -> None:
    for number, status in enumerate(("running", "ended", "running")):
        code = 0 if status == "ended" else None
        job = _job(jobs_dir, float(number), f'a"{number}.py', phase=status, code=code, ranks=4)
        now = {"time": 1.0, "step": 10 + number, "loss": 0.5, "reduced_bytes_per_s": 7 << 20}
        append_json_line(job.metrics, now)
    _until_listed(page, 3)
    families = text_string_to_metric_families(page.get("/metrics").text)
    found = {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}
    assert found["hvdtrain_jobs", "running"] == 2
    assert found["hvdtrain_jobs", "done"] == 1
    steps = sorted(value for name, value in found.items() if name[0] == "hvdtrain_job_step")
    assert steps == [10, 12], "of those that run"
    assert sum(value for name, value in found.items() if name[0] == "hvdtrain_job_ranks") == 8
    rates = [v for name, v in found.items() if name[0] == "hvdtrain_job_reduced_bytes_per_second"]
    assert rates == [7 << 20] * 2
    assert not [name for name in found if name[0].startswith("hvdtrain_rank")]


def test_prometheus_is_told_of_each_rank_where_that_is_wanted(jobs_dir: Path) -> None:
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
def test_queries_that_mean_nothing_are_refused(jobs_dir: Path, page: TestClient, query) -> None:
    job = _job(jobs_dir, 1.0, "a.py")
    assert page.get(f"/api/jobs/{job.name}/log", params=query).status_code == 400


BODIES = {
    "no-json": b"{",
    "list": b"[]",
    "line": b'{"program": "rm -rf /", "folder": "/"}',
    "numbers": b'{"program": [1], "folder": "/"}',
    "zero": b'{"program": ["a\\u0000b"], "folder": "/"}',
    "nowhere": b'{"program": ["a"], "folder": "/nowhere"}',
    "nothing": b"",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_mean_nothing_are_refused(
    page: TestClient, body: bytes, jobs_dir: Path
) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/api/jobs", "/api/plan"):
        assert page.post(path, content=body, headers=headers).status_code == 400
    assert page.post("/api/jobs", content=b"{}").status_code == 415
    assert page.post("/api/jobs", content=b"x" * (2 << 20), headers=headers).status_code == 413
    assert not jobs_dir.exists()


def test_what_may_run_is_not_said_to_be_told_to_stop(jobs_dir: Path, page: TestClient) -> None:
    job = _job(jobs_dir, 1.0, "train.py")
    _until_listed(page, 1)
    (job.path / "state.json").write_bytes(b"")
    _until(page, job.name, "unknown")
    for way in ("stop", "restart"):
        answer = page.post(f"/api/jobs/{job.name}/{way}", json={})
        assert (answer.status_code, f"{job.name} may be running: " in answer.text) == (400, True)


def test_options_in_a_file_count_as_typed_ones(
    page: TestClient, tmp_path: Path, jobs_dir: Path
) -> None:
    """Slurm's among them; a path starts from the folder of the job, as where it is submitted."""
    (tmp_path / "job.toml").write_text(
        "np = 2\non = 'slurm'\nsbatch = ['--partition=gpu']\n[env]\nMY_KEY = 'hunter2'"
    )
    typed = ["--num-proc=2", "--on=slurm", "--sbatch=--partition=gpu", "--env=MY_KEY=hunter2"]
    plans = []
    for options in (["--config", "job.toml"], typed):
        asked = {"program": ["true"], "options": options, "folder": str(tmp_path)}
        answer = page.post("/api/plan", json=asked)
        assert answer.status_code == 200, answer.text
        plans.append(answer.json()["plan"])
    assert plans[0] == plans[1]
    assert "--partition=gpu" in plans[0]
    missing = {"program": ["true"], "options": ["--config=none.toml"], "folder": str(tmp_path)}
    refused = page.post("/api/plan", json=missing)
    assert (refused.status_code, "none.toml can't be read" in refused.text) == (400, True)
    job = _job(jobs_dir, 1.0, "true", phase="ended", code=0)
    _until_listed(page, 1)
    for way in ("clone", "restart"):
        missing = {"options": ["--config=none.toml"]}
        answer = page.post(f"/api/jobs/{job.name}/{way}", json=missing)
        assert (answer.status_code, "none.toml can't be read" in answer.text) == (400, True)


@pytest.mark.mpi
@pytest.mark.essential
def test_a_real_job_is_planned_started_stopped_and_started_again(
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
    asked = {"program": [*body, *NASTY], "options": options, "folder": str(tmp_path)}
    try:
        assert " -np 1 " in page.post("/api/plan", json=asked).json()["plan"]
        refused = page.post("/api/plan", json={**asked, "options": ["-np", "none"]})
        assert (refused.status_code, "got 'none'" in refused.json()["error"]) == (400, True)
        name = page.post("/api/jobs", json=asked).json()["name"]
        _until(page, name, "running", said=f"{NASTY!r} 3")
        assert page.post(f"/api/jobs/{name}/restart", json={}).status_code == 400
        assert page.post(f"/api/jobs/{name}/stop", json={}).status_code == 200
        _until(page, name, "stopped")
        again = [sys.executable, "-c", "print('again')"]
        changes = {"program": again, "options": ["-x", "MY_KEY=abcd"]}
        other = page.post(f"/api/jobs/{name}/clone", json=changes).json()["name"]
        assert page.post(f"/api/jobs/{name}/restart", json=changes).json() == {"name": name}
        _until(page, other, "done", said="again")
        _until(page, name, "done", said="again")
        assert _get(page, f"/api/jobs/{name}")["attempt"] == 2
        assert not (tmp_path / "pwned").exists()
    finally:
        kill_marked(mark)


def _until(page: TestClient, name: str, status: str, said: str = "") -> None:
    deadline = time.monotonic() + 60
    while True:
        seen = _get(page, f"/api/jobs/{name}")
        log = [line[5] for line in _get(page, f"/api/jobs/{name}/log")["lines"]]
        if seen["status"] == status and (not said or said in log):
            return
        assert time.monotonic() < deadline, (seen, log)
        time.sleep(0.2)
