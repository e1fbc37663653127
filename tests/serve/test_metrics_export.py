from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from hvdtrain.jobs.files import append_json_line
from hvdtrain.jobs.folder import create_job
from hvdtrain.jobs.process_identity import own_identity
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.metrics_export import export


def test_each_rank_is_told_of_where_that_is_wanted(tmp_path: Path) -> None:
    spec = JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0)
    job = create_job(tmp_path, spec)
    job.write_state(JobState(phase="running", launcher=own_identity(), ranks=2))
    for step in (1, 2):
        now = {"step": [step, None], "phase": ["training", ""], "rss_mb": [3, 4], "own_s": [0.5, 1]}
        append_json_line(job.ranks, now)
    text = export(JobIndex(tmp_path), with_ranks=True).decode()
    found = {
        (sample.name, sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "rank" in sample.labels
    }
    assert found == {
        ("hvdtrain_rank_step", "0"): 2,
        ("hvdtrain_rank_own_step_seconds", "0"): 0.5,
        ("hvdtrain_rank_own_step_seconds", "1"): 1,
        ("hvdtrain_rank_memory_bytes", "0"): 3 << 20,
        ("hvdtrain_rank_memory_bytes", "1"): 4 << 20,
    }
