"""Every setting once: parsing, precedence, errors that say what was received and expected."""

import dataclasses

import pytest

from hvdtrain.config import Settings, check_in_common, read_settings, variable_name, written_default
from hvdtrain.errors import ConfigurationError, MismatchError


def test_an_empty_environment_gives_the_defaults():
    assert read_settings({}) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("collectives", "mpi", "mpi"),
        ("timeout_s", "2.5", 2.5),
        ("chunk_bytes", "4096", 4096),
        ("chunk_bytes", "auto", None),
        ("bucket_bytes", "0", 0),
        ("bucket_bytes", "auto", None),
        ("non_finite", "ignore", "ignore"),
        ("share_gpus", "yes", True),
        ("share_gpus", "0", False),
        ("log_level", "warning", "warning"),
        ("log_level", "ERROR", "error"),
        ("log_level", "TRACE", "debug"),
        ("log_level", "FATAL", "error"),
        ("soft_placement", "0", False),
        ("log_device_placement", "1", True),
        ("compression", "int8", "int8"),
        ("compression", "powersgd:4", "powersgd:4"),
        ("mode", "sync-ps", "sync-ps"),
        ("mode", "towers", "towers"),
        ("mode", "local-sgd", "local-sgd"),
        ("num_ps", "3", 3),
        ("ps_ranks", "3, 2", (2, 3)),
        ("ps_ranks", "last", ()),
        ("ps_ranks", "", ()),
        ("staleness_bound", "0", 0),
        ("staleness_bound", "none", None),
        ("backup_workers", "2", 2),
        ("update_log", "logs", "logs"),
        ("update_log", "none", None),
    ],
)
def test_a_variable_sets_its_setting_and_no_other(name, text, value):
    read = read_settings({variable_name(name): text, "HVDTRAIN_UNKNOWN": "x"})
    assert read == dataclasses.replace(Settings(), **{name: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("collectives", "gloo"),
        ("timeout_s", "0"),
        ("timeout_s", "nan"),
        ("timeout_s", "soon"),
        ("chunk_bytes", "-1"),
        ("chunk_bytes", "0"),
        ("chunk_bytes", "1.5"),
        ("bucket_bytes", "none"),
        ("non_finite", ""),
        ("share_gpus", "maybe"),
        ("log_level", "loud"),
        ("compression", "gzip"),
        ("mode", "async"),
        ("devices_per_rank", "0"),
        ("devices_per_rank", "all"),
        ("sync_every", "0"),
        ("outer_learning_rate", "0"),
        ("outer_learning_rate", "inf"),
        ("outer_momentum", "1"),
        ("outer_momentum", "-0.1"),
        ("num_ps", "0"),
        ("ps_ranks", "2,"),
        ("ps_ranks", "-1"),
        ("ps_ranks", "2,2"),
        ("staleness_bound", "-1"),
        ("staleness_bound", ""),
        ("backup_workers", "-1"),
        ("backup_workers", "none"),
        ("update_log", ""),
    ],
)
def test_what_cannot_be_used_is_shown_with_its_variable(name, text):
    variable = variable_name(name)
    with pytest.raises(ConfigurationError, match=f"{variable}='{text}'.*Unset it"):
        read_settings({variable: text})


_NOT_AHEAD = {
    "allreduce": ({"mode": "allreduce"}, "in mode allreduce there is nothing"),
    "sync-ps": ({"mode": "sync-ps"}, "in mode sync-ps there is nothing"),
    "bound": ({"mode": "async-ps", "staleness_bound": "0"}, "with a staleness bound of 0"),
}


@pytest.mark.parametrize("case", _NOT_AHEAD)
def test_where_workers_wait_for_each_answer(case):
    settings, reason = _NOT_AHEAD[case]
    environ = {variable_name(name): text for name, text in settings.items()}
    assert not read_settings(environ | {"HVDTRAIN_OVERLAP": "0"}).overlap
    with pytest.raises(ConfigurationError, match=f"--overlap .HVDTRAIN_OVERLAP. .*{reason}"):
        read_settings(environ | {"HVDTRAIN_OVERLAP": "1"})


@pytest.mark.parametrize("bound", ["none", "1", "3"])
def test_workers_may_go_on_while_gradients_are_under_way(bound):
    environ = {"HVDTRAIN_MODE": "async-ps", "HVDTRAIN_STALENESS_BOUND": bound}
    assert read_settings(environ | {"HVDTRAIN_OVERLAP": "1"}).overlap
    assert not read_settings(environ).overlap


@pytest.mark.parametrize("entry", dataclasses.fields(Settings), ids=lambda entry: entry.name)
def test_a_default_that_is_shown_can_be_given(entry: "dataclasses.Field[object]"):
    assert entry.metadata["parse"](written_default(entry)) == entry.default


@pytest.mark.parametrize(
    ("mode", "has_servers"),
    [("allreduce", False), ("towers", False), ("async-ps", True), ("sync-ps", True)],
)
def test_the_mode_says_whether_there_are_servers(mode, has_servers):
    assert Settings(mode=mode).has_servers == has_servers


def test_several_devices_a_rank_are_for_towers():
    variables = {"HVDTRAIN_MODE": "towers", "HVDTRAIN_DEVICES_PER_RANK": "4"}
    assert read_settings(variables).towers == 4
    assert read_settings({"HVDTRAIN_MODE": "towers"}).towers == 1
    for mode in ("allreduce", "sync-ps"):
        with pytest.raises(ConfigurationError, match=f"4 devices a rank .* this is mode {mode}"):
            read_settings({**variables, "HVDTRAIN_MODE": mode})


_OF_LOCAL_SGD = {"sync_every": "50", "outer_learning_rate": "0.7", "outer_momentum": "0.9"}


def test_local_sgd():
    given = {variable_name(name): text for name, text in _OF_LOCAL_SGD.items()}
    settings = read_settings({"HVDTRAIN_MODE": "local-sgd", **given})
    assert (settings.sync_every, settings.outer_learning_rate) == (50, 0.7)
    assert (settings.is_local_sgd, settings.has_servers) == (True, False)
    # At one step a round it is what averages of gradients are.
    assert settings.gradients_in_update(3) == 3
    assert not Settings().is_local_sgd


@pytest.mark.parametrize("mode", ["allreduce", "async-ps"])
@pytest.mark.parametrize("name", _OF_LOCAL_SGD)
def test_local_sgd_has_settings_of_its_own(name, mode):
    option = f"--{name.replace('_', '-')} {_OF_LOCAL_SGD[name]} .{variable_name(name)}."
    match = f"{option} is for --mode local-sgd, and this is mode {mode}. Give --mode local-sgd"
    with pytest.raises(ConfigurationError, match=match):
        read_settings({"HVDTRAIN_MODE": mode, variable_name(name): _OF_LOCAL_SGD[name]})


@pytest.mark.parametrize("mode", ["local-sgd", "async-ps"])
@pytest.mark.parametrize("form", ["int8", "powersgd:4"])
def test_only_gradients_that_are_averaged_are_compressed(mode, form):
    with pytest.raises(ConfigurationError, match=rf"--compression {form} .* is mode {mode}"):
        read_settings({"HVDTRAIN_MODE": mode, "HVDTRAIN_COMPRESSION": form})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f"powersgd{rank}", "powersgd:RANK with a whole number") for rank in ("", ":0", ":x")),
        ("fp16:2", "one of none, fp16, bf16, int8, powersgd:RANK"),
    ],
)
def test_how_much_of_gradients_is_sent_must_be_said(text, expected):
    with pytest.raises(ConfigurationError, match=f"COMPRESSION='{text}' .*: expected {expected}"):
        read_settings({"HVDTRAIN_COMPRESSION": text})


def test_ranks_must_be_told_the_same():
    one, other = Settings(mode="local-sgd", sync_every=50), Settings(mode="local-sgd")
    check_in_common([one.in_common, one.in_common])
    told = r"HVDTRAIN_SYNC_EVERY is 50 on rank 0 and 1 on rank 2.*mpirun -x HVDTRAIN_SYNC_EVERY"
    with pytest.raises(MismatchError, match=told):
        check_in_common([one.in_common, one.in_common, other.in_common])
    with pytest.raises(MismatchError, match="HVDTRAIN_MODE is allreduce on rank 0 and local-sgd"):
        check_in_common([Settings().in_common, one.in_common])


def test_every_setting_says_what_it_means():
    for entry in dataclasses.fields(Settings):
        assert len(entry.metadata["help"]) > 20
        assert variable_name(entry.name) == "HVDTRAIN_" + entry.name.upper()
